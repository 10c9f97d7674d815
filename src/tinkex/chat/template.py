"""Render a conversation with the chat template of a tokenizer.

A template is a program that came with a model, so it runs in jinja2's sandbox and within two
limits: how long it may take and how much text it may make. The sandbox alone stops neither a loop
in a loop nor a string that doubles itself. Rendering happens in the caller's thread; the limit of
time is held by a trace function, which sees every line of the compiled template.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinkex.errors import InvalidInputError

__all__ = ["MAX_TEXT", "TooLongError", "render"]

MAX_SECONDS = 5.0
MAX_TEXT = 32_000_000
"""Longest text a template may make, and the longest string it may build on the way."""


def render(
    template: str,
    *,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = False,
    max_seconds: float | None = None,
    **options: Any,
) -> str:
    """The text of a conversation.

    Args:
        max_seconds: Less than the limit that is always held.
        options: What some templates read besides, such as Qwen's `enable_thinking`.

    Raises:
        InvalidInputError: The template refuses the messages, fails, or exceeds a limit.
        TooLongError: It takes longer than it may.
    """
    try:
        return _within_limits(
            _compiled(template),
            {
                **(special_tokens or {}),
                **options,
                "messages": list(messages),
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            },
            MAX_SECONDS if max_seconds is None else max_seconds,
        )
    except TooLongError:
        raise
    except TemplateError as exc:
        raise InvalidInputError(f"the chat template refuses this conversation: {exc}") from exc
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise InvalidInputError(
            f"the chat template fails on this conversation: {type(exc).__name__}: {exc}"
        ) from exc
    except (MemoryError, RecursionError) as exc:
        raise InvalidInputError("the chat template needs more than it may have") from exc


class TooLongError(InvalidInputError):
    """A template took longer than it may."""


class _TooMuchError(TemplateError):
    """A limit was reached."""


class _Code(CodeGenerator):
    """Compiles `a ~ b` into a call that can refuse; jinja2's own joins whatever it is given."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for masks; here its text is only text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with everything watched that makes long strings out of short ones."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Code

    def join_texts(self, parts: Sequence[Any]) -> str:
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise _TooMuchError("chat templates may not use powers")
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            length = len(left) if hasattr(left, "__len__") else len(right)
            _check_length(length * (left if _is_number(left) else right))
        if operator == "%" and isinstance(left, str):
            # A width or precision in the format makes any length out of nothing.
            raise _TooMuchError("chat templates may not format with %")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        grows = isinstance(obj, str) and attr in _GROWING
        return not grows and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` counts as growing; jinja2 would hand out a safe one before it asks."""

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(function, "__self__", None)
        if isinstance(text, str) and function.__name__ == "replace":
            return _replace(text, *args)
        if isinstance(text, str) and function.__name__ == "join":
            return _join(list(args[0]), text)
        return super().call(context, function, *args, **kwargs)


_GROWING = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"}
"""Methods of text that make any length out of a number; no chat template needs them."""


def _check_length(length: float) -> None:
    if length > MAX_TEXT:
        raise _TooMuchError(f"a text of more than {MAX_TEXT} characters")


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    _check_length(len(text) + (text.count(old) + 1) * max(len(new) - len(old), 0))
    return text.replace(old, new, count)


def _join(values: Sequence[Any], separator: str = "", attribute: str | None = None) -> str:
    texts = [str(value if attribute is None else value[attribute]) for value in values]
    _check_length(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=min(indent or 0, 16) or None, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form[:200])


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters.update(tojson=_to_json, replace=_replace, join=_join)
    for name in ("center", "format", "wordwrap", "xmlattr", "pprint"):
        environment.filters.pop(name, None)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _within_limits(template: Template, variables: Mapping[str, Any], max_seconds: float) -> str:
    ends_at = time.monotonic() + max_seconds
    seen = 0

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen % 1024 == 0:
            if time.monotonic() > ends_at:
                raise TooLongError(f"the chat template ran for more than {max_seconds:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        parts: list[str] = []
        size = 0
        for part in template.generate(**variables):
            size += len(part)
            _check_length(size)
            parts.append(part)
    finally:
        sys.settrace(before)
    return "".join(parts)
