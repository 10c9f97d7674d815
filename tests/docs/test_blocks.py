"""Every code block of README and docs runs, or at least uses names and options that exist.

What a block's info string says decides: `python` runs against a toy server, in order, one namespace
per page; `console` runs its `$ tinkex` lines; `python hosted` and `console setup` need a network,
an account or a free port, so only their syntax, names and options are checked; `toml` is loaded as
a server's settings, `json` is parsed. A page with another kind of block fails.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
_INFOS = {
    "python",
    "python hosted",
    "console",
    "console setup",
    "toml",
    "json",
    "text",
}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    info: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 2, found[1].strip(), found[2])
        for found in _FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def of(*infos: str) -> list[Block]:
    return [block for block in ALL if block.info in infos]


def commands(block: Block) -> list[str]:
    """The `$ ...` lines, continuation lines joined."""
    joined = block.code.replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_every_block_says_what_it_is(block):
    assert block.info in _INFOS


@pytest.mark.parametrize("block", of("python", "console"), ids=lambda block: block.where)
def test_a_block_that_prints_shows_what(block):
    """`python dev/doc_outputs.py PAGE` runs a page and writes what its blocks print below them."""
    prints = block.info == "console" or _prints(ast.parse(block.code).body)
    if prints:
        lines = block.page.read_text(encoding="utf-8").splitlines()
        after = block.line - 1 + block.code.count("\n") + 1
        assert lines[after : after + 2] == ["", "```text"], f"{block.where}: no output below it"


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


@pytest.fixture
def newcomer(toy_server, tmp_path, monkeypatch):
    """A folder with the files the pages speak of, and a server to talk to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", toy_server)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    pairs = [("Who are you?", "Captain Tinker!"), ("Where to?", "To the sea!")] * 3
    _write_rows("conversations.jsonl", ({"prompt": q, "completion": a} for q, a in pairs))
    _write_rows(
        "preferences.jsonl", ({"prompt": q, "chosen": a, "rejected": "No."} for q, a in pairs)
    )
    Path("examples").symlink_to(ROOT / "examples")
    Path("rewards.py").write_text(
        "def prompts():\n    return [{'prompt': 'Say yes'}, {'prompt': 'Say no'}]\n\n"
        "def reward(completion, row):\n    return float(len(completion) % 2)\n"
    )
    return tmp_path


def _write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.page == page for b in of("python"))],
    ids=lambda p: p.name,
)
@pytest.mark.usefixtures("default_model_dir", "newcomer")
def test_the_python_of_a_page_runs_in_order(page):
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in of("python"):
        if block.page == page:
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)


@pytest.mark.parametrize("block", of("console"), ids=lambda block: block.where)
@pytest.mark.usefixtures("default_model_dir", "newcomer")
def test_the_commands_of_a_block_succeed(block, capsys):
    from tinkex.cli.app import run

    for command in commands(block):
        words = shlex.split(command, comments=True)
        assert words[0] == "tinkex", f"{block.where}: only tinkex runs here; else `console setup`"
        assert run(words[1:]) == 0, f"{block.where}: {command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("block", of("console setup"), ids=lambda block: block.where)
def test_commands_that_do_not_run_here_have_real_names_and_options(block):
    for command in commands(block):
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
