"""A training loop with the official SDK, run in its own venv by the crash test: argv is URL, model.

Prints one JSON line with its losses and the path of the final checkpoint. Everything it does could
be any user's script: no retries of its own, no knowledge of the server.
"""

import json
import os
import sys
import time

import tinker
from tinker import types

NUM_STEPS = 30


def datum(step: int, part: int) -> types.Datum:
    tokens = [(step * 7 + part * 3 + i * (1 + part)) % 97 for i in range(12)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def main() -> None:
    service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-crash")
    trainer = service.create_lora_training_client(sys.argv[2], rank=4, seed=11)
    losses = []
    for step in range(NUM_STEPS):
        passes = [trainer.forward_backward([datum(step, p)], "cross_entropy") for p in range(2)]
        done = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        time.sleep(0.15)  # a script has other things to do; without it thirty steps take a second
        losses += [each.result().metrics["loss:sum"] for each in passes]
        done.result()
        print(f"step {step}", file=sys.stderr, flush=True)
    path = trainer.save_state("final").result().path
    print(json.dumps({"losses": losses, "path": path}), flush=True)


main()
# The official SDK was once aborted (SIGABRT, without a word), it seems while it ended.
os._exit(0)
