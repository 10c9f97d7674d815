"""The fused CUDA decoder against the plain one (the same numbers within bf16's noise).

Noise is measured, not assumed: the plain decoder in fp32 is the truth, the plain decoder in bf16
shows what rounding alone costs, and the fused one may cost no more than half again as much.
"""

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here; run on a GPU machine", allow_module_level=True)

from cuda_models import (
    FAMILIES,
    OTHERS,
    LoudWeights,
    config,
    generate,
    kind_of,
    noisy_adapter,
    other,
)

from tinkex.engine.cuda.fused import CudaDecoder, can_fuse
from tinkex.engine.device.backend import ops_for
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch, fresh_adapter
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.weights import RandomWeights

pytestmark = pytest.mark.gpu
LENGTHS = [70, 5, 130]


def run(kind, dtype, cfg, ranks, room=math.inf):
    """Hidden states and adapter gradients of one packed batch, as fp32."""
    decoder = kind(cfg, RandomWeights(cfg, seed=1, device="cuda"), ops=ops_for("cuda"), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, cfg.vocab_size, (sum(LENGTHS),), generator=generator).cuda()
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).cuda()
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    adapters, spans = [], []
    for number, rank in enumerate(ranks):
        adapter = fresh_adapter(
            decoder.targets,
            rank=rank,
            alpha=16.0,
            kinds=["attn", "mlp"],
            seed=number,
            device="cuda",
        )
        for _, _, b_Or in adapter.modules():
            b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.02)
        adapter.start_grad()
        start = bounds[number]
        stop = bounds[number + 1] if number + 1 < len(ranks) else bounds[-1]
        adapters.append(adapter)
        spans.append(AdapterSpan(start, stop, adapter))
    attend = PackedCausal(bounds, cfg.windows)
    hidden = decoder.forward(tokens, positions, attend, LoraBatch(spans), room=room)
    weight = torch.randn(hidden.shape, generator=generator).cuda().to(hidden.dtype)
    hidden.backward(weight)
    grads = torch.cat([a.grad for a in adapters])
    return hidden.detach().float(), grads.float()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("ranks", [[8], [8, 32, 4]], ids=["one-tenant", "three-tenants"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_pass_is_as_exact_as_bf16_allows(family, ranks):
    cfg = FAMILIES[family]
    truth = run(Decoder, torch.float32, cfg, ranks)
    plain = run(Decoder, torch.bfloat16, cfg, ranks)
    fused = run(CudaDecoder, torch.bfloat16, cfg, ranks)
    for name, t, p, f in zip(("hidden", "gradients"), truth, plain, fused, strict=True):
        print(family, name, f"plain bf16 {relative(p, t):.2e}, fused {relative(f, t):.2e}")
        assert relative(f, t) < 1.5 * relative(p, t) + 1e-4


@pytest.mark.parametrize("room", [2_200_000, 1_500_000, 900_000, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_has_no_room_is_computed_again_and_is_the_same(family, room):
    """Three layers keep 3.1 MB; without their widest products 1.3; their inputs alone 0.6."""
    ours = run(kind_of(FAMILIES[family]), torch.bfloat16, FAMILIES[family], [8])
    again = run(kind_of(FAMILIES[family]), torch.bfloat16, FAMILIES[family], [8], room=room)
    torch.testing.assert_close(again[0], ours[0], rtol=0, atol=0)
    assert relative(again[1], ours[1]) < 1e-3  # flash attention's backward adds in any order


def test_shapes_the_kernels_do_not_know_are_left_to_the_plain_decoder():
    assert can_fuse(FAMILIES["qwen3"])
    assert not can_fuse(config(head_size=80))
    assert not can_fuse(config(mlp_bias=True))


# ---------------------------------------------------------------------- sampling


def score(kind, dtype, make, prompt, sequence):
    """Logprobs of a sampled sequence by one pass over all of it."""
    cfg = FAMILIES["qwen3"]
    decoder = kind(cfg, RandomWeights(cfg, seed=1, device="cuda"), ops=ops_for("cuda"), dtype=dtype)
    tokens = torch.cat([torch.as_tensor(prompt), torch.as_tensor(sequence.tokens).long()]).cuda()
    lora = LoraBatch([AdapterSpan(0, len(tokens), make(decoder))]) if make else None
    with torch.no_grad():
        hidden = decoder.forward(
            tokens, torch.arange(len(tokens)).cuda(), PackedCausal([0, len(tokens)]), lora
        )
        logprobs = decoder.head(hidden, lora).log_softmax(-1)
    picked = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
    return picked[len(prompt) - 1 :].cpu()


def check_against_the_trainer(adapters, **options):
    """Graph decoding may be as far from fp32 as the plain bf16 decoder is, and half again."""
    sequences = generate(CudaDecoder, torch.bfloat16, PROMPTS, adapters=adapters, **options)
    for prompt, make, sequence in zip(
        PROMPTS, adapters or [None] * len(PROMPTS), sequences, strict=True
    ):
        assert len(sequence.tokens) == 24
        truth = score(Decoder, torch.float32, make, prompt, sequence)
        plain = score(Decoder, torch.bfloat16, make, prompt, sequence)
        ours = (torch.as_tensor(sequence.logprobs) - truth).abs().mean().item()
        noise = (plain - truth).abs().mean().item()
        print(f"sampler {ours:.4f}, plain bf16 {noise:.4f}")
        assert ours < 1.5 * noise + 0.005


PROMPTS = [torch.arange(n).numpy() * 7 % 512 for n in (3, 100, 17, 64, 40)]


def test_graph_decoding_agrees_with_the_trainer_for_a_mix_of_adapters():
    """Sampler and trainer share weights and kernels: they differ by bf16's noise only."""
    adapters = [None, noisy_adapter(8, 1), noisy_adapter(32, 2), None, noisy_adapter(4, 3)]
    check_against_the_trainer(adapters, seed=5)


@pytest.mark.parametrize("adapters", [(), (noisy_adapter(8, 1),) * 5], ids=["base", "one-adapter"])
def test_greedy_graph_decoding_agrees_with_the_trainer(adapters):
    check_against_the_trainer(adapters, temperature=0.0)


def test_launching_a_pass_before_the_last_is_read_changes_no_token():
    """Samples stop anywhere, so the pass launched ahead has rows that are then thrown away."""
    prompts = [torch.arange(n).numpy() * 5 % 512 for n in range(3, 40)]
    options = {"max_tokens": 60, "stops": tuple(range(0, 512, 17)), "temperature": 0.7, "seed": 3}
    ahead, plain = (
        generate(CudaDecoder, torch.bfloat16, prompts, look_ahead=look_ahead, **options)
        for look_ahead in (True, False)
    )
    assert len({len(sequence.tokens) for sequence in plain}) > 5
    same = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(ahead, plain, strict=True))
    # A batch one row larger may round a logit differently and so, rarely, turn a draw.
    assert same >= len(prompts) - 2
    for a, b in zip(ahead, plain, strict=True):
        assert a.stop_reason == ("stop" if a.tokens[-1] % 17 == 0 else "length")
        assert a.tokens[0] == b.tokens[0]


# ---------------------------------------------------------------------- zero gap


def on_policy(cfg, prompts, ranks, *, max_tokens=40, deterministic=False, **sampler_options):
    """Sample with adapters of these ranks (None: none), then train on it: (samples, results)."""
    import numpy as np

    from tinkex.engine import jobs
    from tinkex.engine.sample.config import SamplerConfig
    from tinkex.engine.sample.sampler import Sampler
    from tinkex.engine.train.trainer import Trainer

    decoder = kind_of(cfg)(cfg, LoudWeights(cfg, device="cuda"), ops=ops_for("cuda"))
    trainer = Trainer(decoder, base_model="m")
    generator = torch.Generator().manual_seed(4)
    for rank in dict.fromkeys(ranks):
        lora = jobs.LoraSpec(rank=rank or 8, seed=rank)
        create = jobs.CreateAdapterJob(job_id="c", adapter_id=f"a{rank}", base_model="m", lora=lora)
        trainer.create(create)
        for _, _, b_Or in trainer.find(f"a{rank}").adapter.modules() if rank else ():
            b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.02)
    look_ahead = sampler_options.pop("look_ahead", True)
    settings = {"kv_bytes": 64 << 20, "max_pass_tokens": 64, **sampler_options}
    sampler, ends = Sampler(decoder, SamplerConfig(**settings)), {}
    frozen = {r: trainer.find(f"a{r}").adapter.frozen_copy() for r in dict.fromkeys(ranks) if r}
    for number, (prompt, rank) in enumerate(zip(prompts, ranks, strict=True)):
        job = jobs.SampleJob(
            job_id=str(number), base_model="m", adapter_folder=None, prompt=prompt,
            num_samples=1 + number % 2, max_tokens=max_tokens, seed=number, stop_tokens=(),
        )  # fmt: skip
        note = lambda event: ends.update({event.job_id: event})  # noqa: E731
        sampler.add(job, frozen.get(rank), note, version=str(rank))
    while sampler.has_work:
        sampler.step(look_ahead=look_ahead)
    data = {rank: [] for rank in ranks}
    for number, (prompt, rank) in enumerate(zip(prompts, ranks, strict=True)):
        for sample in ends[str(number)].result.sequences:
            tokens = np.concatenate([prompt, sample.tokens])
            before = len(prompt) - 1
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": np.concatenate([np.zeros(before, np.float32), sample.logprobs]),
                "advantages": np.concatenate(
                    [np.zeros(before), np.ones(len(sample.tokens))]
                ).astype(np.float32),
            }
            data[rank].append(jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs))
    train = [
        jobs.TrainJob(
            job_id=str(rank), adapter_id=f"a{rank}", data=tuple(some),
            loss_fn="importance_sampling",
        )
        for rank, some in data.items()
    ]  # fmt: skip
    results = trainer.train(train)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return train, results


