"""`tinkex chat`: talk to a base model or a checkpoint, its words shown as they come."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.commands.sample import open_sampler
from tinkex.cli.state import Leaf, State, pass_state

if TYPE_CHECKING:
    from tinkex import SamplingClient
    from tinkex.recipes.render import Renderer


@click.command(cls=Leaf)
@click.argument("model", required=False)
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
    """Talk to MODEL: a base model, a tinker:// checkpoint, or the server's first model.

    An empty line or Ctrl-D ends the conversation.
    """
    from tinkex import SamplingParams
    from tinkex.client.tokenizers import load_tokenizer
    from tinkex.recipes.render import Renderer

    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    with state.service() as service:
        sampler = open_sampler(service, model)
        renderer = Renderer(load_tokenizer(sampler.get_base_model()))
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop=renderer.stop
        )
        while text := prompt or _ask(state):
            messages.append({"role": "user", "content": text})
            said = _answer(state, sampler, renderer, messages, params)
            messages.append({"role": "assistant", "content": said})
            if prompt:
                break
    if state.format == "json":
        from tinkex.cli.output import print_json

        print_json({"messages": messages})


def _ask(state: State) -> str:
    if sys.stdin.isatty():
        click.echo("you> ", nl=False, err=True)
    return sys.stdin.readline().strip()


def _answer(
    state: State,
    sampler: SamplingClient,
    renderer: Renderer,
    messages: list[dict[str, str]],
    params: Any,
) -> str:
    """Print the answer while it is generated, and return it whole."""
    from tinkex import ModelInput

    tokens: list[int] = []
    shown = ""
    for event in sampler.stream(ModelInput.from_ints(renderer.prompt(messages)), params):
        tokens.extend(event.tokens)
        text = renderer.text(tokens)
        # A character of several tokens decodes to U+FFFD until its last token is there.
        if state.format != "json" and not text.endswith("�") and text.startswith(shown):
            click.echo(text[len(shown) :], nl=False)
            sys.stdout.flush()
            shown = text
    whole = renderer.text(tokens)
    if state.format != "json":
        click.echo(whole[len(shown) :] if whole.startswith(shown) else "")
    return whole
