"""Deterministic mode on a GPU: the same bits alone and in company, today and tomorrow."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here; run on a GPU machine", allow_module_level=True)

import numpy as np
from cuda_models import FAMILIES, LoudWeights, generate, kind_of, noisy_adapter, other

from tinkex.engine import jobs
from tinkex.engine.cuda.fused import CudaDecoder
from tinkex.engine.device.backend import ops_for
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------- training


def gradients(cfg, data, shards, *, loss_fn="cross_entropy", max_tokens=16384):
    """Loss, logprobs and the gradient of each shard, of a pass over some of the shards."""
    decoder = kind_of(cfg)(cfg, LoudWeights(cfg, device="cuda"), ops=ops_for("cuda"))
    settings = TrainerConfig(deterministic=True, max_tokens=max_tokens, head_rows=2048)
    trainer = Trainer(decoder, base_model="m", config=settings)
    lora = jobs.LoraSpec(rank=8, seed=1, train_unembed=cfg.experts is None)
    trainer.create(jobs.CreateAdapterJob(job_id="c", adapter_id="a", base_model="m", lora=lora))
    generator = torch.Generator().manual_seed(4)
    for _, _, b_Or in trainer.find("a").adapter.modules():
        b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.02)
    mine = [number for number, shard in enumerate(SHARDS) if shard in shards]
    job = jobs.TrainJob(
        job_id="t", adapter_id="a", data=tuple(data[n] for n in mine), loss_fn=loss_fn,
        shards=tuple(SHARDS[n] for n in mine),
    )  # fmt: skip
    (result,) = trainer.train([job])
    assert isinstance(result, jobs.TrainResult), result
    grads = {shard: grad.cpu() for shard, grad in trainer.find("a").grads.items()}
    return dict(zip(mine, (o["logprobs"] for o in result.outputs), strict=True)), grads


SHARDS = [number % 8 for number in range(29)]
"""Of 29 datums: several pieces of most shards, since one of 2,048 tokens takes a piece alone."""


def shard_data(loss_fn):
    rng = np.random.default_rng(0)
    data = []
    for number in range(len(SHARDS)):
        length = 900 if number % 5 == 0 else int(rng.integers(1, 700))
        tokens = rng.integers(0, 512, length)
        inputs = {"target_tokens": rng.integers(0, 512, length)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = rng.normal(size=length).astype(np.float32)
        else:
            inputs["logprobs"] = -rng.uniform(3, 6, length).astype(np.float32)
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        data.append(jobs.TrainDatum(tokens=tokens, inputs=inputs))
    return data


SHAPES = {**FAMILIES, "qwen3_moe": other("qwen3_moe"), "qwen3_5_text": other("qwen3_5_text")}


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_shard_has_the_same_bits_alone_and_beside_the_others(deterministic, family, loss_fn):
    """So that 1, 2, 4 and 8 workers give the same bits; see `optim.shards`."""
    cfg, data = SHAPES[family], shard_data(loss_fn)
    logprobs, grads = gradients(cfg, data, range(8), loss_fn=loss_fn)
    assert sorted(grads) == list(range(8))
    for shards in ([0, 1, 2, 3], [4, 5], [6], [7]):
        some_logprobs, some_grads = gradients(cfg, data, shards, loss_fn=loss_fn)
        assert sorted(some_grads) == shards
        for shard in shards:
            assert torch.equal(some_grads[shard], grads[shard]), (shards, shard)
        for number, values in some_logprobs.items():
            assert np.array_equal(values, logprobs[number])
    _, cramped = gradients(cfg, data, range(8), loss_fn=loss_fn, max_tokens=4000)
    assert all(torch.equal(cramped[shard], grads[shard]) for shard in range(8))


# ---------------------------------------------------------------------- sampling

CROWDS = {
    "together": {},
    "in other chunks": {"pass_tokens": 17},
    "short of memory": {"kv_bytes": 1536 * 16 * 22},  # 22 blocks of 16 tokens: someone must yield
    "read at once": {"look_ahead": False},
}


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["all", "top_p"])
def test_a_deterministic_sample_is_the_same_alone_and_in_a_crowd(deterministic, crowd, options):
    """To the bit, logprobs too: with adapters of two ranks, and with none."""
    generator = torch.Generator().manual_seed(9)
    lengths = [50, 9, 33, 100, 1, 20]
    prompts = [torch.randint(0, 512, (n,), generator=generator).numpy() for n in lengths]
    one, two = noisy_adapter(8, 1), noisy_adapter(20, 2)
    adapters = [None, one, two, one, None, two]
    options = {"seed": 5, "max_tokens": 40, **options}
    crowded = generate(CudaDecoder, torch.bfloat16, prompts, adapters=adapters, **options, **crowd)
    for prompt, make, sample in zip(prompts, adapters, crowded, strict=True):
        (alone,) = generate(CudaDecoder, torch.bfloat16, [prompt], adapters=[make], **options)
        assert alone.tokens.tolist() == sample.tokens.tolist()
        assert alone.logprobs.tolist() == sample.logprobs.tolist()


# ---------------------------------------------------------------------- the whole engine

ENGINE_SCRIPT = """
import sys, json, hashlib, queue
import numpy as np
from tinkex.contract.optimizers import AdamParams
from tinkex.engine import jobs
from tinkex.engine.torch.config import EngineConfig
from tinkex.engine.torch.engine import TorchEngine

