"""A teacher named in a loss: its logprobs are a sampling client's, and the loss reads them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datums import datum
from server_process import ServerProcess
from tiny_llama import tiny_llama

from tinkex import SamplingClient, ServiceClient, TrainingClient, types
from tinkex.errors import TinkerError

ADAM = types.AdamParams(learning_rate=0.05)
LENGTHS = (5, 9, 12, 7)


@dataclass
class School:
    """A server with base models `a` and `b` of one vocabulary and `c` of another."""

    service: ServiceClient
    folder: Path
    checkpoint: str
    """A trained adapter of rank 4 over `a`."""

    def base(self, name: str) -> str:
        return str(self.folder / name)

    def student(self) -> TrainingClient:
        return self.service.create_lora_training_client(self.base("a"), rank=8, seed=3).result()

    def sampler(self, teacher: str) -> SamplingClient:
        if teacher.startswith("tinker://"):
            return self.service.create_sampling_client(model_path=teacher).result()
        return self.service.create_sampling_client(base_model=teacher).result()


def trained(service: ServiceClient, base: str) -> str:
    training = service.create_lora_training_client(base, rank=4, seed=1).result()
    training.forward_backward([datum(list(range(3, 20)))], "cross_entropy")
    training.optim_step(ADAM).result()
    return training.save_weights_for_sampler("teacher").result().path


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Iterator[School]:
    folder = tmp_path_factory.mktemp("school")
    tiny_llama(folder / "a")
    tiny_llama(folder / "b", num_hidden_layers=1, hidden_size=64)
    tiny_llama(folder / "c", vocab_size=101)
    flags = ["--engine", "torch", "--device", "cpu", "--deterministic"]
    flags += [flag for name in "abc" for flag in ("--model", str(folder / name))]
    with (
        ServerProcess(folder / "server", *flags) as server,
        ServiceClient(base_url=server.base_url, api_key="tml-x") as service,
    ):
        yield School(service, folder, trained(service, str(folder / "a")))


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 97, size=length).tolist() for length in LENGTHS]


def sampled(tokens: list[int], **more: Any) -> types.Datum:
    """A datum whose first two targets are a prompt's."""
    n = len(tokens) - 1
    q = np.r_[np.zeros(2), np.random.default_rng(n).uniform(-4, -1, n - 2)].astype(np.float32)
    weights = np.r_[np.zeros(2), np.ones(n - 2)].astype(np.float32)
    return datum(tokens, logprobs=q, weights=weights, **more)


def asked(sampler: SamplingClient, tokens: list[int]) -> np.ndarray[Any, Any]:
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    return np.array(logprobs[1:], np.float32)


def state_of(training: TrainingClient) -> list[list[float]]:
    """What a step made of a model, to the bit."""
    training.optim_step(ADAM).result()
    done = training.forward([datum(tokens) for tokens in sequences()], "cross_entropy").result()
    return [output["logprobs"].tolist() for output in done.loss_fn_outputs]


@pytest.mark.parametrize("kind", ["base", "checkpoint", "another base"])
def test_a_teachers_logprobs_are_those_of_a_sampling_client_to_the_bit(
    school: School, kind: str
) -> None:
    bases = {"base": school.base("a"), "another base": school.base("b")}
    teacher = bases.get(kind, school.checkpoint)
    data = [datum(tokens) for tokens in sequences()]
    done = school.student().forward(data, "cross_entropy", teacher=teacher).result()
    sampler = school.sampler(teacher)
    for tokens, output in zip(sequences(), done.loss_fn_outputs, strict=True):
        assert np.array_equal(output["teacher_logprobs"].array, asked(sampler, tokens))


def test_distillation_with_a_teacher_takes_the_step_of_two_calls(school: School) -> None:
    one, two = school.student(), school.student()
    data = [sampled(tokens) for tokens in sequences()]
    done = one.forward_backward(data, "importance_sampling", teacher=school.checkpoint).result()

    sampler = school.sampler(school.checkpoint)
    scores = [asked(sampler, tokens) for tokens in sequences()]
    for output, expected in zip(done.loss_fn_outputs, scores, strict=True):
        assert not output["teacher_logprobs"].array[:2].any()  # nobody asked for the prompt
        assert np.array_equal(output["teacher_logprobs"].array[2:], expected[2:])
    gaps = [
        [float(q) - float(t) for q, t in zip(d.loss_fn_inputs["logprobs"].array, s, strict=True)]
        for d, s in zip(data, scores, strict=True)
    ]
    mean = statistics.fmean([gap for each in gaps for gap in each[2:]])
    by_hand = [
        sampled(tokens, advantages=[0.0, 0.0, *(mean - gap for gap in each[2:])])
        for tokens, each in zip(sequences(), gaps, strict=True)
    ]
    expected = two.forward_backward(by_hand, "importance_sampling").result()
    assert done.metrics["loss:sum"] == expected.metrics["loss:sum"]
    assert state_of(one) == state_of(two)


def test_a_teacher_is_added_to_the_advantages_that_are_given(school: School) -> None:
    one, two = school.student(), school.student()
    own = [np.linspace(-1, 1, len(tokens) - 1).astype(np.float32) for tokens in sequences()]
    data = [sampled(t, advantages=a) for t, a in zip(sequences(), own, strict=True)]
    config = {"teacher": school.base("a"), "teacher_coef": 0.0}
    one.forward_backward(data, "ppo", config).result()
    two.forward_backward(data, "ppo").result()
    assert state_of(one) == state_of(two)


