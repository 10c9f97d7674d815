"""What it costs on a CPU how threads wait for each other: by sleeping, or by turning in circles.

    python dev/thread_waits.py [ROUNDS]

Each way runs in a process of its own, in turns; prints tokens/s of decoding at batch 1, at batch 32
and of training, on the default model.
"""

import os
import subprocess
import sys
import time

import numpy as np

WAYS = (
    {},
    {"OMP_WAIT_POLICY": "PASSIVE"},
    {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    {"GOMP_SPINCOUNT": "20000"},
)
VOCAB = 49152


def measure():
    from tinkex.engine import jobs
    from tinkex.engine.model import default_model
    from tinkex.engine.model.base_model import resolve
    from tinkex.engine.model.decoder import load_decoder
    from tinkex.engine.sample.sampler import Sampler, SamplerConfig
    from tinkex.engine.train.trainer import Trainer

    decoder, rng = load_decoder(resolve(default_model.NAMES[0])), np.random.default_rng(0)

    def decode(batch, new):
        sampler = Sampler(decoder, SamplerConfig(kv_bytes=256 << 20))
        for number in range(batch):
            prompt = rng.integers(0, VOCAB, 32)
            job = jobs.SampleJob(
                job_id=str(number), base_model="m", adapter_folder=None, prompt=prompt,
                max_tokens=new, stop_tokens=(), seed=5,
            )  # fmt: skip
            sampler.add(job, None, lambda event: None)
        began = time.perf_counter()
        while sampler.has_work:
            sampler.step()
        return batch * new / (time.perf_counter() - began)

    trainer = Trainer(decoder, base_model="m")
    lora = jobs.LoraSpec(rank=32, seed=0)
    trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora))

    def train():
        rows = [rng.integers(0, VOCAB, length + 1) for length in (40, 100, 200, 250)]
        data = tuple(
            jobs.TrainDatum(
                tokens=row[:-1],
                inputs={"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)},
            )
            for row in rows
        )
        job = jobs.TrainJob(job_id="", adapter_id="a", data=data, loss_fn="cross_entropy")
        began = time.perf_counter()
        trainer.train([job])
        return 590 / (time.perf_counter() - began)

    decode(1, 4)
    train()
    print(f"{decode(1, 40):6.1f} {decode(32, 24):6.1f} {train():6.1f}")


def main():
    if sys.argv[1:] == ["--inside"]:
        return measure()
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        for way in WAYS:
            print(" ".join(f"{k}={v}" for k, v in way.items()) or "as it is", end=": ", flush=True)
            subprocess.run([sys.executable, __file__, "--inside"], env=os.environ | way, check=True)
    return None


if __name__ == "__main__":
    main()