MIX = [None, 8, 20, 8, None, 20, 32]
PASSES = {
    "together": {},
    "in other chunks": {"max_pass_tokens": 17},
    "short of memory": {"kv_bytes": 1536 * 16 * 30},
    "read at once": {"look_ahead": False},
}


def check_zero_gap(cfg, ranks=MIX, **options):
    generator = torch.Generator().manual_seed(9)
    lengths = [50, 9, 33, 300, 1, 20, 130][: len(ranks)]
    prompts = [torch.randint(0, cfg.vocab_size, (n,), generator=generator).numpy() for n in lengths]
    train, results = on_policy(cfg, prompts, ranks, **options)
    for job, result in zip(train, results, strict=True):
        assert result.metrics["sampler_gap_max:max"] == 0
        assert result.metrics["sampler_gap_k3:mean"] == 0
        for datum, output in zip(job.data, result.outputs, strict=True):
            sampled = datum.inputs["advantages"] > 0
            assert (
                output["logprobs"][sampled].tolist() == datum.inputs["logprobs"][sampled].tolist()
            )
        # Every ratio is exactly 1, so the loss is minus the number of sampled tokens.
        assert result.metrics["loss:sum"] == -sum(d.inputs["advantages"].sum() for d in job.data)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_gives_the_sampler_s_logprobs_to_the_bit(family):
    """With adapters of four ranks and with none, trained in one packed pass."""
    check_zero_gap(FAMILIES[family])