model, out = sys.argv[1:]
engine = TorchEngine(EngineConfig(deterministic=True))
answers = queue.Queue()

def run(job):
    engine.submit(job, answers.put)
    while isinstance(event := answers.get(timeout=120), jobs.Progress):
        pass
    assert isinstance(event, jobs.Done), event
    return event.result

lora = jobs.LoraSpec(rank=8, seed=1)
run(jobs.CreateAdapterJob(job_id="c", adapter_id="a", base_model=model, lora=lora))
rng = np.random.default_rng(0)
rows = [rng.integers(0, 512, n) for n in (50, 9, 120)]
data = tuple(
    jobs.TrainDatum(
        tokens=r[:-1],
        inputs={"target_tokens": r[1:], "weights": np.ones(len(r) - 1, np.float32)},
    )
    for r in rows
)
losses = []
for step in range(6):
    train = jobs.TrainJob(job_id="t", adapter_id="a", data=data, loss_fn="cross_entropy")
    losses.append(run(train).metrics["loss:sum"])
    run(jobs.OptimJob(job_id="o", adapter_id="a", params=AdamParams(learning_rate=5e-3)))
run(jobs.SaveAdapterJob(job_id="s", adapter_id="a", folder=out, for_sampling=True))
sample = jobs.SampleJob(
    job_id="g", base_model=model, adapter_folder=out, prompt=rows[0][:20], num_samples=3,
    max_tokens=20, seed=7, stop_tokens=(),
)
result = run(sample)
train = jobs.TrainJob(job_id="t", adapter_id="a", data=data, loss_fn="cross_entropy")
run(train)  # gradients without a step: the snapshot must hold them
state = jobs.SaveAdapterJob(
    job_id="s", adapter_id="a", folder=out + "-state", with_optimizer=True, with_gradients=True
)
run(state)
run(jobs.LoadAdapterJob(
    job_id="l", adapter_id="b", base_model=model, folder=out + "-state", with_optimizer=True
))
ends = []
for name in "ab":
    run(jobs.OptimJob(job_id="o", adapter_id=name, params=AdamParams(learning_rate=5e-3)))
    end = jobs.SaveAdapterJob(job_id="s", adapter_id=name, folder=out + "-" + name)
    run(end)
    ends.append(open(end.folder + "/adapter_model.safetensors", "rb").read())
weights = open(out + "/adapter_model.safetensors", "rb").read()
print(json.dumps({
    "losses": losses,
    "tokens": [s.tokens.tolist() for s in result.sequences],
    "sha": hashlib.sha256(weights).hexdigest(),
    "resumes": ends[0] == ends[1] != weights,
}))
engine.close()
"""


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def saved_model(folder, kind, **extra):
    """A tiny random model as a Hugging Face folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    hf = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **extra,
    )
    AutoModelForCausalLM.from_config(hf).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "extra"), [("qwen3", {}), ("qwen3_moe", EXPERTS)], ids=["ours", "through transformers"]
)
def test_a_deterministic_engine_repeats_itself_to_the_bit(tmp_path, kind, extra):
    """Two fresh processes: equal losses, weights and samples; the loss falls; resuming is exact."""
    import json
    import subprocess
    import sys

    model = saved_model(tmp_path / "model", kind, **extra)
    script = tmp_path / "run.py"
    script.write_text(ENGINE_SCRIPT)
    runs = []
    for number in range(2):
        out = str(tmp_path / f"adapter{number}")
        done = subprocess.run(
            [sys.executable, str(script), str(model), out],
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    assert runs[0] == runs[1]
    assert runs[0]["resumes"]
    assert runs[0]["losses"][-1] < 0.8 * runs[0]["losses"][0]
