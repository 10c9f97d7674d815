"""Losses that users traced: their seconds, the turns of others between steps, what they keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_world import Ticket, random_datum
from patience import until

from tinkex.engine import jobs
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.graph_cost import LossBudget
from tinkex.engine.train.passes import PassRunner
from tinkex.engine.train.scoring import RowRun, _evaluate_whole


def slow_loss(num_steps: int = 12, elements: int = 2**19) -> jobs.TracedLoss:
    """A sum of the logprobs, and steps beside it that take their time."""

    def node(name: str, target: str, *args: Any) -> dict[str, Any]:
        return {"op": "call_function", "name": name, "target": target, "args": list(args)}

    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    last = {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [{"tuple": [{"ref": "loss"}, {"dict": {}}]}],
    }
    steps = [node(f"n{i}", "torch.erfinv", {"ref": "x"}) for i in range(num_steps)]
    nodes = [
        first,
        node("x", "torch.full", [elements], 0.25),
        *steps,
        node("loss", "torch.sum", {"ref": "logprobs"}),
        last,
    ]
    return jobs.TracedLoss(inputs=(("logprobs", 1),), graph={"format": 1, "nodes": nodes})


def traced_data(count: int) -> tuple[jobs.TrainDatum, ...]:
    tokens = np.array([3, 4])
    return (jobs.TrainDatum(tokens=tokens, inputs={"target_tokens": tokens}),) * count


def test_a_traced_loss_is_ended_by_its_seconds_and_the_step_is_named(start):
    client = start(trainer=TrainerConfig(loss_datum_s=0.01))
    client.create()
    slow = client.train(loss_fn="custom", data=traced_data(8), custom_loss=slow_loss())
    ended = slow.wait()
    assert isinstance(ended, jobs.Failed)
    assert ended.category == "user"
    assert "data[0]" in ended.message
    assert "custom loss node '" in ended.message  # whichever step it was at
    assert "s after the datum began" in ended.message
    assert "over 0.01 s" in ended.message
    job = start(trainer=TrainerConfig(loss_job_s=0.01))
    job.create()
    told = job.train(loss_fn="custom", data=traced_data(2), custom_loss=slow_loss()).wait()
    assert "s for the request, over 0.01 s" in told.message
    # What ended well before has no limit of seconds when it runs again.
    again = job.train(
        loss_fn="custom", data=traced_data(2), custom_loss=slow_loss(), is_replay=True
    )
    assert isinstance(again.wait(), jobs.Done)
    assert client.train().result.metrics["loss:sum"] > 0


def test_others_have_turns_between_the_datums_of_a_slow_traced_loss(start):
    """One pass holds all the datums; a sample and another's job come in the middle of it."""
    client = start()
    client.create("hog"), client.create("polite")
    alone = client.train("polite", backward=False).result
    client.sample().result  # noqa: B018
    slow = client.train("hog", loss_fn="custom", data=traced_data(16), custom_loss=slow_loss())
    until(lambda: slow.events or slow.job.job_id in client.engine.heartbeat.now.job_ids)
    sample = client.sample(max_tokens=4)
    short = client.train("polite", backward=False)
    assert len(sample.result.sequences[0].tokens) == 4
    assert short.result.outputs[0]["logprobs"].tolist() == alone.outputs[0]["logprobs"].tolist()
    assert isinstance(slow.wait(), jobs.Done)
    assert client.ended.index(slow.job.job_id) > client.ended.index(sample.job.job_id)
    assert client.ended.index(slow.job.job_id) > client.ended.index(short.job.job_id)


def test_nothing_large_of_a_traced_loss_outlives_its_datum():
    """Loss, metric and gradient are views of large tensors here, and a pass holds many datums."""

    def evaluate(logprobs: torch.Tensor, _: Any) -> Any:
        large = torch.cat([logprobs.double(), torch.ones(1000, dtype=torch.float64)])
        return (large * 2).unbind()[0], {"custom/a:sum": large.detach()[1]}

    targets = torch.tensor([1, 2])
    run = RowRun(
        start=0,
        stop=2,
        targets=targets,
        inputs={},
        active=np.ones(2, bool),
        evaluate=evaluate,
        token_local=False,
        budget=LossBudget(),
    )
    run.logprobs = torch.tensor([-1.0, -2.0])
    _evaluate_whole(run, backward=True)
    assert run.slopes is not None
    assert run.slopes.tolist() == [2.0, 0.0]
    for kept in (run.losses[0], run.slopes, *run.metrics.values()):
        assert kept.untyped_storage().nbytes() == kept.nbytes


@pytest.mark.parametrize("deterministic", [False, True])
def test_turns_in_the_middle_of_a_pass_change_no_bit(start, tmp_path, monkeypatch, deterministic):
    """The gradients of a traced loss, with and without another's passes between its steps."""
    data = tuple(
        jobs.TrainDatum(tokens=d.tokens, inputs={"target_tokens": d.inputs["target_tokens"]})
        for d in (random_datum(9, seed=seed) for seed in range(6))
    )
    loss = slow_loss(1, 4)
    calm = start(deterministic=deterministic)
    calm.create("a")
    expected = calm.train("a", loss_fn="custom", data=data, custom_loss=loss).result
    calm.step("a").result  # noqa: B018
    calm.save(tmp_path / "calm").result  # noqa: B018

    monkeypatch.setattr("tinkex.engine.train.passes.TURN_S", 0.0)
    busy = start(deterministic=deterministic)
    busy.create("a"), busy.create("b", seed=3)
    between: list[Ticket] = []
    given = PassRunner.give_turn

    def give_turn(passes: PassRunner) -> None:
        between.append(busy.train("b"))
        between.append(busy.sample(max_tokens=2))
        given(passes)

    monkeypatch.setattr(PassRunner, "give_turn", give_turn)
    found = busy.train("a", loss_fn="custom", data=data, custom_loss=loss).result
    monkeypatch.setattr(PassRunner, "give_turn", given)
    busy.step("a").result  # noqa: B018
    busy.save(tmp_path / "busy").result  # noqa: B018
    num_turns = len(between) // 2
    assert num_turns > 4 * len(data), "after each step, forward and backward"
    assert all(isinstance(ticket.wait(), jobs.Done) for ticket in between)
    first = busy.ended.index(between[0].job.job_id)
    assert first < busy.ended.index("TrainJob3"), "it ran in the middle"
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours["logprobs"].tolist() == theirs["logprobs"].tolist()
    weights = [(tmp_path / n / "adapter_model.safetensors").read_bytes() for n in ("calm", "busy")]
    assert weights[0] == weights[1]
