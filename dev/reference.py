"""Write docs/cli.md, docs/settings.md, docs/api and the tables of declarations from the code.

Run `python dev/reference.py` after changing a command, a setting or a declaration of
`tinkex.contract`; `--check` only compares, and is what the tests call.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import api_pages
import click
import fit_table
from endpoints_page import endpoints_page

if TYPE_CHECKING:
    from tinkex.contract.settings import Setting

ROOT = Path(__file__).parents[1]
TABLES = ("losses.md", "sampling.md", "training-loop.md", "does-it-fit.md")
HEAD = "<!-- Written by dev/reference.py; change the code, not this page. -->\n"


def leaves(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every command with its help text, groups before their verbs."""
    with click.Context(
        command,
        info_name=" ".join(path),
        max_content_width=100,
        terminal_width=100,
        help_option_names=["-h", "--help"],
    ) as context:
        if not isinstance(command, click.Group):
            yield " ".join(path), command.get_help(context)
            return
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from leaves(found, (*path, name))


def cli_page() -> str:
    from tinkex.cli.app import cli

    parts = [HEAD, "# Command line\n"]
    parts.append(
        "Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong "
        "usage, 130 interrupted.\nTab completion: `tinkex completion bash|zsh|fish`.\n"
    )
    for name, text in leaves(cli, ("tinkex",)):
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## {name}\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


def settings_page() -> str:
    server = fields(ROOT / "src/tinkex/server/process/config.py", "ServerConfig")
    client = fields(ROOT / "src/tinkex/client/config.py", "ClientConfig")
    return "\n".join(
        [
            HEAD,
            "# Settings\n",
            "## Server\n",
            "Keys of the TOML file (`tinkex serve --config`), environment variables (such as\n"
            "`TINKEX_SERVER_PORT`) and, where there is one, a flag. The later wins.\n",
            table(server),
            "## Client\n",
            "Fields of `tinkex.ClientConfig`. `ClientConfig.from_env(...)` reads the environment,\n"
            "numbers as `TINKEX_CLIENT_TIMEOUT_S` and so on, for `ServiceClient(config=...)`.\n",
            table(client),
        ]
    )


def table(rows: list[tuple[str, str, str]]) -> str:
    lines = ["| name | default | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {default} | {text} |" for name, default, text in rows]
    return "\n".join(lines) + "\n"


def fields(file: Path, name: str) -> list[tuple[str, str, str]]:
    """(name, default, docstring) of each field of a config class, read from its source."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    rows = []
    for node, after in zip(found.body, [*found.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rows.append((node.target.id, _default(node.value), _docstring(after)))
    return rows


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Constant | ast.Tuple | ast.BinOp):
        return f"`{ast.unparse(value)}`"
    return "-"


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split()).replace("|", "\\|")
    return ""


# ------------------------------------------------------------------------------ declarations


def with_tables(page: str) -> str:
    """A page whose tables between `<!-- NAME: ... -->` and `<!-- end -->` are written anew."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, write in (
        ("losses", loss_table),
        ("optimizers", optimizer_table),
        ("sampling parameters", sampling_table),
        ("fit on a GPU", fit_table.gpu_table),
        ("fit on a CPU", fit_table.cpu_table),
    ):
        source = "engine" if name.startswith("fit") else "contract"
        head = f"<!-- {name}: written by dev/reference.py from tinkex.{source} -->\n"
        if head in text:
            before, _, rest = text.partition(head)
            text = f"{before}{head}{write()}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def loss_table() -> str:
    from tinkex.contract.losses import LOSSES

    lines = [
        "| loss | per token | needs | takes | `loss_fn_config` | a [teacher](#a-teacher) is |",
        "|---|---|---|---|---|---|",
    ]
    for loss in LOSSES.values():
        says = loss.says + (f" ([source]({loss.source}))" if loss.source else "")
        needs, takes = (", ".join(f"`{x.name}`" for x in row) for row in (loss.needs, loss.takes))
        settings = _settings(loss.settings)
        row = f"`{loss.name}` | {says} | {needs} | {takes} | {settings} | {loss.teacher}"
        lines.append(f"| {row} |")
    return "\n".join(lines) + "\n"


def optimizer_table() -> str:
    from tinkex.contract.optimizers import OPTIMIZERS
    from tinkex.contract.settings import settings_of

    lines = ["| optimizer | what it does | parameters |", "|---|---|---|"]
    for name, declared in OPTIMIZERS.items():
        says = (declared.__doc__ or "").splitlines()[0]
        lines.append(f"| `{name}` | {says} | {_settings(settings_of(declared))} |")
    return "\n".join(lines) + "\n"


def sampling_table() -> str:
    from tinkex.contract.sampling import DrawSettings
    from tinkex.contract.settings import settings_of

    lines = ["| `SamplingParams` | default | range | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{x.name}` | {_shown(x.default)} | {x.rule} | {x.says} |"
        for x in settings_of(DrawSettings)
    ]
    return "\n".join(lines) + "\n"


def _settings(settings: Sequence[Setting]) -> str:
    from tinkex.contract.settings import REQUIRED

    return "<br>".join(
        f"`{x.name}` {'required' if x.default is REQUIRED else _shown(x.default)}, {x.rule}"
        for x in settings
    )


def _shown(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"


def main() -> int:
    pages = {"cli.md": cli_page(), "settings.md": settings_page()}
    pages |= {name: with_tables(name) for name in TABLES}
    pages["endpoints.md"] = HEAD + "\n" + endpoints_page()
    if "--check" not in sys.argv:  # `make docs` writes these anew, so they cannot be stale there
        pages |= api_pages.pages()
    stale = []
    for name, text in pages.items():
        file = ROOT / "docs" / name
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"stale: {', '.join(stale)}; run python dev/reference.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
