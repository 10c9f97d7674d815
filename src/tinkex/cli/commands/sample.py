"""`tinkex sample`: complete a prompt from the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.commands.pull import prepare
from tinkex.cli.completions import complete_model
from tinkex.cli.live_text import LiveText
from tinkex.cli.names import resolve
from tinkex.cli.output import Table
from tinkex.cli.state import Leaf, State, pass_state

if TYPE_CHECKING:
    from tinkex import ServiceClient


@click.command(cls=Leaf)
@click.argument("prompt")
@click.option(
    "-m",
    "--model",
    shell_complete=complete_model,
    help="Base model, a run's name or folder, or a tinker:// checkpoint.",
)
@click.option("-n", "--num-samples", type=click.IntRange(min=1), default=1, help="How many.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="1 is off.")
@click.option("--top-k", type=click.IntRange(min=-1), default=-1, help="-1 is off.")
@click.option("--seed", type=int, help="Same seed, same answer.")
@click.option("--stop", multiple=True, help="Text that ends the answer; repeatable.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without chat template.")
@pass_state
def sample(
    state: State,
    prompt: str,
    model: str | None,
    num_samples: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    raw: bool,
) -> None:
    """Answer PROMPT; `-` reads it from stdin."""
    from tinkex import ModelInput, SamplingParams
    from tinkex.client.tokenizers import load_tokenizer
    from tinkex.recipes.loop import sampler_of
    from tinkex.recipes.render import Renderer

    text = sys.stdin.read() if prompt == "-" else prompt
    chosen = resolve(state, model) if model else None
    if chosen and state.format != "json":
        prepare(state, chosen)
    with state.service(model=chosen, name="sample") as service:
        model = chosen or default_model(service)
        sampler = sampler_of(service, model)
        tokenizer = load_tokenizer(sampler.get_base_model())
        renderer = Renderer(tokenizer)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=list(stop) or (None if raw else renderer.stop),
        )
        tokens = (
            list(tokenizer.encode(text))
            if raw
            else renderer.prompt([{"role": "user", "content": text}])
        )
        if num_samples == 1 and not raw and state.format != "json":
            out = LiveText(renderer, quiet=False)
            for event in sampler.stream(ModelInput.from_ints(tokens), params):
                out.add(event.tokens)
            out.end()
            return
        answer = sampler.sample(ModelInput.from_ints(tokens), num_samples, params).result()
    sequences = [
        {
            "text": tokenizer.decode(list(s.tokens)) if raw else renderer.text(s.tokens),
            "stop_reason": str(s.stop_reason),
            "num_tokens": len(s.tokens),
        }
        for s in answer.sequences
    ]
    _show(state, sequences, model)


def _show(state: State, sequences: list[dict[str, Any]], model: str | None) -> None:
    table = Table(
        columns=("#", "Text", "Tokens", "Stop"),
        rows=[
            (index, s["text"], s["num_tokens"], s["stop_reason"])
            for index, s in enumerate(sequences)
        ],
    )
    state.show(
        sequences[0]["text"] if len(sequences) == 1 else table,
        {"model": model, "sequences": sequences},
    )


def default_model(service: ServiceClient) -> str:
    names = [
        str(model.model_name)
        for model in service.get_server_capabilities().supported_models
        if model.model_name and model.sampleable is not False
    ]
    if not names:
        raise click.ClickException("The server offers no model to sample from.")
    return names[0]
