"""What each public parameter means: from a docstring, a field's own text, or the glossary.

A parameter is explained once, as near to it as it goes: in the `Args:` of its function or class, in
the docstring under its field, in the declaration of `tinkex.contract`. Names that mean the same
everywhere (`base_model`, `limit`, `options`) are explained in glossary.txt instead of in every
docstring; `Class.name` there is of one class, `Class.method.name` of one call. The pages of
docs/api show what is found here; tests/docs/test_api.py fails for a parameter without one.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"^(\*{0,2}\w+)(?: \([^)]*\))?: (.+)$")


def args_of(doc: str | None) -> dict[str, str]:
    """The entries of the `Args:` in a docstring."""
    lines = inspect.cleandoc(doc or "").splitlines()
    found: dict[str, str] = {}
    inside, name = False, ""
    for line in lines:
        if line.strip() == "Args:":
            inside = True
        elif inside and line and not line.startswith(" "):
            entry = _ENTRY.match(line)  # `Args:` as the first line has no indent below it
            if lines[0].strip() != "Args:" or entry is None:
                break
            name, text = entry[1].lstrip("*"), entry[2]
            found[name] = text
        elif inside and (entry := _ENTRY.match(line.strip())) and _indent(line) <= 4:
            name = entry[1].lstrip("*")
            found[name] = entry[2]
        elif inside and name and line.strip():
            found[name] += " " + line.strip()
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@functools.cache
def fields_of(owner: type) -> dict[str, str]:
    """The docstrings under the fields of a class and of its bases."""
    found: dict[str, str] = {}
    for one in reversed(owner.__mro__):
        if not one.__module__.startswith("tinkex"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body  # type: ignore[attr-defined]
        for field, text in zip(body, body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def callables_of(value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a class by name, the constructor as the empty one; or the function."""
    if not inspect.isclass(value):
        yield "", value
        return
    if value.__init__ is not object.__init__:
        yield "", value.__init__
    for name in dir(value):
        found = inspect.getattr_static(value, name)
        if isinstance(found, classmethod | staticmethod):
            found = found.__func__
        # An `_async` form takes what the other takes.
        if name[0] != "_" and not name.endswith("_async") and inspect.isfunction(found):
            module = found.__module__ or ""
            if module.startswith("tinkex"):
                yield name, found


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of what a function takes, without `self`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    return [name for name in signature.parameters if name not in ("self", "cls", "_cls")]


@functools.cache
def glossary() -> dict[str, str]:
    """The sentences of glossary.txt, by `name`, `Class.name` or `Class.method.name`."""
    lines = (Path(__file__).parent / "glossary.txt").read_text(encoding="utf-8").splitlines()
    entries = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name: text for name, _, text in entries}


def at_its_place(owner: Any, function: Callable[..., Any], name: str) -> str:
    """The explanation of a parameter in a docstring: of its function, its class or its field."""
    said = args_of(function.__doc__).get(name, "")
    if said or not inspect.isclass(owner):
        return said
    return args_of(owner.__doc__).get(name) or fields_of(owner).get(name, "")


def in_docstring(owner: Any, name: str) -> str:
    """The docstring under a field, or its line in the docstring of the class."""
    return fields_of(owner).get(name) or args_of(owner.__doc__).get(name) or ""


def by_glossary(owner: Any, name: str) -> str:
    bases = owner.__mro__ if inspect.isclass(owner) else (owner,)
    of_class = (glossary().get(f"{one.__name__}.{name}") for one in bases)
    return next((text for text in of_class if text), "") or glossary().get(name, "")


def unsaid(owner: Any) -> dict[tuple[str, str], str]:
    """Explanations of the parameters that no docstring explains, by (parameter, method).

    The method is empty for those that mean the same in all calls of the class.
    """
    found = {}
    for method, function in callables_of(owner):
        for name in parameters(function):
            if at_its_place(owner, function, name):
                continue
            of_call = by_glossary(owner, f"{method}.{name}") if method else ""
            found[name, method if of_call else ""] = of_call or by_glossary(owner, name)
    return dict(sorted(found.items()))
