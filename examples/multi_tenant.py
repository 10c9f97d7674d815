"""One server, two users: both train at once on one loaded model, and neither sees the other.

python examples/multi_tenant.py        # about a minute on two CPU cores
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import tinkex

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
KEYS = {"alice": "tml-alice-example-key", "bob": "tml-bob-example-key"}
LINES = {"alice": "My favourite word is anchor.", "bob": "My favourite word is teapot."}


def train(base_url, user):
    """Teach a line; gives what the user's own model says then, and where it is kept."""
    with tinkex.ServiceClient(base_url=base_url, api_key=KEYS[user]) as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
        tokenizer = training.get_tokenizer()
        tokens = tokenizer.encode(LINES[user])
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        losses = []
        for _ in range(8):
            result = training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-3))
            losses.append(result.result().metrics["loss:sum"])
        path = training.save_weights_for_sampler("line").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        prompt = tokenizer.encode("My favourite word is")
        params = tinkex.SamplingParams(max_tokens=3, temperature=0)
        said = sampler.sample(tinkex.ModelInput.from_ints(prompt), 1, params).result()
        return losses, tokenizer.decode(said.sequences[0].tokens), path


def main():
    flags = [word for user, key in KEYS.items() for word in ("--api-key", f"{key}={user}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--data-dir", folder]
        server = subprocess.Popen(
            [*command, "--model", MODEL, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            base_url = json.loads(server.stdout.readline())["base_url"]
            with ThreadPoolExecutor() as pool:
                results = pool.map(lambda user: train(base_url, user), KEYS)
                done = dict(zip(KEYS, results, strict=True))
            for user, (losses, said, _) in done.items():
                print(f"{user:6} loss {losses[0]:5.1f} -> {losses[-1]:4.1f}   says: {said.strip()}")
                assert losses[-1] < losses[0] / 2
                assert said.split()[0].strip(".") in LINES[user]
            try:
                with tinkex.ServiceClient(base_url=base_url, api_key=KEYS["bob"]) as service:
                    service.create_sampling_client(
                        model_path=done["alice"][2]
                    ).result().get_base_model()
                    raise AssertionError("bob may not read alice's weights")
            except tinkex.TinkerError as refused:
                print(f"bob asks for alice's weights: {refused}")
        finally:
            server.terminate()
            server.wait(timeout=60)
            server.stdout.close()


if __name__ == "__main__":
    main()
