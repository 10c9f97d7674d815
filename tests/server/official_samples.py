"""Two hundred samples with the official SDK, run in its own venv by the crash test: argv is URL.

Says `submitted` once all of them are under way, and how many came back in the end.
"""

import os
import sys

import tinker
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-crash")
sampler = service.create_sampling_client(base_model="toy")
futures = [
    sampler.sample(
        types.ModelInput.from_ints([1, 2, number % 100]),
        1,
        types.SamplingParams(max_tokens=20, seed=number, stop=[]),
    )
    for number in range(200)
]
print("submitted", flush=True)
results = [future.result() for future in futures]
print(sum(len(result.sequences[0].tokens) for result in results), flush=True)
# The official SDK was once aborted (SIGABRT, without a word), it seems while it ended.
os._exit(0)
