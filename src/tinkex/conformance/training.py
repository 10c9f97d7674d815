"""Checks of training: order, losses, gradients, checkpoints, futures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinkex.conformance.probe import TOKENS, Probe, datum, logprobs_of, shown
from tinkex.conformance.suite import check, expect
from tinkex.wire import tinker_public_pb2 as pb

NUM_TARGETS = len(TOKENS) - 1


def _close(a: float, b: float, tolerance: float = 1e-3) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


@check("2.3", "create_model names the run <session>:train:<seq> and get_info describes it")
def create_model(probe: Probe) -> None:
    run = probe.run
    info = probe.ask("POST", "get_info", {"model_id": run.model_id, "type": "get_info"})
    expect(info.get("model_id") == run.model_id, f"model_id {run.model_id}", info)
    data = info.get("model_data")
    expect(isinstance(data, dict), "model_data, an object", info)
    expect(info.get("lora_rank") in (4, None), "lora_rank 4", info)


@check("8.3", "forward_backward answers with logprobs per datum and loss:sum")
def outputs(probe: Probe) -> None:
    output = probe.run.forward_backward([datum(), datum(TOKENS[:4])], forward_only=True)
    lengths = [len(values) for values in logprobs_of(output)]
    expect(lengths == [NUM_TARGETS, 3], f"logprobs of length {[NUM_TARGETS, 3]}", lengths)
    expect("loss:sum" in output.metrics, "a metric loss:sum", dict(output.metrics))


@check("5.4", "every metric is named name:reduction, with one colon")
def metric_names(probe: Probe) -> None:
    output = probe.run.forward_backward([datum()], forward_only=True)
    bad = [name for name in output.metrics if name.count(":") != 1]
    expect(not bad, "exactly one colon", bad)


@check("5.5", "cross_entropy is the sum of -logprob * weight, negative weights included")
def cross_entropy(probe: Probe) -> None:
    for weight in (1.0, 2.0, -0.5):
        output = probe.run.forward_backward([datum(weight=weight)], forward_only=True)
        wanted = -weight * float(np.sum(logprobs_of(output)[0]))
        got = output.metrics["loss:sum"]
        expect(_close(got, wanted), f"loss:sum {wanted:.4f} for weights {weight}", got)


@check("5.5", "importance_sampling of its own logprobs is minus the sum of advantages")
def importance_sampling(probe: Probe) -> None:
    logprobs = logprobs_of(probe.run.forward_backward([datum()], forward_only=True))[0]
    advantages = [0.5] * NUM_TARGETS
    for loss_fn in ("importance_sampling", "ppo"):
        item = datum(logprobs=list(logprobs), advantages=advantages)
        output = probe.run.forward_backward([item], loss_fn, forward_only=True)
        wanted, got = -sum(advantages), output.metrics["loss:sum"]
        expect(_close(got, wanted, 1e-2), f"{loss_fn} loss:sum {wanted:.3f}", got)


@check("5.5", "an unknown loss is refused, never run as another")
def unknown_loss(probe: Probe) -> None:
    _expect_refusal(probe, loss_fn="no_such_loss")


@check("5.5", "a token outside the vocabulary is refused")
def bad_token(probe: Probe) -> None:
    _expect_refusal(probe, tokens=[5, 2**31 - 2, 7])


def _expect_refusal(
    probe: Probe, loss_fn: str = "cross_entropy", tokens: list[int] | None = None
) -> None:
    """Refused, and the run goes on."""
    answer = probe.run.post_training([datum(tokens or TOKENS)], loss_fn)
    probe.expect_refusal(answer, category="user")
    probe.run.loss([datum()])


@check("5.1", "a refused request consumes its seq_id: the next one runs")
def refused_seq(probe: Probe) -> None:
    run = probe.new_run()
    run.post_training([datum(TOKENS)], "no_such_loss")
    expect(run.loss([datum()]) > 0, "the next request to run", "it did not")


@check("5.1", "requests run in seq_id order even when they arrive the other way round")
def order(probe: Probe) -> None:
    run = probe.new_run()
    first, second = run.next_seq(), run.next_seq()
    later = run.post_training([datum()], seq=second, forward_only=True)
    sooner = run.post_training([datum()], seq=first)
    for answer in (later, sooner):
        expect(answer.is_success, "both accepted", shown(answer))
    for answer in (sooner, later):
        probe.wait(answer.json()["request_id"], pb.ForwardBackwardOutput)


@check("4.6", "a repeated (model_id, seq_id) returns the same promise and runs once")
def repeat(probe: Probe) -> None:
    run = probe.new_run()
    seq = run.next_seq()
    answers = [run.post_training([datum()], seq=seq) for _ in range(2)]
    ids = {answer.json().get("request_id") for answer in answers}
    expect(len(ids) == 1, "one request_id", ids)
    probe.wait(str(ids.pop()), pb.ForwardBackwardOutput)
    once = run.optim_step().get("metrics") or {}
    twin = probe.new_run()
    twin.forward_backward([datum()])
    twice = twin.optim_step().get("metrics") or {}
    expect(_close(run.loss([datum()]), twin.loss([datum()])), "the gradient of one", (once, twice))


@check("2.3", "training lowers the loss")
def learns(probe: Probe) -> None:
    run = probe.new_run()
    before = run.loss([datum()])
    for _ in range(5):
        run.forward_backward([datum()])
        run.optim_step(5e-3)
    after = run.loss([datum()])
    expect(after < before, f"less than {before:.4f} after 5 steps", after)


@check("2.3", "forward-only leaves no gradient behind")
def forward_only(probe: Probe) -> None:
    run = probe.new_run()
    before = run.loss([datum()])
    run.optim_step(1e-2)
    expect(_close(run.loss([datum()]), before, 1e-4), f"the loss to stay {before:.4f}", "it moved")


@check("2.3", "gradients add up over calls until optim_step")
def accumulation(probe: Probe) -> None:
    apart, together = probe.new_run(), probe.new_run()
    first, second = datum(TOKENS[:5]), datum(TOKENS[3:])
    apart.forward_backward([first])
    apart.forward_backward([second])
    together.forward_backward([first, second])
    losses = []
    for run in (apart, together):
        run.optim_step()
        losses.append(run.loss([first, second]))
    expect(_close(*losses), "the same loss either way", losses)


@check("1.2", "forward_backward takes a zstd body when the server says so")
def compressed(probe: Probe) -> None:
    probe.require("proto_compress_fwdbwd")
    probe.run.forward_backward([datum()], forward_only=True, compress=True)


@check("2.3", "save_weights and load_weights bring back weights and optimizer")
def save_and_load(probe: Probe) -> None:
    run = probe.new_run()
    for _ in range(2):
        run.forward_backward([datum()])
        run.optim_step()
    path = run.save("conformance-state")
    at_save = run.loss([datum()])
    run.forward_backward([datum()])
    run.optim_step()
    went_on = run.loss([datum()])
    # Weights alone would repeat the loss; only with the optimizer's moments is the next step the
    # same, too.
    run.submit("load_weights", path=path, optimizer=True)
    expect(_close(run.loss([datum()]), at_save, 1e-4), f"loss {at_save:.5f} again", "another")
    run.forward_backward([datum()])
    run.optim_step()
    resumed = run.loss([datum()])
    expect(_close(resumed, went_on, 1e-4), f"loss {went_on:.5f} after the same step", resumed)


@check("5.8", "a run is created from a checkpoint in one call when the server says so")
def create_via_load(probe: Probe) -> None:
    probe.require("create_model_via_load_weights")
    path = probe.new_run().save("conformance-origin")
    session_id = probe.new_session()
    answer = probe.result(
        "load_weights",
        {
            "session_id": session_id,
            "model_seq_id": 0,
            "path": path,
            "optimizer": False,
            "type": "load_weights",
        },
    )
    expect(
        answer.get("model_id") in (f"{session_id}:train:0", None),
        f"model_id {session_id}:train:0",
        answer,
    )


@check("2.3", "a save under a name in use is refused without overwrite")
def name_in_use(probe: Probe) -> None:
    run = probe.new_run()
    run.save("conformance-once")
    body = run.body("save_weights", path="conformance-once", overwrite=False)
    probe.expect_refusal(probe.call("POST", "save_weights", body))


@check("4.2", "an unknown request id is refused")
def unknown_future(probe: Probe) -> None:
    body = {"request_id": "no-such-request", "allow_metadata_only": True}
    answer = probe.call("POST", "retrieve_future", body)
    good = answer.status_code in (400, 404, 410) or (answer.is_success and "error" in answer.json())
    expect(good, "400, 404, 410 or a failed future", shown(answer))


@check("5.7", "a traced custom loss runs on the server when it says so")
def custom_loss(probe: Probe) -> None:
    probe.require("custom_loss_server_side")
    result = {"tuple": [{"ref": "loss"}, {"dict": {}}]}
    steps: list[tuple[str, str, str, list[Any]]] = [
        ("placeholder", "logprobs", "logprobs", []),
        ("call_method", "total", "sum", [{"ref": "logprobs"}]),
        ("call_function", "loss", "operator.neg", [{"ref": "total"}]),
        ("output", "output", "output", [result]),
    ]
    nodes = [
        {"op": op, "name": name, "target": target, "args": args, "kwargs": {}}
        for op, name, target, args in steps
    ]
    answer = probe.result(
        "create_custom_loss",
        {
            "session_id": probe.session_id,
            "custom_loss_seq_id": 0,
            "name": "conformance",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"format": 1, "nodes": nodes},
            "type": "create_custom_loss",
        },
    )
    loss_id = answer.get("loss_id")
    expect(isinstance(loss_id, str), "loss_id, a string", answer)
    run = probe.new_run()
    output = run.forward_backward([datum()], "custom", loss_id=str(loss_id))
    wanted = run.loss([datum()])
    expect(_close(output.metrics["loss:sum"], wanted), f"loss {wanted:.4f}", output.metrics)
