"""Every command that the tool recommends, in an error, a note or a docstring, is one it has."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import tinkex
from tinkex.cli.app import COMMANDS, cli

SOURCE = Path(tinkex.__file__).parent
# In backticks whole, else up to the end of a phrase: `tinkex run stop NAME`, "Next: tinkex chat X".
_QUOTED = re.compile(r"`(?:PROGRAM|tinkex) ((?:[a-z]|-)[^`]*)`")
_BARE = re.compile(r"(?::|[Rr]un|with|next|is) (?:PROGRAM|tinkex) ([a-z][^`\n.,;)(]*)")
_VALUE = "VALUE"


def texts(file: Path) -> Iterator[str]:
    """Strings of a module, f-strings with `VALUE` for what is filled in."""
    tree = ast.parse(file.read_text("utf-8"))
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(_part(part) for part in node.values)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield node.value


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "PROGRAM" if "program()" in ast.unparse(node) else _VALUE


def recommended() -> list[tuple[str, str]]:
    found = set()
    for file in sorted(SOURCE.rglob("*.py")):
        for text in texts(file):
            joined = re.sub(r"\s*\n\s*", " ", text)
            for command in (*_QUOTED.findall(joined), *_BARE.findall(text)):
                if command.split()[0] in COMMANDS or "`" in joined:
                    found.add((file.relative_to(SOURCE).as_posix(), command.strip()))
    return sorted(found)


def problem(command: str) -> str:
    """Why the command line has no such command or option; empty where it has."""
    words = iter(shlex.split(command.replace("'", "").replace('"', "")))
    at: click.Command = cli
    context = click.Context(cli, info_name="tinkex")
    for word in words:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            options = [p for p in (*cli.params, *at.params) if name in (*p.opts, *p.secondary_opts)]
            if not options and name not in ("--help", "-h"):
                return f"{at.name} has no option {name}"
            if options and not equals and not getattr(options[0], "is_flag", False):
                next(words, None)
        elif isinstance(at, click.Group) and word.islower():
            for one in word.split("|"):  # `run rename|note|tag`
                if (found := at.get_command(context, one)) is None:
                    return f"{at.name} has no command {one}"
            at = found
        # else an argument
    return ""


def test_recommendations_are_found():
    commands = [command for _, command in recommended()]
    assert len(commands) > 60
    assert any(command.startswith("train resume") for command in commands)


def test_a_command_that_is_not_there_is_noticed():
    assert problem("run list --all") == ""
    assert problem("run lst") == "run has no command lst"
    assert problem("train sft --lern x") == "sft has no option --lern"


@pytest.mark.parametrize(("file", "command"), recommended())
def test_a_recommended_command_is_one(file, command):
    assert problem(command) == "", f"{file} recommends: tinkex {command}"
