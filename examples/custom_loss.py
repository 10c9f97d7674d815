"""A loss of your own: unlearn one fact and keep the others.

Any differentiable torch function of the log-probabilities is a loss. This one makes chosen words
unlikely, -log(1 - p), and holds everything else where it was.

python examples/custom_loss.py        # under a minute on two CPU cores
"""

import math

import torch

import tinkex

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
FORGET = ("The capital of France is", " Paris")
KEEP = [("The capital of Italy is", " Rome"), ("Water is made of hydrogen and", " oxygen")]


def main():
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
        tokenizer = training.get_tokenizer()

        def datum(prompt, answer):
            tokens, end = tokenizer.encode(prompt), tokenizer.encode(answer)
            weights = [0.0] * (len(tokens) - 1) + [1.0] * len(end)
            whole = tokens + end
            return tinkex.Datum(
                model_input=tinkex.ModelInput.from_ints(whole[:-1]),
                loss_fn_inputs={"target_tokens": whole[1:], "weights": weights},
            )

        data = [datum(*FORGET), *(datum(*fact) for fact in KEEP)]
        masks = [torch.tensor(d.loss_fn_inputs["weights"].tolist()) for d in data]

        def forward():
            outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
            return [torch.tensor(output["logprobs"].tolist()) for output in outputs]

        start = forward()

        def unlearn(data, logprobs):
            forgotten = (logprobs[0] * masks[0]).sum()
            unlikelihood = -torch.log1p(-forgotten.exp().clamp(max=0.999))
            moved = [((logprobs[i] - start[i]) * masks[i]) ** 2 for i in (1, 2)]
            drift = torch.cat(moved).sum()
            return unlikelihood + drift, {"drift": drift}

        def probabilities():
            return [math.exp((x * m).sum()) for x, m in zip(forward(), masks, strict=True)]

        before = probabilities()
        for step in range(8):
            result = training.forward_backward_custom(data, unlearn)
            training.optim_step(tinkex.AdamParams(learning_rate=5e-4))
            metrics = result.result().metrics
            print(f"step {step}  loss {metrics['loss:sum']:.3f}  drift {metrics['drift']:.4f}")
        after = probabilities()

        for (prompt, answer), was, now in zip([FORGET, *KEEP], before, after, strict=True):
            print(f"{prompt}{answer:8}  {was:6.1%} -> {now:6.1%}")
        assert after[0] < before[0] / 4
        assert all(now > was / 2 for was, now in zip(before[1:], after[1:], strict=True))


if __name__ == "__main__":
    main()
