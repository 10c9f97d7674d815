"""Train the default model with four regularizers and plot each term and its gradient norm.

    python docs/figures/regularizers.py [STEPS]

Writes `regularizers.svg` beside this file. Without TINKER_BASE_URL it uses a private local server.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import tinkex
from tinkex.regularizers import L2, Consistency, Entropy, KLDivergence, RegularizerSpec

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
SENTENCES = [
    "The lighthouse keeper counted the waves and wrote each number down.",
    "A ship without a rudder goes wherever the wind wants it to go.",
    "Every map of the harbour was drawn by someone who had run aground there.",
    "The tide comes twice a day and has never once been late.",
]


def main(num_steps: int) -> None:
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(MODEL, rank=8, seed=0).result()
        data = make_data(training)
        specs = [
            RegularizerSpec(KLDivergence(reference="reference", form="per_token"), 0.2, "kl"),
            RegularizerSpec(Entropy(form="per_token"), 0.5, "entropy"),
            RegularizerSpec(L2(center="mean", reduction="mean"), 2.0, "spread"),
            RegularizerSpec(Consistency(metric="l1", paired="reference"), 1.0, "consistency"),
        ]
        history = []
        for step in range(num_steps):
            future = training.forward_backward_regularized(
                data, "cross_entropy", specs, track_grad_norms=True
            )
            training.optim_step(tinkex.AdamParams(learning_rate=5e-4)).result()
            _, loss = future.result()
            history.append(loss)
            print(f"step {step:3d}  total {loss.loss_total:8.3f}  base {loss.base_loss.value:8.3f}")
    draw(history, Path(__file__).with_suffix(".svg"))


def make_data(training: tinkex.TrainingClient) -> list[tinkex.Datum]:
    """Datums that carry the logprobs of the model before training as their reference."""
    tokenizer = training.get_tokenizer()
    rows = [tokenizer.encode(sentence) for sentence in SENTENCES]
    plain = [
        tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in rows
    ]
    outputs = training.forward(plain, "cross_entropy").result().loss_fn_outputs
    return [
        tinkex.Datum(datum.model_input, {**datum.loss_fn_inputs, "reference": out["logprobs"]})
        for datum, out in zip(plain, outputs, strict=True)
    ]


def draw(history: list, target: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    steps = range(len(history))
    left.plot(steps, [h.loss_total for h in history], "k", label="total")
    left.plot(steps, [h.base_loss.value for h in history], "k--", label="base")
    right.plot(steps, [h.total_grad_norm for h in history], "k", label="total")
    right.plot(steps, [h.base_loss.grad_norm for h in history], "k--", label="base")
    for name in history[0].regularizers:
        terms = [h.regularizers[name] for h in history]
        left.plot(steps, [t.contribution for t in terms], label=f"{terms[0].weight:g} x {name}")
        right.plot(steps, [t.grad_norm_weighted for t in terms], label=name)
    left.set(xlabel="step", title="contribution to the loss")
    right.set(xlabel="step", title="gradient norm (weighted)", yscale="symlog")
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    plt.rcParams["svg.hashsalt"] = "tinkex"
    figure.savefig(target, metadata={"Date": None})
    print(f"wrote {target}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
