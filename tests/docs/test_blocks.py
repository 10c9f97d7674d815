"""Every code block of README and docs runs, or at least uses names and options that exist.

What a block's info string says decides. `python` and `console` run on the default model, in order,
and what they print is held against the output below them (`dev/doc_outputs.py`). `python hosted`
and `console setup` need a network, an account or a free port, so only their syntax, names and
options are checked. `toml` is loaded as a server's settings, `json` is parsed. A page with another
kind of block fails.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_INFOS = {
    "python",
    "python hosted",
    "console",
    "console setup",
    "toml",
    "json",
    "text",
}


def _doc_outputs():
    spec = importlib.util.spec_from_file_location("doc_outputs", ROOT / "dev" / "doc_outputs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


doc_outputs = _doc_outputs()
Block = doc_outputs.Block
ALL = [block for page in PAGES for block in doc_outputs.blocks(page)]


def of(*infos: str) -> list[Block]:
    return [block for block in ALL if block.info in infos]


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_every_block_says_what_it_is(block):
    assert block.info in _INFOS


@pytest.mark.parametrize("block", of("python", "console"), ids=lambda block: block.where)
def test_a_block_that_prints_shows_what(block):
    """`python dev/doc_outputs.py PAGE` runs a page and writes what its blocks print below them."""
    if block.info == "console" or _prints(ast.parse(block.code).body):
        assert block.output is not None, f"{block.where}: no output below it"


def _prints(body: list[ast.stmt]) -> bool:
    """Whether these statements print by themselves: what a function would print does not count."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        parts = [part for name in ("body", "orelse") for part in getattr(node, name, [])]
        if parts and _prints(parts):
            return True
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("print("):
            return True
    return False


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.page == page for block in of("python", "console"))],
    ids=lambda page: page.name,
)
def test_a_page_shows_what_its_blocks_print(page, default_model_dir):
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev" / "doc_outputs.py"), "--check", str(page)],
        env={**os.environ, "TINKEX_CACHE": str(default_model_dir.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


ID = "6bbb56e1-f895-4efd-8def-72ac7872b87a"
OTHER_ID = "b4b0f5e5-dfac-4c07-8185-b17f47fd9aff"


@pytest.mark.parametrize(
    ("output", "printed"),
    [
        (f"State  tinker://{ID}:train:0\n", f"State  tinker://{OTHER_ID}:train:0"),
        ("made 2026-11-15 18:40:53.791472+00:00\n", "made 2026-11-18 07:00:00+00:00"),
        ("Loss   5.445\n", "Loss        5.44"),
        ("disk  ... free\nend\n", "disk 54.4 GB free\nend"),
        ("first\n...\nlast\n", "first\nsecond\nthird\nlast"),
        ("first\n...\n", "first\nsecond\nthird"),
        (None, ""),
    ],
)
def test_what_varies_from_run_to_run_may_differ(output, printed):
    assert doc_outputs.is_true(output, printed)


@pytest.mark.parametrize(
    ("output", "printed"),
    [
        ("3 of 11\n", "3 of 12"),
        ("Loss 5.445\n", "Loss 5.9"),
        ("one\ntwo\n", "one"),
        ("config(a=1)\n", "config(a=1, model=None)"),
        ("first\n...\nlast\n", "first\nsecond"),
        (None, "a line"),
    ],
)
def test_what_stays_the_same_from_run_to_run_may_not_differ(output, printed):
    assert not doc_outputs.is_true(output, printed)


def test_many_marks_before_a_difference_are_answered_at_once():
    """In a process that can be ended: an expression without an end cannot be interrupted."""
    lines = 15 * ["torch  ...  ok  ... GB, loss 5.445\n"]
    printed = 15 * ["torch  2.13.0 of 2026  ok  54.4 of 60.5 GB, loss 5.44\n"]
    shown = "".join([*lines, "end\n"])
    assert doc_outputs.is_true(shown, "".join([*printed, "end"]))
    code = "import sys, doc_outputs; sys.exit(doc_outputs.is_true(sys.argv[1], sys.argv[2]))"
    subprocess.run(
        [sys.executable, "-c", code, shown, "".join([*printed, "another end"])],
        cwd=ROOT / "dev",
        timeout=500,
        check=True,
    )


@pytest.mark.parametrize("block", of("console setup"), ids=lambda block: block.where)
def test_commands_that_do_not_run_here_have_real_names_and_options(block):
    for command in block.commands:
        # What a shell would put in or take away: a path from a file, an output to a file.
        plain = re.sub(r"\$\([^)]*\)", "tinker://RUN/sampler_weights/NAME", command)
        plain = re.sub(r"\s>\s*\S+$", "", plain)
        plain = re.sub(r"\s&($|\s.*)", "", plain)  # in the background
        if "<<" in plain:
            continue
        words = [w for w in shlex.split(plain, comments=True) if not re.match(r"[A-Z_]+=", w)]
        if words[:2] == ["tinkex", "export"]:  # There is no run here whose name could be found.
            words[2] = "tinker://RUN/sampler_weights/NAME"
        if words[:1] == ["tinkex"]:
            parse(words[1:])
        elif words[:2] == ["make"] or words[:1] == ["make"]:
            targets = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{re.escape(words[1])}:", targets, re.M), command
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), command


def parse(words: list[str]) -> None:
    """Parse a command line without running it; a wrong name or option raises."""
    from tinkex.cli.app import cli

    command: click.Command = cli
    with contextlib.ExitStack() as stack:
        parent = None
        while isinstance(command, click.Group):
            context = stack.enter_context(click.Context(command, parent=parent))
            found = command.get_command(context, words[0])
            assert found is not None, f"no command {words[0]!r}"
            command, parent, words = found, context, words[1:]
        existing = [word for word in words if "/" in word and not word.startswith(("-", "tinker"))]
        for word in existing:  # A path that must exist stands for the reader's own.
            if command.name in ("import", "rollouts", "console"):
                Path(word).mkdir(parents=True, exist_ok=True)
        command.make_context(command.name, list(words), parent=parent)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("block", of("python hosted"), ids=lambda block: block.where)
def test_python_that_does_not_run_here_uses_names_that_exist(block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinkex"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{block.where}: {alias.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "tinkex":
                assert hasattr(importlib.import_module("tinkex"), node.attr), node.attr


def test_settings_files_load(tmp_path):
    from tinkex.server.process.config import load_config

    for block in of("toml"):
        file = tmp_path / "server.toml"
        file.write_text(block.code)
        config = load_config(file=file, flags={}, env={})
        for name, value in tomllib.loads(block.code).items():
            shown = getattr(config, name)
            assert str(shown) == str(value) or list(shown) == value, block.where


@pytest.mark.parametrize("block", of("json"), ids=lambda block: block.where)
def test_json_parses(block):
    json.loads(block.code)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "llms.txt"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
