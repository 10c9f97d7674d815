"""The pages of docs/api: every public name, with fields and defaults as the code has them.

Classes with methods become `:::` lines, which mkdocs fills from their docstrings when the site is
built. Types of data become tables here, since their fields and defaults are declared once in
`tinkex.contract` and only a running Python knows them. `tests/docs/test_api.py` checks that no
public name is left out.
"""

from __future__ import annotations

import enum
import inspect
import pydoc
import re
import types as python_types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import explanations
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import tinkex
import tinkex.errors
import tinkex.regularizers
import tinkex.types
from tinkex.contract import optimizers
from tinkex.contract.sampling import DrawSettings
from tinkex.contract.settings import settings_of

CLIENTS = (
    "ServiceClient",
    "TrainingClient",
    "SamplingClient",
    "RestClient",
    "AdminClient",
    "RecoveringTrainingClient",
)
HELPERS = (
    "APIFuture",
    "FutureStatus",
    "TrainStepResult",
    "ClientConfig",
    "RetryConfig",
    "RequestOptions",
    "QueueStateObserver",
    "Timeout",
    "RecoveryPolicy",
    "RecoveryEvent",
    "RunMonitor",
    "LossHandle",
    "PerDatumLossFn",
)
MODULES = ("auth", "events", "metrics")
RECIPES = {
    "sft": ("SftConfig", "train"),
    "dpo": ("DpoConfig", "train"),
    "rl": ("RlConfig", "train"),
    "distill": ("DistillConfig", "train"),
    "learning_rate": ("get_lr",),
    "rewards": ("RewardFunction",),
    "episodes": ("Turn", "Environment", "Episode", "Question", "Player", "as_task"),
    "render": ("Renderer", "Rendered"),
    "options": ("RunOptions",),
    "loop": ("Result",),
}
GROUPS = {
    "data": "Training data",
    "training": "Training",
    "sampling": "Sampling",
    "service": "Sessions, models and checkpoints",
    "account": "Accounts, billing and telemetry",
    "fields": "Identifiers",
}


def pages() -> dict[str, str]:
    """Every page by its name under docs/."""
    return {
        "api/clients.md": clients_page(),
        "api/helpers.md": helpers_page(),
        "api/types.md": types_page(),
        "api/errors.md": errors_page(),
        "api/regularizers.md": regularizers_page(),
        "api/recipes.md": recipes_page(),
    }


def clients_page() -> str:
    text = "Every call returns an [`APIFuture`](helpers.md): wait with `.result()`, or `await` it."
    return _page("Clients", text, (f"tinkex.{name}" for name in CLIENTS))


def helpers_page() -> str:
    text = "Futures, configuration, recovery, and the modules `tinkex.auth`, `events`, `metrics`."
    owners = [f"tinkex.{name}" for name in HELPERS if name not in ("Timeout", "PerDatumLossFn")]
    page = _page("Futures and settings", text, owners)
    page += (
        "\n## `tinkex.Timeout`\n\n`httpx.Timeout`: seconds to connect, read, write and wait for a "
        "free connection.\n\n## `tinkex.PerDatumLossFn`\n\nThe type of a custom loss that is "
        "traced: a function of one datum's logprobs and inputs. See "
        "[custom losses](../custom-losses.md).\n"
    )
    for module in MODULES:
        page += f"\n::: {_SUBMODULES[module]}\n"
    return page


def errors_page() -> str:
    text = "What each one means and what to do about it: [errors](../errors.md)."
    names = [
        name
        for name, value in vars(tinkex.errors).items()
        if inspect.isclass(value) and value.__module__ == "tinkex.errors" and name[0] != "_"
    ]
    return _page("Errors", text, (f"tinkex.errors.{name}" for name in names))


def regularizers_page() -> str:
    text = "How to use them: [regularizers](../regularizers.md)."
    names = tinkex.regularizers.__all__
    return _page("Regularizers", text, (f"tinkex.regularizers.{name}" for name in names))


def recipes_page() -> str:
    text = (
        "The loops behind `tinkex train`. Call them from Python, or copy the files: "
        "`src/tinkex/recipes`."
    )
    names = (f"tinkex.recipes.{module}.{name}" for module, of in RECIPES.items() for name in of)
    return _page("Recipes", text, names)


def _page(title: str, text: str, names: Iterable[str]) -> str:
    return f"{HEAD}\n# {title}\n\n{text}\n" + "".join(_entry(name) for name in names)


def _entry(path: str) -> str:
    """A class or function, and the parameters that its docstrings leave out."""
    lines = [
        f"| `{name}`{f' of `{method}`' if method else ''} | {_escaped(says)} |"
        for (name, method), says in explanations.unsaid(pydoc.locate(path)).items()
    ]
    head = ["", "Parameters, unless a call says otherwise:", "", "| | |", "|---|---|"]
    return f"\n::: {path}\n" + ("\n".join([*head, *lines, ""]) if lines else "")


