"""Runs in a venv of its own, beside a build of llama.cpp: JSON in on stdin, JSON out on stdout.

In: {"file": PATH, "prompts": [[token, ...], ...], "texts": [TEXT, ...], "num_tokens": N}
Out: {"answers": [[[token, logprob or null], ...], ...], "tokens": [[token, ...], ...]}, greedy.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def main() -> None:
    asked = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp talks on stdout.
    server = _server(asked["file"])
    answers = [_answer(server, prompt, asked["num_tokens"]) for prompt in asked["prompts"]]
    tokens = [_tokens(server, text) for text in asked["texts"]]
    json.dump({"answers": answers, "tokens": tokens}, out)
    out.flush()
    os._exit(0)  # Its threads have nothing to say any more.


def _server(file: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = 256
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    return xllamacpp.Server(params)


def _answer(server: Any, prompt: list[int], num_tokens: int) -> list[tuple[int, float | None]]:
    asked = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "n_probs": 1}
    said = _post(server, "completion", {**asked, "ignore_eos": True, "return_tokens": True})
    # A token that ends inside a character has no entry of its own among the probabilities.
    known = [(t["id"], t["logprob"]) for t in said["completion_probabilities"]]
    answer: list[tuple[int, float | None]] = []
    for token in said["tokens"]:
        mine = bool(known) and known[0][0] == token
        answer.append((token, known.pop(0)[1] if mine else None))
    assert not known, said
    return answer


def _tokens(server: Any, text: str) -> list[int]:
    return list(_post(server, "tokenize", {"content": text, "parse_special": True})["tokens"])


def _post(server: Any, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{server.listening_address}/{route}", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
