"""A 30-step run by the official SDK, which must not notice that its server is killed meanwhile.

Prints one JSON line at each step, and last the losses and a digest of the final adapter.
"""

from __future__ import annotations

import hashlib
import json
import os

import tinker
from scenario import SEQUENCES, datum, done, fetch
from tinker import types

NUM_STEPS = 30


def main() -> None:
    service = tinker.ServiceClient()
    model = done(service.get_server_capabilities()).supported_models[0].model_name
    client = service.create_lora_training_client(base_model=model, rank=4, seed=5)
    losses = []
    for step in range(NUM_STEPS):
        data = [datum([(t + step) % 90 for t in tokens]) for tokens in SEQUENCES]
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=float(os.environ["PEER_LR"])))
        losses.append(done(passed).metrics["loss:sum"])
        done(stepped)
        print(json.dumps({"at": step}), flush=True)
    path = done(client.save_weights_external("final", ttl_seconds=3600)).path
    urls = done(service.create_rest_client().get_external_weights_urls(path)).urls
    digest = hashlib.sha256()
    for name in sorted(name for name in urls if not name.endswith(".json")):
        digest.update(fetch(urls[name]))
    print(json.dumps({"losses": losses, "weights": digest.hexdigest()}), flush=True)


if __name__ == "__main__":
    main()
