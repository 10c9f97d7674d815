"""A run of the official SDK, in its own venv, that the browser looks at: argv is URL, key, model.

Prints the run's id, then takes one training step for each line it reads.
"""

import os
import sys

import tinker
from tinker import types

TOKENS = list(range(50, 82))


def main() -> None:
    url, key, model = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(model, rank=8)
    print(training.model_id, flush=True)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    for _ in sys.stdin:
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


main()
# The official SDK was once aborted (SIGABRT, without a word), it seems while it ended.
os._exit(0)
