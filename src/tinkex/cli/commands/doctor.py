"""`tinkex doctor`: is this machine fit, is the server there, do its sampler and trainer agree?

Each finding is one line with a verdict. The last part is the one that saves weeks: tokens are
sampled, then scored by the trainer, and the two log-probabilities are compared. Where they differ,
every off-policy correction in RL is wrong from the first step.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tinkex import __version__
from tinkex.cli.listing import Listing
from tinkex.cli.output import size
from tinkex.cli.progress import waiting
from tinkex.cli.state import Leaf, State, pass_state
from tinkex.errors import TinkerError, how_to_install

if TYPE_CHECKING:
    from tinkex import ServiceClient
    from tinkex.types import SupportedModel

Verdict = Literal["ok", "warn", "fail"]
_PACKAGES = ("torch", "transformers", "safetensors", "fastapi", "httpx", "pydantic", "protobuf")
_NEEDED_BYTES = 5 * 1024**3
_PROMPT = "The quick brown fox jumps over the lazy dog. Once upon a time there was a"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    check: str
    verdict: Verdict
    detail: str


_FINDINGS = Listing(
    "findings",
    "",
    {"Check": "check", "Verdict": "verdict", "Detail": "detail"},
    {"ok": "green", "warn": "yellow", "fail": "red"},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreGap:
    """How far two scores of the same tokens lie apart, in nats."""

    mean: float
    max: float
    kl: float
    """k3 estimate of KL(sampler || trainer): mean of exp(d) - d - 1, d = trainer - sampler."""
    num_tokens: int

    @property
    def verdict(self) -> Verdict:
        """fp32 agrees to 1e-5 and bf16 to about 1e-2; past 0.1 corrections mean nothing."""
        if self.mean <= 0.02 and self.max <= 0.5:
            return "ok"
        return "warn" if self.mean <= 0.1 else "fail"

    def __str__(self) -> str:
        if self.max == 0:
            return f"equal to the bit over {self.num_tokens} tokens"
        return (
            f"mean {self.mean:.2g}, max {self.max:.2g}, k3 KL {self.kl:.2g} "
            f"over {self.num_tokens} tokens"
        )


@click.command(cls=Leaf)
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    help="Only this model; repeatable. A folder or .gguf file is looked at, not served.",
)
@click.option(
    "--length",
    type=click.IntRange(min=1),
    default=2048,
    help="Tokens of a sequence, for the memory that a folder will need.",
)
@click.option("--no-models", is_flag=True, help="Skip the sampler/trainer comparison.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, help="Tokens to compare.")
@pass_state
def doctor(
    state: State, models: tuple[str, ...], length: int, no_models: bool, tokens: int
) -> None:
    """Check this machine, the server, and that sampler and trainer agree."""
    findings = list(machine())
    folders = [name for name in models if Path(name).expanduser().exists()]
    for folder in folders:
        findings += _survey(folder, length)
    models = tuple(name for name in models if name not in folders)
    if not folders or models:
        findings += _served(state, models, no_models, tokens)
    healthy = all(finding.verdict != "fail" for finding in findings)
    data = {"ok": healthy, "findings": [asdict(finding) for finding in findings]}
    state.show(replace(_FINDINGS.table(findings), is_prose=True), data)
    if not healthy:
        raise click.exceptions.Exit(1)


def _survey(folder: str, length: int) -> Iterator[Finding]:
    """Say what a server would make of a folder, without loading it."""
    try:
        from tinkex.engine.model.base_model import resolve
        from tinkex.engine.torch.survey import survey
    except ImportError:
        yield Finding(folder, "warn", "unknown without torch")
        return
    try:
        source = resolve(folder, allow_fetch=False)
    except TinkerError as exc:
        yield Finding(folder, "fail", str(exc))
        return
    for remark in survey(source, length=length):
        verdict: Verdict = "ok" if remark.ok else "fail"
        yield Finding(f"{remark.what} {folder}", verdict, remark.says)


def _served(state: State, models: tuple[str, ...], no_models: bool, tokens: int) -> list[Finding]:
    findings: list[Finding] = []
    try:
        began = time.monotonic()
        with state.service(patient=False, name="doctor") as service:
            served = service.get_server_capabilities().supported_models
            names = [m.model_name for m in served if m.model_name]
            findings.append(_reached(names, time.monotonic() - began))
            findings += [_weights(m) for m in served if m.note]
            for name in () if no_models else models or _comparable(service):
                with waiting(f"Comparing sampler and trainer of {name}"):
                    findings.append(_compare(service, name, tokens))
    except TinkerError as exc:
        findings.append(Finding("server", "fail", str(exc)))
    return findings


# ------------------------------------------------------------------------------ the machine


def machine() -> Iterator[Finding]:
    yield Finding("tinkex", "ok", __version__)
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    detail = f"{version} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok" if good else "fail", detail + ("" if good else ": 3.11+"))
    yield Finding("cpu", "ok", f"{os.cpu_count()} cores, {_memory()}")
    for package in _PACKAGES:
        yield _package(package)
    yield _gpu()
    yield _disk()


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(
            name, "warn", f"not installed; a local server needs it: {how_to_install('local')}"
        )


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("gpu", "warn", "unknown without torch")
    if not torch.cuda.is_available():
        return Finding("gpu", "ok", "none; training runs on the CPU")
    names = [
        f"{torch.cuda.get_device_name(i)} "
        f"({size(torch.cuda.get_device_properties(i).total_memory)})"
        for i in range(torch.cuda.device_count())
    ]
    return Finding("gpu", "ok", ", ".join(names))


def _disk() -> Finding:
    home = Path(os.environ.get("TINKEX_HOME") or Path.home())
    free = shutil.disk_usage(home if home.exists() else Path.home()).free
    enough = free >= _NEEDED_BYTES
    return Finding(
        "disk",
        "ok" if enough else "warn",
        f"{size(free)} free for models and checkpoints"
        + ("" if enough else f"; {size(_NEEDED_BYTES)} are wise"),
    )


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "memory unknown"
    return f"{size(total)} memory"


# ------------------------------------------------------------------------------ the server


def _reached(models: Sequence[str], seconds: float) -> Finding:
    detail = f"answers in {seconds:.1f} s; models: {', '.join(models) or 'none'}"
    return Finding("server", "ok" if models else "fail", detail)


def _weights(model: SupportedModel) -> Finding:
    verdict: Verdict = "warn" if model.stands_in else "ok"
    return Finding(f"weights {model.model_name}", verdict, str(model.note))


def _comparable(service: ServiceClient) -> list[str]:
    return [
        model.model_name
        for model in service.get_server_capabilities().supported_models
        if model.model_name and model.trainable is not False and model.sampleable is not False
    ]


def _compare(service: ServiceClient, model: str, num_tokens: int) -> Finding:
    try:
        gap = logprob_gap(service, model, num_tokens)
    except TinkerError as exc:
        return Finding(f"logprobs {model}", "fail", str(exc))
    return Finding(f"logprobs {model}", gap.verdict, str(gap))


def logprob_gap(service: ServiceClient, model: str, num_tokens: int = 64) -> ScoreGap:
    """Sample from a fresh adapter, score the same tokens with the trainer, compare."""
    from tinkex import Datum, ModelInput, SamplingParams

    training = service.create_lora_training_client(base_model=model, rank=8, seed=0)
    sampler = training.save_weights_and_get_sampling_client()
    prompt = list(training.get_tokenizer().encode(_PROMPT))
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=0, stop=[])
    sequence = sampler.sample(ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    tokens = prompt + list(sequence.tokens)
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(sequence.tokens)
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )
    output = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]
    trained = output["logprobs"].tolist()[len(prompt) - 1 :]
    return compare(list(sequence.logprobs or []), trained)


def compare(sampled: Sequence[float], trained: Sequence[float]) -> ScoreGap:
    """The gap between two lists of log-probabilities of the same tokens."""
    differences = [t - s for s, t in zip(sampled, trained, strict=True)]
    return ScoreGap(
        mean=sum(map(abs, differences)) / len(differences),
        max=max(map(abs, differences)),
        kl=sum(math.exp(d) - d - 1 for d in differences) / len(differences),
        num_tokens=len(differences),
    )
