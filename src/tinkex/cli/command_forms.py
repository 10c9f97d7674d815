"""What commands take, as data: the console makes its forms from it.

The declaration is the command's own: an option that is added to a recipe is in its form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from tinkex.cli.state import shared_options

Defaults = Callable[[click.Parameter], Any]
_OF_A_TERMINAL = frozenset({"show_plot", "help"})


def command_form(command: click.Command, default_of: Defaults) -> dict[str, Any]:
    """`says` and `fields` of a command: arguments first, then options as they were declared."""
    left_out = _OF_A_TERMINAL | {str(param.name) for param in shared_options()}
    shown = [p for p in command.params if p.name not in left_out and not getattr(p, "hidden", 0)]
    shown.sort(key=lambda param: not isinstance(param, click.Argument))
    return {
        "says": (command.help or "").strip(),
        "fields": [_field(param, default_of(param)) for param in shown],
    }


def _field(param: click.Parameter, default: Any) -> dict[str, Any]:
    kind = param.type
    is_flag = isinstance(param, click.Option) and param.is_flag
    is_yes_or_no = isinstance(kind, click.types.BoolParamType)
    return {
        "name": param.name,
        # The long spelling: it says what it means in the command that is shown.
        "flag": max(param.opts, key=len) if isinstance(param, click.Option) else None,
        "kind": "flag" if is_flag else "bool" if is_yes_or_no else kind.name,
        "choices": list(kind.choices) if isinstance(kind, click.Choice) else [],
        "is_required": param.required,
        "is_multiple": param.multiple,
        "default": default if isinstance(default, str | int | float) else None,
        "says": getattr(param, "help", None) or "",
    }


def forms_of(commands: Mapping[str, click.Command], default_of: Defaults) -> dict[str, Any]:
    return {name: command_form(command, default_of) for name, command in commands.items()}
