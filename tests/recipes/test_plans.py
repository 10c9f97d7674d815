"""`--dry-run` says what a run uses: the very numbers of SFT and DPO, a bound for the rest."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tinkex import AdminClient, ServiceClient
from tinkex.recipes import distill, dpo, plans, rl, sft

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
PROMPTS = [{"prompt": f"Tell me {'more ' * i}of {i}"} for i in range(9)]
pytestmark = pytest.mark.usefixtures("default_model_dir")


@pytest.fixture
def service(toy_server):
    with ServiceClient(base_url=toy_server) as client:
        yield client


def quiet(*args: Any) -> None:
    """Neither progress nor notes."""


def _used(service: ServiceClient) -> Counter[str]:
    """All tokens that were used on the server so far, by kind."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    admin = AdminClient(service.create_rest_client().holder)
    usage = admin.get_billing_usage(now - timedelta(days=1), now + timedelta(days=1))
    counts: Counter[str] = Counter()
    for event in usage.result().data:
        counts[event.event_info.type] += getattr(event.event_info, "token_count", 0)
    return counts


def _ran(service: ServiceClient, plan: plans.Plan, train: Any, *inputs: Any) -> Counter[str]:
    """What a run used; it makes the steps that were planned."""
    before = _used(service)
    result = train(*inputs, on_step=quiet, on_note=quiet)
    assert result.step == plan.num_steps
    return _used(service) - before


def _runs(service: ServiceClient) -> int:
    return service.create_rest_client().list_training_runs(limit=1).result().cursor.total_count


def _file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("settings", [{}, {"pack": True}, {"accumulate": 2, "samples": 0}])
def test_the_tokens_of_sft_are_those_it_uses(service, tmp_path, settings):
    rows = [{"prompt": f"Say {i}", "completion": "aye " * (i % 4 + 1)} for i in range(23)]
    config = sft.SftConfig(
        data=_file(tmp_path, rows),
        log_dir=str(tmp_path / "log"),
        rank=4,
        batch_size=3,
        max_length=80,
        eval_every=2,
        save_every=2,
        **settings,
    )
    runs = _runs(service)
    plan = plans.plan_sft(config, service, quiet)
    assert plan.estimate(service).result().money is None
    assert _runs(service) == runs
    assert not (tmp_path / "log").exists()
    used = _ran(service, plan, sft.train, config, service)
    assert used["training"] == plan.training_tokens > 0
    asked = plan.prefill_tokens
    assert plan.forward_tokens <= used["sampling_prefill"] <= plan.forward_tokens + asked
    assert used["sampling_sample"] <= plan.sample_tokens
    assert bool(plan.sample_tokens) == ("samples" not in settings)
    saved = (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()
    assert len({json.loads(line)["step"] for line in saved}) == plan.state_saves


def test_a_run_that_goes_on_has_the_rest_to_do(service, tmp_path):
    rows = [{"prompt": f"Say {i}", "completion": "aye"} for i in range(12)]
    config = sft.SftConfig(
        data=_file(tmp_path, rows), log_dir=str(tmp_path / "log"), rank=4, batch_size=3, epochs=2
    )
    whole = plans.plan_sft(config, service, quiet)
    steps = iter(range(100))
    first = sft.train(config, service, lambda *_: next(steps) < 2, quiet)
    rest = plans.plan_sft(config, service, quiet)
    assert (rest.start, rest.num_steps) == (first.step, whole.num_steps)
    used = _ran(service, rest, sft.train, config, service)
    assert used["training"] == rest.training_tokens < whole.training_tokens


def test_the_tokens_of_dpo_are_those_it_uses(service, tmp_path):
    rows = [
        {"prompt": f"Say {i}", "chosen": "aye " * (i % 3 + 1), "rejected": "no"} for i in range(20)
    ]
    config = dpo.DpoConfig(
        data=_file(tmp_path, rows), log_dir=str(tmp_path / "log"), rank=4, epochs=1, eval_every=3
    )
    plan = plans.plan_dpo(config, service, quiet)
    used = _ran(service, plan, dpo.train, config, service)
    assert used["training"] == plan.training_tokens > 0
    prefilled = plan.forward_tokens + plan.prefill_tokens
    assert prefilled / 2 < used["sampling_prefill"] <= prefilled
    assert used["sampling_sample"] <= plan.sample_tokens


@pytest.mark.parametrize("settings", [{}, {"kl_to": "base", "updates_per_step": 2}])
def test_rl_uses_no_more_than_its_bound(service, tmp_path, settings):
    config = rl.RlConfig(
        log_dir=str(tmp_path / "log"),
        rank=4,
        steps=3,
        prompts_per_step=3,
        group_size=3,
        max_tokens=5,
        eval_every=2,
        eval_share=0.25,
        **settings,
    )
    judged = []

    def reward(completion: str) -> float:
        judged.append(completion)
        return float(len(completion))

    plan = plans.plan_rl(config, service, reward, PROMPTS, quiet)
    assert not judged, "a dry run judges nothing"
    used = _ran(service, plan, rl.train, config, service, reward, PROMPTS)
    _check_bound(plan, used)


def test_distillation_uses_no_more_than_its_bound(service, tmp_path):
    config = distill.DistillConfig(
        log_dir=str(tmp_path / "log"),
        teacher=MODEL,
        rank=4,
        steps=2,
        prompts_per_step=3,
        max_tokens=5,
        eval_share=0.25,
    )
    plan = plans.plan_distill(config, service, PROMPTS, quiet)
    _check_bound(plan, _ran(service, plan, distill.train, config, service, PROMPTS))


def _check_bound(plan: plans.Plan, used: Counter[str]) -> None:
    """At most the bound, and not a bound that says nothing."""
    bounds = {
        "training": plan.training_tokens,
        "sampling_prefill": plan.forward_tokens + plan.prefill_tokens,
        "sampling_sample": plan.sample_tokens,
    }
    for kind, bound in bounds.items():
        assert bound / 4 < used[kind] <= bound, (kind, used, bounds)
