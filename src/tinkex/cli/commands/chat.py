"""`tinkex chat`: talk to a base model, a run or a checkpoint, its words shown as they come.

On a terminal there are line editing, a history that outlives the program, colours and commands
(`/help`); Ctrl-C stops an answer, not the program. Elsewhere it reads lines and prints answers.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.commands.pull import prepare
from tinkex.cli.commands.sample import default_model
from tinkex.cli.completions import complete_model
from tinkex.cli.live_text import LiveText
from tinkex.cli.messages import words
from tinkex.cli.names import resolve
from tinkex.cli.output import print_json
from tinkex.cli.state import Leaf, State, pass_state
from tinkex.errors import ConfigError, TinkerError
from tinkex.types.account.checkpoints import is_tinker_path

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient
    from tinkex.recipes.render import Renderer

HELP = """\
  /help           this list
  /system TEXT    set the system message and begin anew; without TEXT take it away
  /model NAME     talk to another base model, run or tinker:// checkpoint
  /compare NAME   let NAME answer too, for comparison; without NAME the base model; again: stop
  /save FILE      add the conversation to FILE as a row to train on (JSON lines)
  /clear          begin anew
  /exit           end, as Ctrl-D does; Ctrl-C stops an answer"""
_HISTORY_LINES = 1000


@click.command(cls=Leaf)
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--system", help="System message.")
@click.option("-p", "--prompt", help="Ask this and end, instead of a conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, help="0 is greedy.")
@click.option("--seed", type=int, help="Same seed, same answers.")
@pass_state
def chat(
    state: State,
    model: str | None,
    system: str | None,
    prompt: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
) -> None:
    """Talk to MODEL: a base model, a run's name or folder, or a tinker:// checkpoint.

    Without MODEL it is the server's first one. On a terminal /help lists commands, Ctrl-C stops an
    answer and Ctrl-D ends; from a pipe every line is a question, and an empty one ends.
    """
    settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    chosen = resolve(state, model) if model else None
    if chosen and not is_tinker_path(chosen):
        prepare(state, chosen)
    with state.service(model=chosen, name="chat") as service:
        talk = Talk(state, service, settings)
        talk.partner = talk.open(chosen, model)
        talk.set_system(system)
        if prompt:
            talk.ask(prompt)
        elif sys.stdin.isatty() and sys.stdout.isatty() and state.format != "json":
            _at_terminal(talk)
        else:
            _from_pipe(talk)
    if state.format == "json":
        print_json({"messages": talk.messages})


# --------------------------------------------------------------------------------- conversation


@dataclass(frozen=True, slots=True)
class Partner:
    """A model that answers: a base model or a checkpoint."""

    label: str
    base_model: str
    path: str
    """Its checkpoint; empty for a base model."""
    sampler: SamplingClient
    renderer: Renderer


@dataclass(slots=True)
class Talk:
    """A conversation with one model, or with two side by side."""

    state: State
    service: ServiceClient
    settings: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    partner: Partner = None  # type: ignore[assignment]
    other: Partner | None = None
    """Answers too, for comparison; what it says is not remembered."""

    def open(self, model: str | None, label: str | None = None) -> Partner:
        from tinkex.client.tokenizers import load_tokenizer
        from tinkex.recipes.loop import sampler_of
        from tinkex.recipes.render import Renderer

        chosen = model or default_model(self.service)
        sampler = sampler_of(self.service, chosen)
        base = sampler.get_base_model()
        path = chosen if is_tinker_path(chosen) else ""
        return Partner(label or chosen, base, path, sampler, Renderer(load_tokenizer(base)))

    def find(self, name: str) -> Partner:
        """Open a base model, a run or a checkpoint by its name."""
        there = State(base_url=self.state.base_url)
        chosen = resolve(there, name)
        address = self.service.get_server_address()
        if there.base_url not in (self.state.base_url, address):
            raise ConfigError(
                f"{name!r} is on another server ({there.base_url}) than this conversation "
                f"({address}). End it, and talk with `tinkex chat {name}`."
            )
        if chosen != self.partner.base_model:
            prepare(self.state, chosen)
        return self.open(chosen, name)

    def set_system(self, text: str | None) -> None:
        self.messages = [{"role": "system", "content": text}] if text else []

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        if self.other is not None:
            self._label(self.other, "yellow")
            self._answer(self.other)
            self._label(self.partner, "green")
        answer = self._answer(self.partner)
        self.messages.append({"role": "assistant", "content": answer})

    def take_back(self) -> None:
        """Forget a question that was not answered."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def _label(self, partner: Partner, colour: str) -> None:
        if self.state.format != "json":
            click.echo(click.style(f"{partner.label}> ", fg=colour, bold=True), nl=False)

    def _answer(self, partner: Partner) -> str:
        """Print the answer while it is generated, and return it whole, or as far as it came."""
        from tinkex import ModelInput, SamplingParams

        params = SamplingParams(**self.settings, stop=partner.renderer.stop)
        prompt = ModelInput.from_ints(partner.renderer.prompt(self.messages))
        out = LiveText(partner.renderer, quiet=self.state.format == "json")
        try:
            # A closed stream cancels its sample.
            stream: Any = iter(partner.sampler.stream(prompt, params))
            with contextlib.closing(stream) as events:
                for event in events:
                    out.add(event.tokens)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            out.end()
            click.echo(click.style("(stopped)", dim=True), err=True)
            return out.whole
        out.end()
        return out.whole