REGULAR = [None, 8, 16, 8, None, 16, 32]
"""Ranks whose adapters on experts can be grouped."""


@pytest.mark.parametrize("crowd", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("family", OTHERS)
def test_mixtures_and_hybrids_give_the_sampler_s_logprobs_to_the_bit(family, crowd):
    cfg = other(family)
    assert kind_of(cfg).__name__ == "MixedLayerDecoder"
    assert kind_of(cfg).batch_invariant
    if "kv_bytes" in crowd:  # blocks of these models have other sizes, and states
        layer = 2 * cfg.num_kv_heads * cfg.head_size * 2 * 16
        crowd = {"kv_bytes": 16 << 20 if cfg.delta is not None else layer * cfg.num_layers * 30}
    check_zero_gap(cfg, REGULAR, **crowd)


@pytest.mark.parametrize("family", OTHERS)
def test_the_kernels_of_other_families_are_as_exact_as_bf16_allows(family):
    cfg = other(family)
    truth = run(Decoder, torch.float32, cfg, [8, 16])
    plain = run(Decoder, torch.bfloat16, cfg, [8, 16])
    fused = run(kind_of(cfg), torch.bfloat16, cfg, [8, 16])
    for name, t, p, f in zip(("hidden", "gradients"), truth, plain, fused, strict=True):
        print(family, name, f"plain bf16 {relative(p, t):.2e}, fused {relative(f, t):.2e}")
        assert relative(f, t) < 1.5 * relative(p, t) + 1e-3


@pytest.mark.parametrize("room", [1_500_000, 0], ids=["some", "all"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_compute_again_what_has_no_room(family, room):
    cfg = other(family)
    ours = run(kind_of(cfg), torch.bfloat16, cfg, [8])
    again = run(kind_of(cfg), torch.bfloat16, cfg, [8], room=room)
    torch.testing.assert_close(again[0], ours[0], rtol=0, atol=0)
    assert relative(again[1], ours[1]) < 1e-3


@pytest.mark.parametrize("crowd", PASSES.values(), ids=PASSES)
def test_no_bit_depends_on_chunks_preemption_or_the_order_of_reading(crowd):
    check_zero_gap(FAMILIES["qwen3"], **crowd)


def test_the_gap_is_zero_over_many_chunks_of_keys():
    cfg = config(max_context_length=4096)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 512, (n,), generator=generator).numpy() for n in (1500, 250, 600)]
    _, results = on_policy(
        cfg, prompts, [8, None, 20], max_tokens=600, kv_bytes=256 << 20, max_pass_tokens=700
    )
    assert [result.metrics["sampler_gap_max:max"] for result in results] == [0, 0, 0]


def test_every_tile_of_the_sequential_product_gives_the_same_bits():
    from tinkex.engine.cuda.product import Tile, sequential

    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randn(n, 4096, generator=generator, device="cuda").to(torch.bfloat16)
        for n in (300, 1000)
    )
    tiles = [Tile(16, 32, 128, 4, 5), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 3),
             Tile(32, 128, 32, 4, 3), Tile(128, 32, 64, 4, 4),
             Tile(64, 64, 128, 4, 5, copied=True),
             Tile(16, 64, 256, 4, 5, copied=True)]  # fmt: skip
    first, *others = (sequential(x, w, dtype=torch.float32, tile=tile) for tile in tiles)
    for again in others:
        assert torch.equal(first, again)
    assert torch.equal(first[7:8], sequential(x[7:8], w, dtype=torch.float32))


