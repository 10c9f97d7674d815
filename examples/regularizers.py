"""Learn something new without losing the rest: the same training with and without a KL penalty.

python examples/regularizers.py        # about a minute on two CPU cores
"""

import tinkex
from tinkex.regularizers import KLDivergence, RegularizerSpec

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
NEW = "The tide comes twice a day, says the captain, and it has never once been late."
OLD = "The president of the company said that the results of the first quarter were good."


def datum(tokenizer, text, **inputs):
    tokens = tokenizer.encode(text)
    weights = [1.0] * (len(tokens) - 1)
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights, **inputs},
    )


def train(service, penalty):
    """Learn NEW for ten steps; gives the losses on NEW and how far OLD has moved."""
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
    tokenizer = training.get_tokenizer()
    new, old = datum(tokenizer, NEW), datum(tokenizer, OLD)

    def logprobs(one):
        return training.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]

    start = logprobs(old)
    # The penalty is computed on OLD, which is read along but not learned (its weights are zero).
    silent = {"weights": [0.0] * len(start.tolist()), "reference": start}
    read_along = datum(tokenizer, OLD) if not penalty else datum(tokenizer, OLD, **silent)

    def kl_of_old(data, x):
        return KLDivergence(reference=start.to_torch(), form="per_token")(data[1:], x[1:])

    specs = [RegularizerSpec(kl_of_old, penalty, "kl")]
    losses = []
    for _ in range(10):
        if penalty:
            future = training.forward_backward_regularized(
                [new, read_along], "cross_entropy", specs
            )
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
            losses.append(future.result()[1].base_loss.value)
        else:
            future = training.forward_backward([new], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
            losses.append(future.result().metrics["loss:sum"])
    moved = [abs(a - b) for a, b in zip(start.tolist(), logprobs(old).tolist(), strict=True)]
    return losses, sum(moved) / len(moved)


def main():
    with tinkex.ServiceClient() as service:
        plain, drift_plain = train(service, penalty=0.0)
        held, drift_held = train(service, penalty=2.0)
    for name, losses, moved in (("plain", plain, drift_plain), ("with KL", held, drift_held)):
        print(f"{name:8} loss {losses[0]:.1f} -> {losses[-1]:.1f}   old text moved {moved:.3f}")
    assert held[-1] < held[0] / 2, "it still learns"
    assert drift_held < drift_plain / 2, "and moves the old text less"


if __name__ == "__main__":
    main()