# ------------------------------------------------------------------------------------- terminal


def _from_pipe(talk: Talk) -> None:
    """Every line is a question or a command, up to the first empty one."""
    while text := sys.stdin.readline().strip():
        if text in ("/exit", "/quit"):
            return
        if text.startswith("/"):
            _command(talk, *text[1:].partition(" ")[::2])
        else:
            talk.ask(text)


def _at_terminal(talk: Talk) -> None:
    _banner(talk)
    with _line_editing():
        while True:
            try:
                text = input(_prompt("you> ")).strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D or /exit ends)", err=True)
                continue
            if text in ("/exit", "/quit"):
                return
            try:
                if text.startswith("/"):
                    _command(talk, *text[1:].partition(" ")[::2])
                elif text:
                    talk.ask(text)
            except KeyboardInterrupt:  # before the answer began
                talk.take_back()
                click.echo(click.style("\n(stopped)", dim=True), err=True)
            except TinkerError as exc:
                talk.take_back()
                click.echo(click.style(f"Error: {words(exc)}", fg="red"), err=True)


def _banner(talk: Talk) -> None:
    partner = talk.partner
    lines = [click.style(partner.label, bold=True, fg="green")]
    if partner.path:
        lines.append(f"  checkpoint  {partner.path}")
    if partner.label != partner.base_model:
        lines.append(f"  base model  {partner.base_model}")
    lines.append(
        click.style("  /help lists commands, Ctrl-C stops an answer, Ctrl-D ends", dim=True)
    )
    click.echo("\n".join(lines))


def _prompt(text: str) -> str:
    """Coloured; the marks tell readline which characters take no room."""
    return f"\001\033[1;36m\002{text}\001\033[0m\002"


@contextlib.contextmanager
def _line_editing() -> Any:
    """Arrow keys, and a history of its own, where Python has readline."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    from tinkex.wire.local_servers import state_folder

    file = state_folder() / "chat_history"
    readline.clear_history()
    readline.set_history_length(_HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    commands = [line.split()[0] for line in HELP.splitlines()]
    readline.set_completer(
        lambda text, n: [c for c in commands if c.startswith(text)][n : n + 1][0]
    )
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" ")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)


def _command(talk: Talk, name: str, rest: str) -> None:
    rest = rest.strip()
    match name:
        case "help":
            click.echo(HELP)
        case "system":
            talk.set_system(rest or None)
            click.echo(f"System message {'set' if rest else 'taken away'}; a new conversation.")
        case "clear":
            talk.messages = [m for m in talk.messages if m["role"] == "system"]
            click.echo("A new conversation.")
        case "model" if rest:
            talk.partner = talk.find(rest)
            _banner(talk)
            if talk.messages:
                click.echo("The conversation goes on; /clear begins anew.")
        case "compare":
            _compare(talk, rest)
        case "save" if rest:
            _save(talk, Path(rest).expanduser())
        case "model":
            click.echo("Name what to talk to: /model NAME.")
        case "save":
            click.echo("Name the file to add to: /save FILE.")
        case _:
            click.echo(f"There is no command /{name}.\n{HELP}")


def _compare(talk: Talk, rest: str) -> None:
    if talk.other is not None and not rest:
        talk.other = None
        click.echo("Comparing no more.")
        return
    if not rest and not talk.partner.path:
        click.echo("This is the base model itself; name what to compare with: /compare NAME.")
        return
    wanted = rest or talk.partner.base_model
    talk.other = talk.find(wanted)
    click.echo(f"{wanted} answers too, first.")


def _save(talk: Talk, file: Path) -> None:
    if not any(message["role"] == "assistant" for message in talk.messages):
        click.echo("Nothing was said yet.")
        return
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"messages": talk.messages}, ensure_ascii=False) + "\n")
    except OSError as exc:
        click.echo(click.style(f"Error: {file}: {exc.strerror}", fg="red"), err=True)
        return
    click.echo(f"Added to {file}; train on it with `tinkex train sft {file}`.")
