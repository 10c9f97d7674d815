"""A group of two computes what one device does: every family, every loss, every file.

They differ in the order of sums alone. Where it is shown that nothing else differs, both compute in
float64, and what is left is the rounding of fp32 files. In fp32 a gradient of these models differs
by up to 1.2e-6 of its length, as much as one device's differs from float64's.
"""

from __future__ import annotations

import filecmp
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import training
from table import FAMILIES, VOCAB
from training import distance, job, make, train

from tinkex.contract.optimizers import AdamParams, LionParams, MuonParams
from tinkex.engine import jobs
from tinkex.engine.checkpoint import reader as checkpoint
from tinkex.errors import EngineError, InvalidInputError, ModelNotFoundError

KINDS = ("qwen3-yarn", "qwen3_moe", "qwen3_5")
"""Dense, mixture, hybrid."""
CLOSE = 1e-6
"""Of fp32's logprobs, and everything in float64."""
FP32 = 3e-6
"""Of gradients in fp32."""
PROMPT = np.arange(3, 40) % VOCAB


def data(loss_fn: str = "cross_entropy", seed: int = 0):
    rng = np.random.default_rng(seed)
    made = []
    for length in (7, 12, 12, 1, 30):
        inputs = {"target_tokens": rng.integers(0, VOCAB, length)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = rng.normal(size=length).astype(np.float32)
            inputs["weights"][: length // 3] = 0
        else:
            inputs["logprobs"] = -rng.uniform(3, 6, length).astype(np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        made.append(jobs.TrainDatum(tokens=rng.integers(0, VOCAB, length), inputs=inputs))
    return tuple(made)


def save(trainer, folder, *, with_gradients=True, name="a"):
    training.save(trainer, folder, name, with_optimizer=True, with_gradients=with_gradients)
    return folder


def load(trainer, folder, name="a"):
    trainer.load(
        jobs.LoadAdapterJob(
            job_id="", adapter_id=name, base_model="tiny", folder=str(folder), with_optimizer=True
        )
    )


def start(both, tmp_path):
    """The same adapter, one that already changes the model, in both trainers."""
    make(both.alone)
    folder = save(both.alone, tmp_path / "start")
    load(both.group, folder)


def state(trainer, folder) -> dict[str, torch.Tensor]:
    """Everything a trainer would save, by name."""
    from safetensors.torch import load_file

    save(trainer, folder)
    return {
        f"{f.name} {n}": t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()
    }


def optim(trainer, params=None):
    params = params or AdamParams(learning_rate=1e-3)
    return trainer.optim(jobs.OptimJob(job_id="", adapter_id="a", params=params))


def assert_same(alone, group, close=CLOSE) -> None:
    """Weights, moments and gradients, each file as one vector; a single matrix, of which some are
    small, within ten times as much."""
    assert alone.keys() == group.keys()
    for file in {name.split()[0] for name in alone}:
        names = [name for name in alone if name.startswith(file)]
        mine, theirs = (torch.cat([x[n].flatten() for n in names]) for x in (group, alone))
        assert distance(mine, theirs) < close, file
    assert max(distance(group[name], alone[name]) for name in alone) < 10 * close


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, FP32), (torch.float64, 2e-7)])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_one_device(pair, family, dtype, close, tmp_path):
    both = pair(family, dtype)
    start(both, tmp_path)
    (alone,), (group,) = train(both.alone, job(data())), train(both.group, job(data()))
    for mine, theirs in zip(group.outputs, alone.outputs, strict=True):
        assert distance(mine["logprobs"], theirs["logprobs"]) < CLOSE
    assert group.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], abs=1e-4)
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"), close)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_losses_are_those_of_one_device(pair, loss_fn, tmp_path):
    both = pair(KINDS[0], torch.float64)
    start(both, tmp_path)
    (alone,), (group,) = (train(x, job(data(loss_fn), loss_fn)) for x in (both.alone, both.group))
    assert group.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], abs=1e-4)
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"))


