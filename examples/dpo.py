"""Prefer one way of answering over another: direct preference optimization, by hand.

The loss is an ordinary torch function of the answers' log-probabilities. The same, with data
loading, evaluation and resume, is `tinkex train dpo`.

python examples/dpo.py        # one to two minutes on two CPU cores
"""

import torch
import torch.nn.functional as F

import tinkex
from tinkex.recipes.render import Renderer

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
BETA = 0.1
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Greece": "Athens", "Cuba": "Havana", "Peru": "Lima", "Norway": "Oslo", "Kenya": "Nairobi",
}  # fmt: skip


def pair(renderer, country, capital):
    """The short answer is preferred to the long one."""
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    long = f"Great question! The capital city of the country of {country} is {capital}."
    answers = (f"{capital}.", long)
    return [
        renderer.example([question, {"role": "assistant", "content": answer}], learn="last")
        for answer in answers
    ]


def total(logprobs, example):
    return (logprobs * torch.tensor(example.weights[1:])).sum()


def main():
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=16, seed=0).result()
        renderer = Renderer(training.get_tokenizer())
        pairs = [pair(renderer, *item) for item in CAPITALS.items()]
        train, held_out = pairs[:8], pairs[8:]

        def forward(examples):
            data = [example.datum() for example in examples]
            outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
            return [torch.tensor(output["logprobs"].tolist()) for output in outputs]

        def sums(examples):
            return [total(x, e).item() for x, e in zip(forward(examples), examples, strict=True)]

        def preference(pairs):
            """By how much the short answers are preferred, in nats."""
            return sum(sums([p[0] for p in pairs])) - sum(sums([p[1] for p in pairs]))

        reference = {
            id(example): value for p in pairs for example, value in zip(p, sums(p), strict=True)
        }
        before = preference(held_out)
        for step in range(6):
            batch = train[step % 2 :: 2]
            examples = [example for p in batch for example in p]

            def dpo(data, logprobs, examples=examples):
                gains = [
                    total(x, e) - reference[id(e)] for x, e in zip(logprobs, examples, strict=True)
                ]
                margin = BETA * (torch.stack(gains[0::2]) - torch.stack(gains[1::2]))
                return -F.logsigmoid(margin).mean(), {"margin": margin.mean()}

            data = [example.datum() for example in examples]
            result = training.forward_backward_custom(data, dpo)
            training.optim_step(tinkex.AdamParams(learning_rate=2e-4))
            metrics = result.result().metrics
            print(f"step {step}  loss {metrics['loss:sum']:.3f}  margin {metrics['margin']:+.2f}")

        after = preference(held_out)
        print(f"\nshort over long on held-out questions: {before:+.1f} -> {after:+.1f} nats")
        assert after > before + 2


if __name__ == "__main__":
    main()
