"""Router replay: a sample tells which experts its tokens passed, and training takes just those."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from table import MIXTURES, VOCAB
from test_sampling import PROMPT, run, sampler_of

from tinkex.contract.optimizers import AdamParams
from tinkex.contract.routing import ExpertCounts
from tinkex.engine import jobs
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.mixture import Routing
from tinkex.engine.numerics import routed_experts
from tinkex.errors import InvalidInputError, NotSupportedError

OPTIONS = {"max_tokens": 9, "seed": 3, "stop_tokens": (), "routed_experts": True}


def chosen_of(decoder, tokens) -> np.ndarray:
    """[T, L, k]: what the routers choose in one pass over the whole text."""
    routing, tokens = Routing(), torch.as_tensor(tokens)
    attend = PackedCausal([0, len(tokens)], decoder.config.windows)
    with torch.no_grad():
        decoder.forward(tokens, torch.arange(len(tokens)), attend, routing=routing)
    return torch.stack([routing.chosen[i] for i in decoder.config.expert_layers], 1).numpy()


def unpacked(decoder, *words) -> np.ndarray:
    joined = np.concatenate(words)
    return routed_experts.unpack(joined, decoder.config.routing, len(joined), "")


@pytest.mark.parametrize("family", MIXTURES)
def test_a_sample_tells_the_experts_of_every_token_but_the_last(family_model, family):
    """Prompts in chunks, forks, shared prefixes and preemption all end in the same rows."""
    decoder = family_model(family).decoder()
    sampler = sampler_of(decoder, max_pass_tokens=11)
    tight = sampler_of(decoder)
    tight.scheduler.pool.allocate(tight.scheduler.pool.num_blocks - 30)
    for one, num_samples in ((sampler, 3), (sampler, 2), (tight, 5)):
        result = run(one, num_samples=num_samples, **(OPTIONS | {"max_tokens": 20}))
        for sequence in result.sequences:
            tokens = np.concatenate([PROMPT, sequence.tokens])
            rows = unpacked(decoder, result.prompt_routed_experts, sequence.routed_experts)
            assert len(rows) == len(tokens)
            assert (rows[-1] == -1).all()
            expected = chosen_of(decoder, tokens)[:-1]
            # On some machine two experts may be equally likely in fp32; a wrong row differs often.
            agree = (np.sort(rows[:-1]) == np.sort(expected)).all(-1)
            assert agree.mean() > 0.98
    assert tight.scheduler.num_preempted > 0


def job_of(result, *, replay: bool, loss_fn="importance_sampling") -> jobs.TrainJob:
    data = []
    for sequence in result.sequences:
        tokens = np.concatenate([PROMPT, sequence.tokens]).astype(np.int64)
        padding = np.zeros(len(PROMPT) - 1, np.float32)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([padding, sequence.logprobs]),
            "advantages": np.concatenate([padding, np.ones(len(sequence.tokens), np.float32)]),
        }
        rows = np.concatenate([result.prompt_routed_experts, sequence.routed_experts])[:-1]
        data.append(
            jobs.TrainDatum(
                tokens=tokens[:-1], inputs=inputs, routed_experts=rows if replay else None
            )
        )
    return jobs.TrainJob(job_id="", adapter_id="a", data=tuple(data), loss_fn=loss_fn)


def trained(model, *, rate: float, **config):
    """A trainer whose adapter has taken one step away from the base."""
    trainer = model.trainer(**config)
    lora = jobs.LoraSpec(rank=4, seed=1)
    trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 30)
    inputs = {"target_tokens": tokens, "weights": np.ones(30, np.float32)}
    datum = jobs.TrainDatum(tokens=tokens, inputs=inputs)
    trainer.train(
        [jobs.TrainJob(job_id="", adapter_id="a", data=(datum,), loss_fn="cross_entropy")]
    )
    params = AdamParams(learning_rate=rate)
    trainer.optim(jobs.OptimJob(job_id="", adapter_id="a", params=params))
    return trainer


@pytest.mark.parametrize("family", MIXTURES)
def test_training_takes_the_experts_of_the_sample(family_model, family, monkeypatch):
    """After a step the routers would choose others: with replay each row goes where it went."""
    model = family_model(family)
    result = run(sampler_of(model.decoder()), num_samples=2, **OPTIONS)
    seen: list[dict[int, torch.Tensor]] = []
    before = Routing.__init__

    def watch(self, *args, **kwargs):
        before(self, *args, **kwargs)
        seen.append(self.chosen)

    monkeypatch.setattr(Routing, "__init__", watch)
    answers, choices = {}, {}
    for replay in (False, True):
        trainer = trained(model, rate=0.05)
        seen.clear()
        (answers[replay],) = trainer.train([job_of(result, replay=replay)])
        assert isinstance(answers[replay], jobs.TrainResult), answers[replay]
        layers = trainer.decoder.config.expert_layers
        choices[replay] = torch.stack([seen[-1][i] for i in layers], 1).numpy()
    recorded = np.concatenate(
        [
            unpacked(trainer.decoder, result.prompt_routed_experts, s.routed_experts)[:-1]
            for s in result.sequences
        ]
    )
    assert np.array_equal(choices[True], recorded)
    assert not np.array_equal(np.sort(choices[False]), np.sort(recorded))
    differs = (np.sort(choices[False]) != np.sort(recorded)).any(-1)
    metrics = answers[True].metrics
    assert metrics["e_replayed:mean"] == 1.0
    assert 0 < metrics["e_replay_changed:mean"] < 1
    # The first layer with experts sees the same rows in both passes.
    assert differs[:, 0].sum() <= metrics["e_replay_changed:mean"] * differs.size + 1e-6
    assert "e_replayed:mean" not in answers[False].metrics
    free, replayed = (answers[key].outputs[0]["logprobs"] for key in (False, True))
    assert not np.allclose(free, replayed, atol=1e-4)


@pytest.mark.parametrize("family", MIXTURES)
def test_with_replay_the_gap_is_a_dense_models(family_model, family):
    """Nothing has changed, so replay changes nothing: ratio one, as in dense models."""
    model = family_model(family)
    result = run(sampler_of(model.decoder()), num_samples=3, **OPTIONS)
    trainer = model.trainer()
    lora = jobs.LoraSpec(rank=4, seed=1)
    trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora))
    (answer,) = trainer.train([job_of(result, replay=True)])
    assert answer.metrics["sampler_gap_max:max"] < 1e-5
    assert answer.metrics["e_replay_changed:mean"] < 0.02


@pytest.mark.parametrize("family", MIXTURES)
def test_prescribed_experts_still_teach_the_router_through_their_weights(family_model, family):
    """The gradient is that of the function with its choice fixed: a finite difference agrees."""
    decoder = family_model(family).decoder(torch.float64)
    tokens = torch.arange(3, 15)
    free = chosen_of(decoder, tokens)
    given = torch.from_numpy((free + 1) % decoder.config.experts.count)
    at = {layer: given[:, i] for i, layer in enumerate(decoder.config.expert_layers)}
    attend = PackedCausal([0, 12], decoder.config.windows)
    embed = decoder.embed_VD
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(12, embed.shape[1], generator=generator).double()

    def run_from(weights: torch.Tensor) -> torch.Tensor:
        decoder.embed_VD = weights
        hidden = decoder.forward(tokens, torch.arange(12), attend, routing=Routing(at))
        return (hidden * probe).sum()

    leaf = embed.clone().requires_grad_()
    (slope,) = torch.autograd.grad(run_from(leaf), leaf)
    direction = torch.randn(embed.shape, generator=generator).double()
    step = 1e-6
    with torch.no_grad():
        up, down = run_from(embed + step * direction), run_from(embed - step * direction)
    decoder.embed_VD = embed
    expected = float((up - down) / (2 * step))
    assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-4)


def test_datums_with_and_without_share_a_pass_and_keep_their_own(family_model):
    model = family_model("qwen3_moe")
    result = run(sampler_of(model.decoder()), num_samples=2, **OPTIONS)
    alone = {}
    for replay in (False, True):
        trainer = trained(model, rate=0.05)
        (alone[replay],) = trainer.train([job_of(result, replay=replay)])
    mixed = job_of(result, replay=True)
    plain = job_of(result, replay=False)
    both = jobs.TrainJob(
        job_id="", adapter_id="a", data=(mixed.data[0], plain.data[1]), loss_fn=mixed.loss_fn
    )
    (answer,) = trained(model, rate=0.05).train([both])
    for index, replay in enumerate((True, False)):
        expected = alone[replay].outputs[index]["logprobs"]
        np.testing.assert_allclose(answer.outputs[index]["logprobs"], expected, atol=1e-5)


def test_recomputed_layers_replay_too(family_model):
    model = family_model("mixtral")
    result = run(sampler_of(model.decoder()), num_samples=2, **OPTIONS)
    grads = []
    for config in ({}, {"activation_bytes": 1}, {"deterministic": True}):
        trainer = trained(model, rate=0.05, **config)
        (answer,) = trainer.train([job_of(result, replay=True)])
        assert isinstance(answer, jobs.TrainResult), answer
        grads.append(trainer.adapters["a"].grad)
    for grad in grads[1:]:
        assert float((grad - grads[0]).norm() / grads[0].norm()) < 1e-4


# ------------------------------------------------------------------------------------- refusals

SHAPE = ExpertCounts(count=6, per_token=5, layers=2)


def rows(num_tokens: int = 3) -> np.ndarray:
    return np.tile(np.arange(5, dtype=np.int16), (num_tokens, 2, 1))


def test_what_is_packed_is_unpacked():
    chosen = rows()
    chosen[1] = -1
    words = routed_experts.pack(chosen)
    assert words.dtype == np.int64
    assert words.shape == (3, 2, SHAPE.num_words)
    assert words.nbytes == 3 * SHAPE.bytes_per_token
    assert np.array_equal(routed_experts.unpack(words, SHAPE, 3, ""), chosen)


def broken(token, layer, place, value) -> np.ndarray:
    chosen = rows()
    chosen[token, layer, place] = value
    return routed_experts.pack(chosen)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (routed_experts.pack(rows(4)), r"shape \[3, 2, 2\].*got int64 of shape \[4, 2, 2\]"),
        (routed_experts.pack(rows()[:, :1]), r"got int64 of shape \[3, 1, 2\]"),
        (routed_experts.pack(rows()).astype(np.float32), "got float32"),
        (broken(1, 0, 2, 6), r"token 1, layer 0 .*\[0, 1, 6, 3, 4\]; they are 0..5"),
        (broken(2, 1, 4, -1), "token 2, layer 1"),
        (broken(0, 1, 0, -1), "token 0, layer 1"),
        (broken(0, 0, 0, 3), r"names an expert twice: \[3, 1, 2, 3, 4\]"),
        (routed_experts.pack(np.zeros((3, 2, 8), np.int16)), "beyond them must be -1"),
        (
            jobs.CsrArray(
                values=np.zeros(1, np.int64),
                crow_indices=np.zeros(4, np.int64),
                col_indices=np.zeros(1, np.int64),
                shape=(3, 2),
            ),
            "got sparse of shape",
        ),
    ],
)
def test_experts_that_cannot_be_are_refused_by_place_and_value(words, says):
    with pytest.raises(InvalidInputError, match=says) as caught:
        routed_experts.unpack(words, SHAPE, 3, "data[0].loss_fn_inputs.routed_experts")
    assert caught.value.path == "data[0].loss_fn_inputs.routed_experts"


def test_a_model_without_experts_refuses_both(family_model):
    model = family_model("qwen3_5")
    sampler = sampler_of(model.decoder())
    job = jobs.SampleJob(
        job_id="j", base_model="qwen3_5", adapter_folder=None, prompt=PROMPT, routed_experts=True
    )
    with pytest.raises(NotSupportedError, match="qwen3_5 has no experts"):
        sampler.add(job, None, lambda event: None)
    trainer = model.trainer()
    lora = jobs.LoraSpec(rank=4, seed=1)
    trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora))
    inputs = {"target_tokens": PROMPT, "weights": np.ones(len(PROMPT), np.float32)}
    words = routed_experts.pack(rows(len(PROMPT)))
    datum = jobs.TrainDatum(tokens=PROMPT, inputs=inputs, routed_experts=words)
    (answer,) = trainer.train(
        [jobs.TrainJob(job_id="", adapter_id="a", data=(datum,), loss_fn="cross_entropy")]
    )
    assert isinstance(answer, NotSupportedError)
    assert answer.path == "data[0].loss_fn_inputs.routed_experts"