# ---------------------------------------------------------------------- small passes


def small_results(steps):
    """(logprobs, gradient) of small jobs of one adapter, and how many recordings were made."""
    import numpy as np

    from tinkex.engine import jobs
    from tinkex.engine.train.trainer import Trainer

    cfg, rng = FAMILIES["windowed"], np.random.default_rng(1)
    decoder = CudaDecoder(cfg, RandomWeights(cfg, seed=1, device="cuda"), ops=ops_for("cuda"))
    trainer = Trainer(decoder, base_model="m")
    lora = jobs.LoraSpec(rank=8, seed=1)
    trainer.create(jobs.CreateAdapterJob(job_id="c", adapter_id="a", base_model="m", lora=lora))
    resident = trainer.find("a")
    for _, _, b_Or in resident.adapter.modules():
        b_Or.data.normal_(0, 0.02, generator=torch.Generator("cuda").manual_seed(3))
    seen = []
    for lengths in steps:
        rows = [rng.integers(0, 512, n + 1) for n in lengths]
        data = tuple(
            jobs.TrainDatum(
                tokens=row[:-1],
                inputs={"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)},
            )
            for row in rows
        )
        train = jobs.TrainJob(job_id="t", adapter_id="a", data=data, loss_fn="cross_entropy")
        (result,) = trainer.train([train])
        logprobs = np.concatenate([output["logprobs"] for output in result.outputs])
        seen.append((logprobs.tolist(), resident.grad.clone()))
        resident.grads.clear()
        resident.adapter.flat.mul_(1.001)  # as a step does: recordings must see new weights
    return seen, len(decoder._small._known)


def test_recorded_passes_give_the_plain_ones_logprobs_to_the_bit_and_their_gradients(monkeypatch):
    from tinkex.engine.cuda.small_passes import SmallPasses

    steps = [[40], [17, 9, 30], [3] * 14, [64], [1], [100, 5], [100], [50, 70], [40], [3] * 15]
    recorded, count = small_results(steps)
    assert count == 2  # 64 and 128 tokens
    monkeypatch.setattr(SmallPasses, "find", lambda *args: None)
    plain, count = small_results(steps)
    assert count == 0
    for (ours, grad), (theirs, wanted) in zip(recorded, plain, strict=True):
        assert ours == theirs
        assert relative(grad, wanted) < 1e-3  # flash attention's backward adds in any order


# ---------------------------------------------------------------------- custom losses


def custom_graph():
    """loss = sum(exp(logprobs) * advantages * (1 + arange(T)))."""

    def node(op, name, target, *args):
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    logprobs, advantages = {"ref": "logprobs"}, {"ref": "advantages"}
    nodes = [
        node("placeholder", "logprobs", "logprobs"),
        node("placeholder", "advantages", "advantages"),
        node("call_function", "e", "torch.exp", logprobs),
        node("call_function", "m", "operator.mul", {"ref": "e"}, advantages),
        node("call_method", "n", "size", logprobs, 0),
        node("call_function", "a", "torch.arange", {"ref": "n"}),
        node("call_function", "b", "operator.add", {"ref": "a"}, 1),
        node("call_function", "w", "operator.mul", {"ref": "m"}, {"ref": "b"}),
        node("call_method", "s", "sum", {"ref": "w"}),
        node("output", "output", "output", {"tuple": [{"ref": "s"}, {"dict": {}}]}),
    ]
    return {"format": 1, "nodes": nodes}


def custom_gradients(loss_fn, data, **fields):
    from tinkex.engine import jobs
    from tinkex.engine.train.trainer import Trainer

    cfg = FAMILIES["qwen3"]
    decoder = CudaDecoder(cfg, RandomWeights(cfg, seed=1, device="cuda"), ops=ops_for("cuda"))
    trainer = Trainer(decoder, base_model="m")
    lora = jobs.LoraSpec(rank=8, seed=1)
    create = jobs.CreateAdapterJob(job_id="c", adapter_id="a", base_model="m", lora=lora)
    trainer.create(create)
    job = jobs.TrainJob(job_id="t", adapter_id="a", data=data, loss_fn=loss_fn, **fields)
    (result,) = trainer.train([job])
    if isinstance(result, Exception):
        raise result
    return result.metrics["loss:sum"], trainer.adapters["a"].grad


def test_a_traced_custom_loss_runs_on_the_device():
    """R21: it equals importance sampling from q = 1 with the advantages -A * (1, 2, 3, ...)."""
    import numpy as np

    from tinkex.engine import jobs

    rng = np.random.default_rng(0)
    rows = [(rng.integers(0, 512, n + 1), rng.normal(size=n).astype(np.float32)) for n in (40, 9)]
    data = [
        jobs.TrainDatum(tokens=t[:-1], inputs={"target_tokens": t[1:], "advantages": a})
        for t, a in rows
    ]
    known = [
        jobs.TrainDatum(
            tokens=t[:-1],
            inputs={
                "target_tokens": t[1:],
                "advantages": -a * (1 + np.arange(len(a), dtype=np.float32)),
                "logprobs": np.zeros(len(a), np.float32),
            },
        )
        for t, a in rows
    ]
    custom = jobs.TracedLoss(inputs=(("logprobs", 1), ("advantages", 1)), graph=custom_graph())
    loss, grad = custom_gradients("custom", tuple(data), custom_loss=custom)
    expected, wanted = custom_gradients("importance_sampling", tuple(known))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert grad.norm() > 0
    assert relative(grad, wanted) < 1e-3
