"""The toy engine keeps every promise of `jobs.Engine` that server and SDK tests lean on (R31)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from datums import train_datum

from tinkex.contract.optimizers import AdamParams
from tinkex.engine import jobs
from tinkex.engine.toy.cache import PrefixCache
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.engine import toy_engine

BASE = "toy/base"


class Client:
    """Submits a job and waits for its end, keeping all events."""

    def __init__(self, engine: jobs.Engine) -> None:
        self.engine = engine
        self.count = 0

    def start(self, job: jobs.Job) -> tuple[list[jobs.Event], threading.Event]:
        events: list[jobs.Event] = []
        ended = threading.Event()

        def emit(event: jobs.Event) -> None:
            events.append(event)
            if isinstance(event, jobs.Done | jobs.Failed):
                ended.set()

        self.engine.submit(job, emit)
        return events, ended

    def run(self, kind: type, **fields: Any) -> Any:
        self.count += 1
        events, ended = self.start(kind(job_id=f"j{self.count}", **fields))
        assert ended.wait(60)
        last = events[-1]
        return last.result if isinstance(last, jobs.Done) else last

    def create(self, adapter_id: str = "a") -> None:
        self.run(
            jobs.CreateAdapterJob,
            adapter_id=adapter_id,
            base_model=BASE,
            lora=jobs.LoraSpec(rank=8),
        )

    def sample(self, prompt: list[int], **fields: Any) -> Any:
        fields.setdefault("adapter_folder", None)
        return self.run(jobs.SampleJob, base_model=BASE, prompt=np.array(prompt), **fields)


@pytest.fixture
def client() -> Iterator[Client]:
    engine = toy_engine()
    yield Client(engine)
    engine.close()


def train(client: Client, steps: int, adapter_id: str = "a") -> list[float]:
    losses = []
    for _ in range(steps):
        result = client.run(
            jobs.TrainJob,
            adapter_id=adapter_id,
            data=(train_datum([5, 6, 7, 8, 9]),),
            loss_fn="cross_entropy",
        )
        client.run(jobs.OptimJob, adapter_id=adapter_id, params=AdamParams(learning_rate=0.01))
        losses.append(result.metrics["loss:sum"])
    return losses


def test_loss_falls_and_greedy_then_repeats_what_was_taught(client, tmp_path):
    client.create()
    losses = train(client, 30)
    assert losses[-1] < losses[0] / 50
    folder = str(tmp_path / "s")
    client.run(jobs.SaveAdapterJob, adapter_id="a", folder=folder, for_sampling=True)
    result = client.sample([5], adapter_folder=folder, temperature=0.0, max_tokens=4)
    assert result.sequences[0].tokens.tolist() == [6, 7, 8, 9]


def test_a_gradient_is_the_slope_of_the_loss():
    """Central difference of the table against `backward`."""
    from tinkex.engine.toy.model import GAIN, ToyAdapter

    adapter = ToyAdapter(BASE, 50, jobs.LoraSpec(rank=1), "adamw")
    tokens, targets = np.array([3, 3, 4]), np.array([7, 8, 9])
    slopes = np.array([-1.0, 0.5, 2.0])
    adapter.backward(tokens, targets, slopes)
    for (context, token), got in adapter.grads[0].items():
        cell = adapter._cell(context, token)
        values = []
        for eps in (1e-6, -1e-6):
            adapter._state[cell, 0] = eps
            adapter._rows.clear()
            values.append(float((slopes * adapter.logprobs(tokens, targets)).sum()))
        adapter._state[cell, 0] = 0
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(got, rel=1e-4), (context, token, GAIN)


def test_resume_with_optimizer_is_bit_exact_and_without_is_not(client, tmp_path):
    client.create()
    train(client, 3)
    client.run(jobs.SaveAdapterJob, adapter_id="a", folder=str(tmp_path / "c"), with_optimizer=True)
    straight = train(client, 3)
    for name, with_optimizer in (("b", True), ("c", False)):
        client.run(
            jobs.LoadAdapterJob,
            adapter_id=name,
            base_model=BASE,
            folder=str(tmp_path / "c"),
            with_optimizer=with_optimizer,
        )
    assert train(client, 3, "b") == straight
    assert train(client, 3, "c") != straight


def test_a_recovery_snapshot_keeps_gathered_gradients(client, tmp_path):
    client.create()
    job = {"data": (train_datum([1, 2, 3]),), "loss_fn": "cross_entropy"}
    client.run(jobs.TrainJob, adapter_id="a", **job)
    client.run(
        jobs.SaveAdapterJob,
        adapter_id="a",
        folder=str(tmp_path / "r"),
        with_optimizer=True,
        with_gradients=True,
    )
    client.run(
        jobs.LoadAdapterJob,
        adapter_id="b",
        base_model=BASE,
        folder=str(tmp_path / "r"),
        with_optimizer=True,
    )
    norms = [
        client.run(jobs.OptimJob, adapter_id=name, params=AdamParams()).metrics
        for name in ("a", "b")
    ]
    assert norms[0] == norms[1]
    assert norms[0]["grad_norm:mean"] > 0


def test_equal_seeds_give_equal_tokens_and_samples_differ(client):
    one = client.sample([5, 6], num_samples=3, max_tokens=12, seed=7, stop_tokens=())
    two = client.sample([5, 6], num_samples=3, max_tokens=12, seed=7, stop_tokens=())
    lists = [s.tokens.tolist() for s in one.sequences]
    assert lists == [s.tokens.tolist() for s in two.sequences]
    assert lists[0] != lists[1]


def test_top_k_one_equals_greedy_and_reports_certainty(client):
    greedy = client.sample([5], max_tokens=5, temperature=0.0, stop_tokens=())
    top1 = client.sample([5], max_tokens=5, top_k=1, seed=1, stop_tokens=())
    assert greedy.sequences[0].tokens.tolist() == top1.sequences[0].tokens.tolist()
    assert np.allclose(top1.sequences[0].logprobs, 0)


def test_stop_string_is_part_of_the_output_once(client):
    free = client.sample([5], max_tokens=8, temperature=0.0, stop_tokens=())
    text = "".join(chr(32 + t % 95) for t in free.sequences[0].tokens)
    cut = client.sample([5], max_tokens=8, temperature=0.0, stop_strings=(text[2:4],))
    assert cut.sequences[0].stop_reason == "stop"
    assert cut.sequences[0].tokens.tolist() == free.sequences[0].tokens[:4].tolist()


def test_prompt_scores_have_their_shapes_and_agree(client):
    targets = np.array([[6, -1], [7, 3]])
    result = client.sample(
        [5, 6, 7],
        max_tokens=1,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=3,
    )
    assert np.isnan(result.prompt_logprobs[0])
    assert result.topk_prompt.token_ids.shape == (3, 4)
    assert result.topk_prompt.logprobs[0].tolist() == [-99999.0] * 4
    assert result.target_prompt_logprobs[:, 0].tolist() == result.prompt_logprobs[1:].tolist()
    assert np.isnan(result.target_prompt_logprobs[0, 1])
    assert result.prompt_alt.token_ids.shape == (2, 3)
    assert result.sequences[0].topk.token_ids.shape == (1, 2)


def test_more_alternatives_than_tokens_and_alternatives_to_no_token_have_their_shapes():
    engine = toy_engine(ToyConfig(vocab_size=7))
    asked = {"topk_prompt_logprobs": 9, "topk_sample_logprobs": 9, "prompt_logprobs": True}
    try:
        for num_tokens in (0, 2):
            result = Client(engine).sample([5, 6], max_tokens=num_tokens, stop_tokens=(), **asked)
            (sequence,) = result.sequences
            assert sequence.topk.token_ids.shape == sequence.topk.logprobs.shape == (num_tokens, 9)
            assert (sequence.topk.logprobs[:, 7:] == -99999.0).all()
            assert (result.topk_prompt.logprobs[1] > -99999.0).sum() == 7
    finally:
        engine.close()


def test_last_n_hides_the_earlier_prompt(client):
    result = client.sample(
        [5, 6, 7, 8], max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=2
    )
    assert np.isnan(result.prompt_logprobs).tolist() == [True, True, False, False]


def test_a_repeated_prompt_reports_cache_hits(client):
    prompt = list(range(40))
    assert client.sample(prompt, max_tokens=1).prompt_cache_hit_tokens == 0
    assert client.sample(prompt, max_tokens=1).prompt_cache_hit_tokens == 32


def test_prompts_seen_long_ago_are_forgotten():
    cache = PrefixCache(num_blocks=4)
    first, second = np.arange(40), np.arange(100, 140)
    assert cache.hits("", first) == 0
    assert cache.hits("another adapter", first) == 0
    assert cache.hits("", first) == 32
    assert cache.hits("", second) == 0
    assert cache.hits("", np.arange(200, 240)) == 0
    assert cache.hits("", first) == 0


def test_a_forgotten_snapshot_is_read_again(tmp_path):
    client = Client(toy_engine(ToyConfig(num_snapshots=1)))
    folders = [str(tmp_path / name) for name in "ab"]
    client.create()
    for folder in folders:
        client.run(jobs.SaveAdapterJob, adapter_id="a", folder=folder, for_sampling=True)
    assert len(client.engine.compute.snapshots) == 1
    tokens = [client.sample([1], adapter_folder=f, max_tokens=4, seed=1) for f in folders * 2]
    assert len({tuple(result.sequences[0].tokens) for result in tokens}) == 1
    client.engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_fn": "nonsense"}, "no loss 'nonsense'"),
        ({"loss_fn_config": {"beta": 1.0}}, "has no such setting"),
        ({"data": ()}, "at least one datum"),
        ({"data": (train_datum([1, 99999]),)}, "token 99999 is outside"),
        ({"adapter_id": "ghost"}, "no adapter 'ghost'"),
        ({"loss_fn": "ppo"}, "data[0].loss_fn_inputs: loss 'ppo' needs logprobs, advantages"),
    ],
)
def test_bad_training_input_is_a_user_error_and_changes_nothing(client, change, message):
    client.create()
    good = {"adapter_id": "a", "data": (train_datum([1, 2, 3]),), "loss_fn": "cross_entropy"}
    failed = client.run(jobs.TrainJob, **(good | change))
    assert failed.category == "user"
    assert message in failed.message
    metrics = client.run(jobs.OptimJob, adapter_id="a", params=AdamParams()).metrics
    assert metrics["grad_norm:mean"] == 0


def test_a_traced_loss_trains_like_the_loss_it_spells(client):
    def node(op, name, target, *args):
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    answer = {"tuple": [{"ref": "neg"}, {"dict": {"custom/n:sum": {"ref": "sum_1"}}}]}
    nodes = [
        node("placeholder", "logprobs", "logprobs"),
        node("placeholder", "weights", "weights"),
        node("call_function", "mul", "operator.mul", {"ref": "logprobs"}, {"ref": "weights"}),
        node("call_method", "sum_1", "sum", {"ref": "mul"}),
        node("call_function", "neg", "operator.neg", {"ref": "sum_1"}),
        node("output", "output", "output", answer),
    ]
    graph = {"format": 1, "nodes": nodes}
    custom = jobs.TracedLoss(inputs=(("logprobs", 1), ("weights", 1)), graph=graph)
    for name in ("a", "b"):
        client.create(name)
    data = (train_datum([5, 6, 7]), train_datum([7, 8, 9, 10]))
    plain = client.run(jobs.TrainJob, adapter_id="a", data=data, loss_fn="cross_entropy")
    traced = client.run(
        jobs.TrainJob, adapter_id="b", data=data, loss_fn="custom", custom_loss=custom
    )
    assert not isinstance(traced, jobs.Failed), traced
    assert traced.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"])
    assert traced.metrics["custom/n:sum"] == pytest.approx(-plain.metrics["loss:sum"])
    norms = [
        client.run(jobs.OptimJob, adapter_id=name, params=AdamParams()).metrics
        for name in ("a", "b")
    ]
    assert norms[0]["grad_norm:mean"] == pytest.approx(norms[1]["grad_norm:mean"])


def test_cancel_ends_a_slow_stream_at_once():
    engine = toy_engine(ToyConfig(token_latency_s=0.05))
    job = jobs.SampleJob(
        job_id="s",
        base_model=BASE,
        adapter_folder=None,
        prompt=np.array([1]),
        max_tokens=1000,
        stop_tokens=(),
        stream=True,
    )
    events, ended = Client(engine).start(job)
    deadline = time.monotonic() + 30
    while not events and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.cancel("s")
    assert ended.wait(60)
    assert events[-1].category == "cancelled"
    assert 1 <= sum(isinstance(e, jobs.Tokens) for e in events) < 1000
    engine.close()
    assert events[-1].category == "cancelled", "it says nothing more"


def test_with_latency_jobs_of_an_adapter_wait_for_each_other_and_for_no_other():
    engine, ended, all_ended = toy_engine(ToyConfig(latency_s=0.2)), [], threading.Event()

    def emit(event: jobs.Event) -> None:
        ended.append(event.job_id)
        if len(ended) == 4:
            all_ended.set()

    began = time.monotonic()
    for job_id, adapter_id in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
        engine.submit(jobs.DropAdapterJob(job_id=job_id, adapter_id=adapter_id), emit)
    assert all_ended.wait(60)
    assert time.monotonic() - began >= 0.6
    assert ended == ["a1", "b1", "a2", "a3"]
    engine.close()


def test_with_latency_passes_of_all_adapters_take_turns_on_the_device():
    client = Client(toy_engine(ToyConfig(train_token_latency_s=0.05)))
    ended = []
    for name in ("a", "b"):
        client.create(name)
    began = time.monotonic()
    for name in ("a", "b"):
        job = jobs.TrainJob(
            job_id=name, adapter_id=name, data=(train_datum([5, 6, 7]),), loss_fn="cross_entropy"
        )
        ended.append(client.start(job))
    assert all(event.wait(60) for _, event in ended)
    assert time.monotonic() - began >= 2 * 2 * 0.05
    assert ended[0][0][-1].result.metrics["train_time_s:sum"] == pytest.approx(0.1)
    client.engine.close()


def test_with_latency_samples_wait_for_a_slot():
    client = Client(toy_engine(ToyConfig(token_latency_s=0.05, max_running=1)))
    began = time.monotonic()
    result = client.sample([5], num_samples=2, max_tokens=3, stop_tokens=())
    assert time.monotonic() - began >= 2 * 3 * 0.05
    assert result.num_sampled_tokens == 6
    client.engine.close()


def test_close_ends_every_waiting_job():
    engine = toy_engine(ToyConfig(latency_s=600))
    events, ended = Client(engine).start(jobs.DescribeModelJob(job_id="d", base_model=BASE))
    engine.close()
    assert ended.wait(60)
    assert [type(e) for e in events] == [jobs.Failed]


def test_streamed_tokens_are_the_result(client):
    job = jobs.SampleJob(
        job_id="s",
        base_model=BASE,
        adapter_folder=None,
        prompt=np.array([1]),
        num_samples=2,
        max_tokens=6,
        stop_tokens=(),
        stream=True,
    )
    events, ended = client.start(job)
    assert ended.wait(60)
    for i, sequence in enumerate(events[-1].result.sequences):
        parts = [e.tokens for e in events if isinstance(e, jobs.Tokens) and e.sample_index == i]
        assert np.concatenate(parts).tolist() == sequence.tokens.tolist()


def test_the_toy_engine_imports_no_torch():
    code = "import sys, tinkex.engine.toy.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=500).returncode == 0


def test_a_call_takes_microseconds_not_milliseconds(client):
    client.create()
    train(client, 1)

    def cost() -> float:
        start = time.process_time()
        for _ in range(10):
            train(client, 1)
        return (time.process_time() - start) / 20

    assert min(cost() for _ in range(10)) < 0.003