def test_kl_divergence_reads_the_teacher_in_place_of_logprobs(school: School) -> None:
    one, two = school.student(), school.student()
    data = [datum(tokens) for tokens in sequences()]
    one.forward_backward(data, "kl_divergence", teacher=school.checkpoint).result()
    sampler = school.sampler(school.checkpoint)
    by_hand = [
        datum(tokens, weights=np.ones(len(tokens) - 1, np.float32), logprobs=asked(sampler, tokens))
        for tokens in sequences()
    ]
    two.forward_backward(by_hand, "kl_divergence").result()
    assert state_of(one) == state_of(two)


def test_reverse_kl_pulls_the_student_to_its_reference(school: School) -> None:
    """MinT's call is our loss with a teacher; by hand it is the square of the gap."""
    one, two = school.student(), school.student()
    data = [datum(tokens) for tokens in sequences()]
    done = one.forward_backward_reverse_kl(data, school.checkpoint).result()
    gaps = [o["logprobs"].array - o["teacher_logprobs"].array for o in done.loss_fn_outputs]
    assert done.metrics["loss:sum"] == pytest.approx(sum((gap**2).sum() / 2 for gap in gaps))
    assert done.metrics["loss:sum"] > 1e-3
    sampler = school.sampler(school.checkpoint)
    by_hand = [
        datum(tokens, weights=np.ones(len(tokens) - 1, np.float32), logprobs=asked(sampler, tokens))
        for tokens in sequences()
    ]
    two.forward_backward(by_hand, "reverse_kl").result()
    assert state_of(one) == state_of(two)
    with pytest.raises(TinkerError, match="temperature 1, got 0.5"):
        one.forward_backward_reverse_kl(data, school.checkpoint, temperature=0.5)


def test_a_teacher_scores_every_candidate_of_a_position(school: School) -> None:
    """Two-dimensional targets: the KL over candidates, from the teacher's own logprobs."""
    tokens = sequences()[1]
    candidates = np.stack([tokens[1:], np.roll(tokens[1:], 1)], axis=1).astype(np.int64)
    plain = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": candidates})
    student = school.student()
    done = student.forward([plain], "kl_divergence", teacher=school.checkpoint).result()
    scores = done.loss_fn_outputs[0]["teacher_logprobs"].array
    assert scores.shape == candidates.shape
    assert np.array_equal(scores[:, 0], asked(school.sampler(school.checkpoint), tokens))
    given = types.Datum(plain.model_input, {**plain.loss_fn_inputs, "logprobs": scores})
    again = student.forward([given], "kl_divergence").result()
    assert again.metrics["loss:sum"] == done.metrics["loss:sum"]


def test_a_loss_of_ones_own_reads_the_teacher_here_and_on_the_server(school: School) -> None:
    def gap(logprobs: Any, teacher_logprobs: Any) -> Any:
        return ((logprobs - teacher_logprobs) ** 2).sum(), {}

    def whole(data: Any, logprobs: Any) -> Any:
        taught = [each.loss_fn_inputs["teacher_logprobs"].to_torch() for each in data]
        terms = [gap(a, b)[0] for a, b in zip(logprobs, taught, strict=True)]
        return sum(terms), {}

    data = [datum(tokens) for tokens in sequences()]
    here, there = school.student(), school.student()
    ranks = {"logprobs": 1, "teacher_logprobs": 1}
    handle = school.service.create_custom_loss(gap, ranks).result()
    teacher = school.checkpoint
    a = here.forward_backward_custom(data, whole, teacher=teacher).result()
    b = there.forward_backward_custom(data, handle, teacher=teacher).result()
    assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-5)
    assert np.allclose(np.concatenate(state_of(here)), np.concatenate(state_of(there)), atol=1e-5)


# ---------------------------------------------------------------------------------- refused


def test_what_cannot_teach_is_refused_by_name(school: School) -> None:
    student, data = school.student(), [sampled(tokens) for tokens in sequences()]
    path = school.checkpoint

    def refused(match: str, loss: str = "importance_sampling", given: Any = None, **call: Any):
        with pytest.raises(TinkerError, match=match):
            student.forward_backward(given or data, loss, **call).result()

    refused("- loss_fn_config.teacher: no base model 'nobody'", teacher="nobody")
    refused("No checkpoint", teacher=path.replace("teacher", "absent"))
    refused("loss_fn_config.teacher", teacher="tinker://nothing")
    refused("vocabulary of 101 tokens", teacher=school.base("c"))
    refused("must be a base model", teacher="")
    refused("give one of them", teacher=path, loss_fn_config={"teacher": path})
    refused("needs a teacher", loss_fn_config={"teacher_coef": 1.0})
    refused("teacher_coef", teacher=path, loss_fn_config={"teacher_coef": -1.0})
    plain = [datum(tokens) for tokens in sequences()]
    no_use = {"teacher_coef": 0.5}
    refused("has no use for it", "cross_entropy", plain, teacher=path, loss_fn_config=no_use)
    both = [datum(sequences()[0], logprobs=np.zeros(4, np.float32))]
    refused("leave out one of them", "kl_divergence", both, teacher=path)
    handle = school.service.create_custom_loss(
        lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1}
    ).result()
    with pytest.raises(TinkerError, match="no input teacher_logprobs"):
        student.forward_backward_custom(plain, handle, teacher=path).result()
    student.forward_backward(plain, "cross_entropy").result()  # the run goes on


def test_a_server_that_announces_no_teachers_is_not_asked(school: School) -> None:
    with ServiceClient(
        base_url=school.service.holder.config.base_url, api_key="tml-x", extensions=False
    ) as service:
        student = service.create_lora_training_client(school.base("a"), rank=8).result()
        data = [sampled(tokens) for tokens in sequences()]
        assert not student.has_teachers
        with pytest.raises(TinkerError, match="compute_logprobs"):
            student.forward_backward(data, "importance_sampling", teacher=school.checkpoint)
