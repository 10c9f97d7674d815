"""Reward functions and environments of the user, loaded from the files that an option names.

The file is a program of the user's own and runs as such: whatever it raises is told with its name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tinkex.errors import ConfigError


def load_reward(name: str) -> tuple[Any, Callable[..., Any], float]:
    """`FILE.py:FUNCTION` or `FILE.py:FUNCTION=WEIGHT` -> (module, function, weight)."""
    file, colon, attribute = name.rpartition(":")
    attribute, equals, weight = attribute.partition("=")
    called = f"{file}{colon}{attribute}"
    try:
        number = float(weight) if equals else 1.0
    except ValueError:
        raise click.UsageError(
            f"'{weight}' is no weight; write FILE.py:FUNCTION=WEIGHT, such as {called}=0.5."
        ) from None
    return *load_function(called), number


def load_function(name: str) -> tuple[Any, Callable[..., float]]:
    """`FILE.py:FUNCTION` -> (module, function)."""
    file, colon, attribute = name.rpartition(":")
    path = Path(file)
    if not colon or path.suffix != ".py":
        raise click.UsageError(f"'{name}' is not a function; write FILE.py:FUNCTION.")
    if not path.is_file():
        raise click.UsageError(f"There is no file {path}.")
    # Under a name of our own: a file called like a module, such as math.py, replaces none.
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise ConfigError(f"{path} does not load: {type(exc).__name__}: {exc}") from exc
    function = getattr(module, attribute, None)
    if not callable(function):
        raise click.UsageError(f"{path} has no function '{attribute}'.")
    return module, function
