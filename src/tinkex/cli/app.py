"""The root of the command line: which commands exist, and how a run of one ends.

A command's module is imported only when that command runs, so `tinkex --help` and shell completion
cost milliseconds. This module maps every outcome to an exit code (0 done, 1 failed, 2 wrong usage,
130 interrupted) and keeps tracebacks from people whose mistake was not a bug of ours. It knows no
client and no command's options.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

from tinkex import __version__
from tinkex.cli.messages import words
from tinkex.cli.state import State, shared_options

# name -> (module:attribute, the line `tinkex --help` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "auth": ("tinkex.cli.commands.auth:auth", "Log in, log out, and say who you are."),
    "billing": ("tinkex.cli.commands.billing:billing", "Tokens used and checkpoint storage."),
    "chat": ("tinkex.cli.commands.chat:chat", "Talk to a base model or a checkpoint."),
    "checkpoint": (
        "tinkex.cli.commands.checkpoint:checkpoint",
        "List, publish, download and delete.",
    ),
    "cluster": ("tinkex.cli.commands.cluster:cluster", "Look at the Ray cluster of a server."),
    "completion": ("tinkex.cli.commands.completion:completion", "Print a shell completion script."),
    "conformance": (
        "tinkex.cli.commands.conformance:conformance",
        "Test a server against the contract.",
    ),
    "console": ("tinkex.cli.commands.console:console", "Look at runs in a browser."),
    "disk": ("tinkex.cli.commands.disk:disk", "What Tinkex keeps on this machine, by run."),
    "doctor": ("tinkex.cli.commands.doctor:doctor", "Check this machine and a server."),
    "export": (
        "tinkex.cli.commands.export:export",
        "Write a checkpoint as PEFT, merged or GGUF.",
    ),
    "gc": ("tinkex.cli.commands.disk:gc", "Remove what nobody needs from this machine's disk."),
    "import": ("tinkex.cli.commands.import_:import_", "Turn a PEFT adapter into a checkpoint."),
    "admin": (
        "tinkex.cli.commands.admin:admin",
        "Look after your own server: its data, its users.",
    ),
    "keys": ("tinkex.cli.commands.keys:keys", "Add, list and revoke keys of your own server."),
    "model": ("tinkex.cli.commands.model:model", "What the server can train and sample."),
    "pull": ("tinkex.cli.commands.pull:pull", "Fetch a base model, and say what it needs."),
    "quickstart": (
        "tinkex.cli.commands.quickstart:quickstart",
        "Fine-tune a small model, right now.",
    ),
    "run": ("tinkex.cli.commands.run:run", "List and inspect training runs."),
    "sample": ("tinkex.cli.commands.sample:sample", "Complete a prompt."),
    "serve": ("tinkex.server.serve:serve", "Run a Tinker server on this machine."),
    "session": ("tinkex.cli.commands.session:session", "List and inspect sessions."),
    "train": ("tinkex.cli.commands.train:train", "Fine-tune with SFT, DPO, RL or distillation."),
    "version": ("tinkex.cli.commands.version:version", "Print the version."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"No command '{name}'.{_closest(name)}", ctx)
        return super().resolve_command(ctx, args)


def _closest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" Did you mean '{close[0]}'?" if close else " See `tinkex --help`."


@click.group(
    cls=LazyGroup,
    params=[*shared_options()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train and sample language models through the Tinker API.

    Without a key and a base URL everything runs on this machine, in a private local server.
    Set TINKER_BASE_URL or --base-url for your own server, TINKER_API_KEY for the hosted one.
    """
    ctx.ensure_object(State)
    _set_up_logging()


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Nothing is raised."""
    args, state = list(sys.argv[1:] if argv is None else argv), State()
    try:
        outcome = cli.main(args=args, prog_name="tinkex", standalone_mode=False, obj=state)
    except click.ClickException as exc:
        if state.format == "json" or "--json" in args:
            code = "usage" if isinstance(exc, click.UsageError) else "failed"
            return _as_json(code, exc.format_message(), exc.exit_code)
        exc.show()
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Aborted!", err=True)
        return 130
    except BrokenPipeError:
        # The reader of our stdout (`| head`) has left. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as exc:
        return _report(exc, as_json=state.format == "json")
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """The `tinkex` script."""
    sys.exit(run())


def _report(exc: Exception, *, as_json: bool) -> int:
    if os.environ.get("TINKEX_DEBUG"):
        traceback.print_exception(exc)
    if as_json:
        return _as_json(getattr(exc, "code", "error"), words(exc), 1)
    click.echo(f"Error: {words(exc)}", err=True)
    return 1


def _as_json(code: str, message: str, exit_code: int) -> int:
    """What a program reads instead of a result: one object on stdout, as every result is."""
    from tinkex.cli.output import print_json

    print_json({"error": {"code": code, "message": message}})
    return exit_code


def _set_up_logging() -> None:
    level = os.environ.get("TINKER_LOG", "").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(
        level=level if level in ("DEBUG", "INFO") else logging.WARNING, handlers=[handler]
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _Plain(logging.Formatter):
    """A server that starts here, or a wait, is news, not a warning, to who typed the command."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name in ("tinkex.local", "tinkex.futures"):
            return record.getMessage()
        return super().format(record)


__all__ = ["COMMANDS", "cli", "main", "run"]
