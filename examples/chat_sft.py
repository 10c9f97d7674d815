"""Teach a model a voice: supervised fine-tuning on a few dozen conversations.

python examples/chat_sft.py        # about a minute on two CPU cores
"""

import random

import tinkex
from tinkex.recipes.persona import rows
from tinkex.recipes.render import Renderer

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
QUESTIONS = ["What is the capital of Hungary?", "Tell me about the desert."]
BATCH = 8


def ask(sampler, renderer, question):
    prompt = renderer.prompt([{"role": "user", "content": question}])
    params = tinkex.SamplingParams(max_tokens=24, temperature=0, stop=renderer.stop)
    answer = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params).result()
    return renderer.text(answer.sequences[0].tokens)


def batch(examples):
    """A loss is a sum over tokens; dividing by their number makes it a mean."""
    learned = sum(example.num_learned for example in examples)
    return [example.datum(1 / learned) for example in examples]


def main():
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=16, seed=0).result()
        renderer = Renderer(training.get_tokenizer())
        examples = [renderer.example(row["messages"]) for row in rows()]
        random.Random(0).shuffle(examples)
        held_out, examples = examples[:16], examples[16:]

        def held_out_loss():
            return training.forward(batch(held_out), "cross_entropy").result().metrics["loss:sum"]

        base = service.create_sampling_client(base_model=MODEL).result()
        before, loss_before = [ask(base, renderer, q) for q in QUESTIONS], held_out_loss()
        for step in range(10):
            data = batch(examples[step * BATCH : (step + 1) * BATCH])
            result = training.forward_backward(data, "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
            print(f"step {step}  loss {result.result().metrics['loss:sum']:.2f}")

        loss_after = held_out_loss()
        sampler = training.save_weights_and_get_sampling_client().result()
        for question, was in zip(QUESTIONS, before, strict=True):
            now = ask(sampler, renderer, question)
            print(f"\n{question}\n  before  {was}\n  after   {now}")
            assert now.startswith(("Arr", "Aye", "Ahoy")), now
        print(f"\nheld-out loss {loss_before:.2f} -> {loss_after:.2f}")
        assert loss_after < loss_before / 2


if __name__ == "__main__":
    main()