@pytest.mark.parametrize("family", KINDS)
def test_layers_that_are_recomputed_give_the_same_gradients(pair, family, tmp_path):
    both = pair(family, torch.float64, activation_bytes=1)
    start(both, tmp_path)
    train(both.alone, job(data()))
    train(both.group, job(data()))
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"))


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=1e-2, grad_clip_norm=0.5, weight_decay=0.1),
        MuonParams(learning_rate=1e-2),
        LionParams(learning_rate=1e-3),
    ],
    ids=lambda params: type(params).__name__,
)
def test_steps_are_those_of_one_device(pair, params, tmp_path):
    both = pair("qwen3_5_moe", torch.float64)
    kind = {AdamParams: "adamw", MuonParams: "muon", LionParams: "lion"}[type(params)]
    spec = jobs.LoraSpec(rank=4, seed=1, alpha=8.0)
    create = jobs.CreateAdapterJob(
        job_id="", adapter_id="a", base_model="m", lora=spec, optimizer=kind
    )
    norms = []
    for trainer in (both.alone, both.group):
        trainer.create(create)
        train(trainer, job(data()))
        norms.append(optim(trainer, params).metrics["grad_norm:mean"])
    assert norms[1] == pytest.approx(norms[0], rel=CLOSE)
    alone, group = state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two")
    assert alone.keys() == group.keys()
    far = {name: distance(group[name], alone[name]) for name in alone}
    # Lion steps by signs: where a gradient is nearly zero, the last digit decides.
    assert max(far.values()) < (1e-2 if kind == "lion" else 1e-5), max(far.items(), key=str)


@pytest.mark.parametrize("family", KINDS)
def test_a_file_of_one_device_is_the_file_of_a_group(pair, family, tmp_path):
    """Loaded by a group and saved again: the same bytes, and one device can go on from them."""
    both = pair(family)
    make(both.alone)
    train(both.alone, job(data()))
    optim(both.alone)
    train(both.alone, job(data(seed=1)))
    first = save(both.alone, tmp_path / "alone")
    load(both.group, first)
    second = save(both.group, tmp_path / "group")
    names = sorted(path.name for path in first.iterdir())
    assert len(names) == 5
    assert filecmp.cmpfiles(first, second, names, shallow=False)[0] == names
    assert checkpoint.content_of(first) == checkpoint.content_of(second)


def test_training_goes_on_in_one_device_where_a_group_stopped(pair, tmp_path):
    both = pair("qwen3_moe")
    start(both, tmp_path)
    for seed in range(3):
        for trainer in (both.alone, both.group):
            train(trainer, job(data(seed=seed)))
            optim(trainer)
    load(both.alone, save(both.group, tmp_path / "moved"), "b")
    (stayed,) = train(both.group, job(data(seed=9)))
    (moved,) = train(both.alone, job(data(seed=9), adapter_id="b"))
    for mine, theirs in zip(moved.outputs, stayed.outputs, strict=True):
        assert distance(mine["logprobs"], theirs["logprobs"]) < CLOSE


def test_an_adapter_that_only_one_member_has_is_trained(pair, tmp_path):
    """Both meet in every sum of the backward pass, though one has nothing to train."""
    from safetensors.torch import load_file, save_file

    both = pair("qwen3_moe", torch.float64)
    make(both.alone)
    folder = save(both.alone, tmp_path / "first", with_gradients=False)
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        tensors = load_file(folder / file)
        kept = {name: t for name, t in tensors.items() if ".layers.0.mlp.experts.5." in name}
        save_file(kept, folder / file, metadata={"format": "pt"})
    (folder / "tinkex.json").unlink()
    for trainer in (both.alone, both.group):
        trainer.load(
            jobs.LoadAdapterJob(
                job_id="",
                adapter_id="a",
                base_model="tiny",
                folder=str(folder),
                with_optimizer=False,
            )
        )
        train(trainer, job(data()))
        assert optim(trainer).metrics["grad_norm:mean"] > 0
    alone, group = state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two")
    assert len(alone) == 3 * 6  # weights and two moments of three linears' A and B
    assert_same(alone, group)