HEAD = "<!-- Written by dev/reference.py; change the code, not this page. -->\n"
_SUBMODULES = {"auth": "tinkex.auth", "events": "tinkex.events", "metrics": "tinkex.client.metrics"}


# ------------------------------------------------------------------------------ types


def types_page() -> str:
    parts = [HEAD, "# Types\n"]
    parts.append(
        "All of `tinkex.types`; those marked *top level* are also `tinkex.NAME`. Messages are "
        "pydantic models,\nvalues of training data are frozen and hold numpy arrays.\n"
    )
    for group, title in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in sorted(tinkex.types.__all__):
            value = getattr(tinkex.types, name)
            if tinkex.types._OWNER[name].partition(".")[0] == group:
                mark = " *top level*" if name in tinkex.__all__ else ""
                parts.append(f"### {name}\n\n{_described(value)}{mark}\n")
                if table := _table(value):
                    parts.append(table)
    return "\n".join(parts)


def _described(value: Any) -> str:
    if value is str:
        return "A plain `str`."
    if inspect.isclass(value) or inspect.isfunction(value):
        text = inspect.cleandoc(value.__doc__ or "")
        return _escaped(text.partition("\n\nRaises:")[0]) or _what(value)
    return f"`{_shown_type(value)}`"


def _what(value: Any) -> str:
    return "An enumeration." if issubclass(value, enum.Enum) else "A message."


def _table(value: Any) -> str:
    if not inspect.isclass(value):
        return ""
    if issubclass(value, enum.Enum):
        return "Values: " + ", ".join(f"`{member.value}`" for member in value) + ".\n"
    rows = list(_fields(value))
    if not rows:
        return ""
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    lines += [f"| `{name}` | `{kind}` | {default} | {says} |" for name, kind, default, says in rows]
    return "\n".join(lines) + "\n"


def _fields(value: type) -> Iterator[tuple[str, str, str, str]]:
    if issubclass(value, BaseModel):
        for name, field in value.model_fields.items():
            says = f"{meaning(value, name, field)} {_bounds(value, name, field)}".strip()
            yield name, _shown_type(field.annotation), _default(field), says
        return
    if value.__init__ is object.__init__ or value is typing.Any:
        return
    for name, parameter in inspect.signature(value.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = str(parameter.annotation).replace(" | ", " or ") if parameter.annotation else "Any"
        default = "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        yield name, _short(kind), default, meaning(value, name)


def _declared(value: type) -> dict[str, str]:
    """What `tinkex.contract` says about the fields of a type that it declares."""
    declared = {
        "AdamParams": optimizers.AdamParams,
        "MuonParams": optimizers.MuonParams,
        "LionParams": optimizers.LionParams,
        "SamplingParams": DrawSettings,
    }.get(value.__name__)
    if declared is None:
        return {}
    return {
        setting.name: f"{setting.says} {str(setting.rule).capitalize()}.".strip()
        for setting in settings_of(declared)
    }


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        made = field.default_factory()  # type: ignore[call-arg]
        return f"`{made!r}`" if made in ([], {}, ()) else "made anew"
    default = field.default
    if isinstance(default, enum.Enum):
        return f"`{default.value}`"
    text = repr(default)
    return "not sent" if text.startswith("<") or "Sentinel" in text else f"`{text}`"


def meaning(value: type, name: str, field: FieldInfo | None = None) -> str:
    """What a field means, without its bounds; empty where nothing says so."""
    if declared := _declared(value).get(name):
        return declared
    said = explanations.in_docstring(value, name)
    if field is not None and not said:
        marks = [mark for mark in field.metadata if isinstance(mark, str)]
        said = " ".join(filter(None, (*marks, field.description)))
    return _escaped(said or explanations.by_glossary(value, name))


def _bounds(value: type, name: str, field: FieldInfo) -> str:
    if name in _declared(value):  # their texts end with their bounds
        return ""
    between = (mark for mark in field.metadata if type(mark).__name__ == "Between")
    return " ".join(f"{str(mark).capitalize()}." for mark in between)


def _shown_type(annotation: Any) -> str:
    """A type as a person writes it: no Annotated, no module paths."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _shown_type(arguments[0])
    if origin in (typing.Union, python_types.UnionType):
        return " or ".join(_shown_type(one) for one in arguments)
    if origin is typing.Literal:
        return " or ".join(repr(one) for one in arguments)
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        inside = ", ".join("..." if one is ... else _shown_type(one) for one in arguments)
        return f"{name}[{inside}]"
    if annotation is type(None):
        return "None"
    return _short(getattr(annotation, "__name__", str(annotation)))


def _short(text: str) -> str:
    return re.sub(r"\b(?:typing|tinkex(?:\.\w+)+|collections\.abc|builtins)\.(?=\w)", "", text)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|") if "\n" not in text else text
