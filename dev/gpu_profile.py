"""Where a training step, a packed step of 16 tenants and a decode step spend their time on a GPU.

python dev/gpu_profile.py [train] [deterministic] [decode] [long]
"""

import cProfile
import pstats
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu


def device_time(title, step):
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in rows) / 1e3
    print(f"\n# {title}: wall {wall * 1e3:.0f} ms, device busy {busy:.0f} ms")
    for row in rows[:16]:
        print(f"{row.self_device_time_total / 1e3:9.2f} ms {row.count:6d} {row.key[:80]}")


def host_time(title, step):
    profiler = cProfile.Profile()
    profiler.runcall(step)
    torch.cuda.synchronize()
    print(f"\n# {title}: host")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def profile_training():
    trainer, data = gpu.our_trainer(16), gpu.datums([2048] * 8)
    short = [gpu.datums([128])] * 16
    device_time("8 x 2048", lambda: gpu.our_step(trainer, [data]))
    device_time("16 tenants x 128", lambda: gpu.our_step(trainer, short))
    host_time("16 tenants x 128", lambda: gpu.our_step(trainer, short))


def profile_deterministic():
    """The step of `gpu_train_deterministic`: eight virtual shards side by side."""
    trainer, data = gpu.our_trainer(1), gpu.datums([264] * 64)
    device_time("64 x 264", lambda: gpu.our_step(trainer, [data]))
    trainer.config = gpu.replace(trainer.config, deterministic=True)
    with gpu.deterministic():
        device_time("64 x 264, deterministic", lambda: gpu.our_step(trainer, [data]))
        host_time("64 x 264, deterministic", lambda: gpu.our_step(trainer, [data]))


def profile_long():
    import gpu_families as families

    decoder = families.decoder_of(families.config_from_hf(families.LONG))
    trainer = families.Trainer(decoder, base_model="m")
    lora = gpu.jobs.LoraSpec(rank=16, seed=0, train_unembed=False)
    create = gpu.jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora)
    trainer.create(create)
    data = families.datums(decoder.config, [16384])
    device_time("Qwen3-4B, 1 x 16384", lambda: families.our_step(trainer, data))


def profile_decoding():
    sampler = gpu.our_sampler()
    gpu.our_decode(sampler, 128, 512, 24)
    host_time("decode 128", lambda: gpu.our_decode(sampler, 128, 16, 64))
    device_time("decode 128 x 576, 16 steps", decoding(sampler, 128, 576, 16))
    device_time("decode 1 x 576, 16 steps", decoding(sampler, 1, 576, 16))
    many = gpu.some_adapters(sampler, 16)
    device_time("decode 128 x 576, 1 adapter", decoding(sampler, 128, 576, 16, many[:1]))
    device_time("decode 128 x 576, 16 adapters", decoding(sampler, 128, 576, 16, many))
    device_time("decode 256 x 576, 16 steps", decoding(sampler, 256, 576, 16))
    device_time("decode 256 x 576, 1 adapter", decoding(sampler, 256, 576, 16, many[:1]))


def decoding(sampler, batch, length, steps, adapters=()):
    """Some steps of a batch that has been prefilled; each call goes on where the last ended."""
    sampler.cancel_all()
    gpu.add_jobs(sampler, batch, length, 8 * steps, adapters)
    while sampler.step() != batch:
        pass
    for _ in range(4):  # the step is recorded
        sampler.step()

    def run():
        for _ in range(steps):
            sampler.step()

    return run


def main():
    wanted = sys.argv[1:] or ["train", "decode"]
    if "train" in wanted:
        profile_training()
        gpu.free()
    if "deterministic" in wanted:
        profile_deterministic()
        gpu.free()
    if "long" in wanted:
        profile_long()
        gpu.free()
    if "decode" in wanted:
        profile_decoding()


if __name__ == "__main__":
    main()