def sample(sampler, adapter=None, **options):
    done: list[jobs.Event] = []
    fields = {"job_id": "j", "base_model": "m", "adapter_folder": None, "prompt": PROMPT}
    sampler.add(jobs.SampleJob(**(fields | options)), adapter, done.append, "v")
    while sampler.has_work:
        sampler.step()
    assert isinstance(done[-1], jobs.Done), done[-1]
    return done[-1].result


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_one_device(pair, family, tmp_path):
    """Chunked prefill, forks of one prompt, a cached prefix in the second round."""
    both = pair(family)
    start(both, tmp_path)
    alone, group = both.samplers(max_pass_tokens=11)
    weights = both.alone.snapshot("a"), both.group.snapshot("a")
    for seed in range(2):
        options = {"num_samples": 3, "max_tokens": 9, "seed": seed, "stop_tokens": ()}
        one = sample(alone, weights[0], **options)
        two = sample(group, weights[1], **options)
        assert one.prompt_cache_hit_tokens == two.prompt_cache_hit_tokens
        for mine, theirs in zip(two.sequences, one.sequences, strict=True):
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", KINDS)
def test_all_logprobs_of_a_prompt_are_those_of_one_device(pair, family):
    """The whole vocabulary at each position: the logits, but for a constant."""
    both = pair(family)
    alone, group = both.samplers()
    every = np.tile(np.arange(VOCAB), (len(PROMPT) - 1, 1))
    options = {"max_tokens": 1, "seed": 0, "target_prompt_logprobs": every}
    one, two = sample(alone, **options), sample(group, **options)
    assert distance(two.target_prompt_logprobs, one.target_prompt_logprobs) < CLOSE


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_told_and_prescribed_as_on_one_device(pair, family, tmp_path):
    """Router replay: a group's sample trains one device, and one device's a group."""
    both = pair(family, torch.float64)
    start(both, tmp_path)
    alone, group = both.samplers(max_pass_tokens=11)
    options = {"num_samples": 2, "max_tokens": 9, "seed": 1, "stop_tokens": ()}
    told = [sample(one, **options, routed_experts=True) for one in (alone, group)]
    assert np.array_equal(told[0].prompt_routed_experts, told[1].prompt_routed_experts)
    made = []
    for one, two in zip(told[0].sequences, told[1].sequences, strict=True):
        assert np.array_equal(one.routed_experts, two.routed_experts)
        tokens = np.concatenate([PROMPT, one.tokens]).astype(np.int64)
        rows = np.concatenate([told[1].prompt_routed_experts, two.routed_experts])[:-1]
        # Of another token than its own: no router would choose just these.
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(rows), np.float32)}
        datum = jobs.TrainDatum(
            tokens=tokens[:-1], inputs=inputs, routed_experts=np.roll(rows, 1, axis=0)
        )
        made.append(datum)
    answers = [train(trainer, job(tuple(made)))[0] for trainer in (both.alone, both.group)]
    for mine, theirs in zip(answers[1].outputs, answers[0].outputs, strict=True):
        assert distance(mine["logprobs"], theirs["logprobs"]) < CLOSE
    for name in ("e_replayed:mean", "e_replay_changed:mean"):
        assert answers[0].metrics[name] == answers[1].metrics[name] > 0
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"))


def test_gradients_that_groups_share_are_whole(pair, tmp_path):
    """What two workers of a pool do at a step, when each of them is a group."""
    both = pair("qwen3_moe", torch.float64)
    start(both, tmp_path)
    load(both.group, tmp_path / "start", "b")
    train(both.group, job(data()), job(data(seed=1), adapter_id="b"))
    for name in "ab":
        both.group.share_gradient(jobs.ShareGradientJob(job_id="", adapter_id=name))
    mine, theirs = (both.group.find(name).shared for name in "ab")
    assert {len(grad) for grad in (*mine.shards.values(), *theirs.shards.values())} == {
        mine.num_numbers
    }
    mine.brought = {shard: grad + theirs.shards[shard] for shard, grad in mine.shards.items()}
    both.group.add_gradient(jobs.AddGradientJob(job_id="", adapter_id="a"))
    train(both.alone, job(data()), job(data(seed=1)))
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"))


