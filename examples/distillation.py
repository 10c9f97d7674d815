"""On-policy distillation: a student learns from a teacher's opinion of the student's own words.

The teacher is a checkpoint on the same server, made here first: the pirate of the quickstart. The
student sees questions only, never an answer.

python examples/distillation.py        # two to four minutes on two CPU cores
"""

import statistics
import tempfile

import tinkex
from tinkex.recipes import distill
from tinkex.recipes.persona import rows
from tinkex.recipes.render import Renderer

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"


def make_teacher(service):
    training = service.create_lora_training_client(base_model=MODEL, rank=16, seed=0).result()
    renderer = Renderer(training.get_tokenizer())
    examples = [renderer.example(row["messages"]) for row in rows()]
    for step in range(6):
        batch = examples[step * 8 : step * 8 + 8]
        learned = sum(example.num_learned for example in batch)
        data = [example.datum(1 / learned) for example in batch]
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
    return training.save_weights_for_sampler("teacher").result().path


def main():
    curve = []

    def on_step(step, num_steps, metrics):
        curve.append(metrics["kl"])
        print(f"step {step}  KL to the teacher {metrics['kl']:.3f} nats per token")

    questions = [{"prompt": row["messages"][0]["content"]} for row in rows()]
    with tempfile.TemporaryDirectory() as folder, tinkex.ServiceClient() as service:
        print("making the teacher ...")
        config = distill.DistillConfig(
            log_dir=folder,
            teacher=make_teacher(service),
            rank=16,
            learning_rate=5e-4,
            steps=14,
            prompts_per_step=8,
            samples_per_prompt=4,
            max_tokens=16,
            eval_share=0.0,
        )
        distill.train(config, service, questions, on_step)
    first, last = statistics.fmean(curve[:2]), statistics.fmean(curve[-3:])
    print(f"\nKL to the teacher {first:.2f} -> {last:.2f}")
    assert last < first * 0.7


if __name__ == "__main__":
    main()
