"""One command to a trained model: the SFT recipe on a built-in persona, before and after.

Everything a newcomer sees in the first five minutes, made of public parts: a service client, the
`sft` recipe, a sampler and an export. It prints nothing itself; the caller shows the progress.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.contract.run_folder import METRICS_FILE
from tinkex.recipes.hooks import OnNote, OnStep
from tinkex.recipes.loop import Result, check_here, open_log
from tinkex.recipes.persona import QUESTIONS_TO_SHOW, rows
from tinkex.recipes.render import Renderer
from tinkex.recipes.sft import SftConfig, train
from tinkex.runs import json_lines

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient

__all__ = ["Dialog", "QuickstartResult", "ask", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialog:
    question: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartResult:
    result: Result
    loss_before: float
    loss_after: float
    num_trained: int = 0
    """Steps made by this call; the others are an earlier one's."""
    exchanges: tuple[Dialog, ...] = ()


def sft_config(folder: Path, *, model: str = DEFAULT_MODEL, epochs: float = 2.0) -> SftConfig:
    """The quickstart's settings: small enough for two CPU cores, large enough to see."""
    return SftConfig(
        data=str(folder / "data.jsonl"),
        log_dir=str(folder),
        model=model,
        rank=16,
        learning_rate=2e-3,
        batch_size=8,
        epochs=epochs,
        eval_share=0.15,
        samples=0,
        eval_every=11,
        save_every=10,
    )


def run(
    folder: Path,
    service: ServiceClient,
    on_step: OnStep,
    on_note: OnNote = print,
    *,
    model: str = DEFAULT_MODEL,
    epochs: float = 2.0,
) -> QuickstartResult:
    """Train, or go on where an earlier call in this folder was interrupted."""
    folder.mkdir(parents=True, exist_ok=True)
    config = sft_config(folder, model=model, epochs=epochs)
    saved = open_log(config, may_change=["epochs"]).last  # refuses what `train` would, but sooner
    if saved is not None:
        check_here(service, folder, saved.state_path)
    Path(config.data).write_text("".join(json.dumps(row) + "\n" for row in rows()))
    on_note("Asking the untrained model ...")
    before = ask(service.create_sampling_client(base_model=model), QUESTIONS_TO_SHOW)
    on_note(f"Training on {len(rows())} questions and answers ...")
    start = saved.step if saved is not None else 0
    result = train(config, service, on_step, on_note)
    losses = _held_out_losses(folder)
    outcome = QuickstartResult(
        result=result,
        loss_before=losses[0],
        loss_after=losses[-1],
        num_trained=result.step - start,
    )
    if result.interrupted:
        return outcome
    on_note("Asking the trained model ...")
    after = ask(service.create_sampling_client(model_path=result.sampler_path), QUESTIONS_TO_SHOW)
    exchanges = tuple(
        Dialog(question=question, before=untrained, after=trained)
        for question, untrained, trained in zip(QUESTIONS_TO_SHOW, before, after, strict=True)
    )
    return replace(outcome, exchanges=exchanges)


def ask(sampler: SamplingClient, questions: Sequence[str], max_tokens: int = 40) -> list[str]:
    """Greedy answers to all questions, asked at once."""
    from tinkex import ModelInput, SamplingParams

    renderer = Renderer(sampler.get_tokenizer())
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=renderer.stop)
    futures = [
        sampler.sample(
            ModelInput.from_ints(renderer.prompt([{"role": "user", "content": question}])),
            1,
            params,
        )
        for question in questions
    ]
    return [renderer.text(future.result().sequences[0].tokens) for future in futures]


def _held_out_losses(folder: Path) -> list[float]:
    records = json_lines.read(folder / METRICS_FILE)
    return [record["held_out_loss"] for record in records if "held_out_loss" in record]