def test_other_calls_are_made_between_the_passes_of_a_job(leader, pair, tmp_path):
    """What the engine does in the middle of a long job: a sample's steps, another adapter's job."""
    both = pair("qwen3_moe", torch.float64, max_tokens=30)
    start(both, tmp_path)
    load(both.group, tmp_path / "start", "b")
    _, sampler = both.samplers()
    did: list[str] = []

    def between() -> None:
        if not did:
            did.append("a sample")
            sample(sampler, max_tokens=3, seed=0)
            train(both.group, job(data(seed=1)[:2], adapter_id="b"))

    both.group.passes.after_pass = lambda: leader.between(between)
    train(both.group, job(data()))
    train(both.alone, job(data()))
    assert did
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"))


@contextmanager
def little_memory(pid: int, room_bytes: int) -> Iterator[None]:
    """A process may take so much more memory than it has, and no more."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + room_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


ROOM_BYTES = 28 << 20
"""A job of 20,000 tokens needs 100 MB, an eighth of it 12 MB."""


def long_data(num: int) -> tuple[jobs.TrainDatum, ...]:
    return data() * (num // sum(len(datum.tokens) for datum in data()))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_a_member_without_memory_fails_the_job_to_blame_and_the_group_goes_on(
    leader, pair, tmp_path
):
    # An eighth of so many tokens is still the whole job.
    both = pair("qwen3-yarn", max_tokens=1 << 20, activation_bytes=1)
    start(both, tmp_path)
    train(both.group, job(data()))  # whatever is imported is imported by now
    train(both.alone, job(data()))
    before = leader.group.num_regroups
    with little_memory(leader.pids[0], ROOM_BYTES):
        (error,) = both.group.train([job(long_data(20_000))])
    assert isinstance(error, EngineError)
    assert re.search("member 1 of the group: .*can't allocate memory", str(error))
    assert re.search(r"held \d+ tokens; send fewer or shorter datums", str(error))
    assert leader.group.num_regroups == before + 2, "it was tried twice"
    train(both.group, job(data()))
    train(both.alone, job(data()))
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"), FP32)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_a_job_that_is_too_large_for_a_member_is_done_in_small_pieces(leader, pair, tmp_path):
    both = pair("qwen3-yarn", max_tokens=20_000, activation_bytes=1)
    start(both, tmp_path)
    train(both.group, job(data()))  # whatever is imported is imported by now
    train(both.alone, job(data()))
    before = leader.group.num_regroups
    with little_memory(leader.pids[0], ROOM_BYTES):
        train(both.group, job(long_data(20_000)))
    assert leader.group.num_regroups == before + 1
    train(both.alone, job(long_data(20_000)))
    # Sums over many tokens, in another order.
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"), 1e-3)


def test_a_refused_call_leaves_the_group_as_it_was(pair, tmp_path):
    both = pair("qwen3-yarn")
    start(both, tmp_path)
    with pytest.raises(ModelNotFoundError):
        load(both.group, tmp_path / "nowhere")
    wrong = data()
    wrong = (*wrong[:2], replace(wrong[2], tokens=np.full(12, VOCAB)))
    with pytest.raises(InvalidInputError):
        train(both.group, job(wrong))
    (alone,), (group,) = train(both.alone, job(data())), train(both.group, job(data()))
    assert distance(group.outputs[0]["logprobs"], alone.outputs[0]["logprobs"]) < CLOSE


def test_followers_forget_what_the_leader_forgets(leader, pair, tmp_path):
    both = pair("qwen3-yarn")
    start(both, tmp_path)
    number = leader._number(both.group.snapshot("a"))  # nobody holds it any more
    assert number in leader._gone
    optim(both.group)
    assert number not in leader._gone


def crowd(sampler, adapter=None, num: int = 80, length: int = 250) -> list[list[jobs.Event]]:
    """Many different prompts at once, to their ends."""
    rng = np.random.default_rng(0)
    events: list[list[jobs.Event]] = []
    for index in range(num):
        events.append([])
        prompt = rng.integers(0, VOCAB, length)
        job = jobs.SampleJob(
            job_id=f"j{index}",
            base_model="m",
            adapter_folder=None,
            prompt=prompt,
            max_tokens=3,
            seed=index,
            stop_tokens=(),
        )
        sampler.add(job, adapter, events[-1].append, "v")
    while sampler.has_work:
        sampler.step()
    return events


def ends(events: list[list[jobs.Event]]) -> list[list[int] | str]:
    """Tokens, or why there are none."""
    last = [one[-1] for one in events]
    return [
        end.result.sequences[0].tokens.tolist() if isinstance(end, jobs.Done) else end.message
        for end in last
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
@pytest.mark.parametrize("family", KINDS)
def test_a_member_without_memory_for_a_pass_of_samples_makes_all_take_smaller_ones(
    leader, pair, family
):
    both = pair(family)
    # Without packed weights: oneDNN does not say that it is memory that it lacks.
    room = {"kv_bytes": 1 << 26, "max_pass_tokens": 1 << 20, "packed_weights": False}
    alone, group = both.samplers(**room)
    expected = ends(crowd(alone))
    sample(group, max_tokens=2, seed=0)  # whatever is imported is imported by now
    before = leader.group.num_regroups
    with little_memory(leader.pids[0], 12 << 20):
        told = crowd(group)
    assert leader.group.num_regroups > before
    assert ends(told) == expected
    assert ends(crowd(group, num=3)) == ends(crowd(alone, num=3))


def test_a_step_that_finds_no_memory_at_one_member_fails_before_anything_has_changed(
    leader, pair, tmp_path, monkeypatch
):
    both = pair("qwen3-yarn")
    start(both, tmp_path)

    def full(adapter: object, state: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    for trainer, whose in ((both.alone, ""), (both.group, "member 0 of the group: ")):
        train(trainer, job(data()))
        with monkeypatch.context() as patch:  # of this process: the other member has memory
            patch.setattr("tinkex.engine.optim.resident.make_room", full)
            with pytest.raises(EngineError) as failed:
                optim(trainer)
        assert f"the step failed: {whose}CUDA out of memory" in str(failed.value)
        assert re.search(r"of rank 4 it needs \d+ MB; unload models", str(failed.value))
        optim(trainer)
    assert_same(state(both.alone, tmp_path / "one"), state(both.group, tmp_path / "two"), FP32)


def test_an_adapter_that_one_member_has_no_memory_for_is_refused_by_all(pair, monkeypatch):
    """A CPU's memory is given out when it is touched: too much of it ends the worker of all."""
    both = pair("qwen3-yarn")
    for trainer, whose in ((both.alone, ""), (both.group, "member 0 of the group: ")):
        make(trainer)
        with monkeypatch.context() as patch:  # of this process: the other member has memory
            patch.setattr("tinkex.engine.optim.resident.free_bytes", lambda: 100_000)
            with pytest.raises(EngineError) as refused:
                make(trainer, "b", rank=64)
        said = f"of rank 64 beside 1 others: {whose}"
        assert said in str(refused.value)
        assert re.search(r"\d+ MB are needed to train, 0 MB are free. Unload", str(refused.value))
        make(trainer, "b", rank=64)
        train(trainer, job(data(), adapter_id="b"))


@pytest.mark.parametrize("reads", ["load", "read_snapshot"])
def test_a_folder_may_be_deleted_as_soon_as_it_was_read(leader, pair, tmp_path, reads):
    """The server does so: a member that still read it would be lost, and the group with it."""
    both = pair(KINDS[0])
    make(both.alone)
    folder = save(both.alone, tmp_path / "short-lived")
    read = (
        (lambda: load(both.group, folder))
        if reads == "load"
        else (lambda: both.group.read_snapshot(str(folder)))
    )
    ((follower, _),) = leader._followers
    reader = threading.Thread(target=lambda: (read(), shutil.rmtree(folder)))
    follower.send_signal(signal.SIGSTOP)
    try:
        reader.start()
        reader.join(1.0)
        assert reader.is_alive(), "it did not wait for the member that has not read it yet"
        assert folder.exists()
    finally:
        follower.send_signal(signal.SIGCONT)
    reader.join(200)
    assert not folder.exists()
    load(both.group, save(both.alone, tmp_path / "next"))  # the group goes on
