"""The root of the command line: which commands exist, and how a run of one ends.

A command's module is imported only when that command runs, so `tinkex --help` and shell completion
cost milliseconds. This module maps every outcome to an exit code (0 done, 1 failed, 2 wrong usage,
130 interrupted) and keeps tracebacks from people whose mistake was not a bug of ours. It knows no
client and no command's options.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

from tinkex import __version__
from tinkex.cli.messages import words
from tinkex.cli.output import print_json
from tinkex.cli.state import State, shared_options

# name -> the line `tinkex --help` shows. A command stands in the module of its name.
COMMANDS: dict[str, str] = {
    "auth": "Log in, log out, and say who you are.",
    "billing": "Tokens used and checkpoint storage.",
    "budget": "Limit what a user, key or run may use.",
    "chat": "Talk to a base model or a checkpoint.",
    "checkpoint": "List, publish, download and delete.",
    "cluster": "Look at the Ray cluster of a server.",
    "completion": "Print a shell completion script.",
    "conformance": "Test a server against the contract.",
    "console": "Look at runs in a browser.",
    "disk": "What Tinkex keeps on this machine, by run.",
    "doctor": "Check this machine and a server.",
    "export": "Write a checkpoint as PEFT, merged or GGUF.",
    "gc": "Remove what nobody needs from this machine's disk.",
    "import": "Turn a PEFT adapter into a checkpoint.",
    "admin": "Look after your own server: its data, its users.",
    "keys": "Add, list and revoke keys of your own server.",
    "model": "What the server can train and sample.",
    "pull": "Fetch a base model, and say what it needs.",
    "quickstart": "Fine-tune a small model, right now.",
    "run": "List and inspect training runs.",
    "sample": "Complete a prompt.",
    "serve": "Run a Tinker server on this machine.",
    "session": "List and inspect sessions.",
    "train": "Fine-tune with SFT, DPO, RL or distillation.",
    "version": "Print the version.",
}
_ELSEWHERE = {
    "completion": "tinkex.cli.commands.shell:completion",
    "version": "tinkex.cli.commands.shell:version",
    "gc": "tinkex.cli.commands.disk:gc",
    "import": "tinkex.cli.commands.import_:import_",
    "serve": "tinkex.server.serve:serve",
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        source = _ELSEWHERE.get(name, f"tinkex.cli.commands.{name}:{name}")
        module, _, attribute = source.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

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
        # A usage error may come before click has read `--json` into the state.
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
    code = run()
    # From here Python only waits for its threads, and Ctrl-C would show a traceback of that wait.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _report(exc: Exception, *, as_json: bool) -> int:
    if os.environ.get("TINKEX_DEBUG"):
        traceback.print_exception(exc)
    if as_json:
        return _as_json(getattr(exc, "code", "error"), words(exc), 1)
    click.echo(f"Error: {words(exc)}", err=True)
    return 1


def _as_json(code: str, message: str, exit_code: int) -> int:
    """Print a failure for a program: one object on stdout, as every result is."""
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
    """Log lines; without level and logger where they are news to whoever typed the command.

    A server that starts here, or a wait, is no warning.
    """

    def format(self, record: logging.LogRecord) -> str:
        if record.name in ("tinkex.local", "tinkex.futures", "tinkex.retry"):
            return record.getMessage()
        return super().format(record)


__all__ = ["COMMANDS", "cli", "main", "run"]
