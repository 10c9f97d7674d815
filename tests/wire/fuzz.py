"""Throw damaged bodies at every decoder: only Tinkex errors may come out, and little memory go in.

    python tests/wire/fuzz.py --count 100000 --seed 1

Starts from the recorded bodies of both SDKs and breaks them: bits, lengths, types, nesting,
numbers. Prints one JSON line; anything but an `InvalidInputError` ends it with the body to blame.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from tinkex import types
from tinkex.errors import InvalidInputError
from tinkex.wire import requests, results
from tinkex.wire.body import unpack
from tinkex.wire.generation import JSON, PROTOBUF

GOLDEN = Path(__file__).parent.parent / "golden"
Decode = Callable[[bytes], Any]
Seed = tuple[str, bytes, Decode]

ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 2**63, 2**70, 1e308, float("nan"), "", "text", "\ud7ff", [], {}, [[]],
    [None], [1, "a"], {"a": 1}, [1.5], "png", "int64", "float32", [2**31], [-1], ["NaN"],
]  # fmt: skip


def seeds() -> list[Seed]:
    """Every recorded body small enough to mutate fast, with the decoder it belongs to."""
    found: list[Seed] = []
    for sdk in ("0.4.1", "0.36.0"):
        recorded = json.loads((GOLDEN / f"sdk-{sdk}.json").read_text())
        for case, item in recorded["requests"].items():
            raw = item["json"].encode() if "json" in item else base64.b64decode(item["proto"])
            kind = JSON if "json" in item else PROTOBUF
            if len(raw) < 4096:
                found.append((case, raw, _request(item["endpoint"], kind)))
        for case, text in recorded["results"].items():
            found.append((case, text.encode(), _result(case, JSON)))
        for case, item in recorded["proto_results"].items():
            found.append((case, base64.b64decode(item["proto"]), _result(item["kind"], PROTOBUF)))
    return found


def _read(endpoint: str, raw: bytes, kind: str = JSON) -> Any:
    return requests.open_body(endpoint, raw, kind).read()


def _request(endpoint: str, kind: str) -> Decode:
    return lambda raw: _read(endpoint, raw, kind)


def _result(name: str, kind: str) -> Decode:
    return lambda raw: results.decode(getattr(types, name), raw, kind)


def mutate(raw: bytes, rng: random.Random, other: bytes) -> bytes:
    """One damaged copy."""
    if raw[:1] == b"{" and rng.random() < 0.6:
        return _mutate_json(raw, rng)
    damaged = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(damaged) + 1)
        match rng.randrange(6):
            case 0:
                del damaged[at:]
            case 1:
                damaged[at : at + 1] = bytes((rng.randrange(256),))
            case 2:
                damaged[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 3:
                del damaged[at : at + rng.randrange(1, 9)]
            case 4:
                damaged[at:at] = other[: rng.randrange(1, 64)]
            case 5 if at < len(damaged):
                damaged[at] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _mutate_json(raw: bytes, rng: random.Random) -> bytes:
    """Put an odd value somewhere into the tree, or take a part out."""
    try:
        tree = json.loads(raw)
    except ValueError:
        return raw
    parents = [node for node in _containers(tree) if node]
    if not parents:
        return raw
    parent = rng.choice(parents)
    key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    match rng.randrange(3):
        case 0:
            del parent[key]
        case 1:
            parent[key] = [parent[key]]
        case _:
            parent[key] = rng.choice(ODD_VALUES)
    return json.dumps(tree).encode("utf-8", "replace")


def _containers(tree: Any) -> Iterator[Any]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (dict, list)):
            yield node
            waiting.extend(node.values() if isinstance(node, dict) else node)


def bombs() -> Iterator[Seed]:
    """Bodies whose harm is their size."""
    mib = 1024 * 1024

    def proto(raw: bytes) -> Any:
        return _read("forward_backward", raw, PROTOBUF)

    def sample(raw: bytes) -> Any:
        return _read("asample", raw)

    def old_pass(raw: bytes) -> Any:
        return _read("forward_backward", raw, JSON)

    def squeezed(raw: bytes) -> Any:
        return _read("forward_backward", unpack(raw, "zstd"), PROTOBUF)

    def framed(tag: bytes, raw: bytes) -> bytes:
        size, out = len(raw), bytearray()
        while size > 0x7F:
            out.append(size & 0x7F | 0x80)
            size >>= 7
        return tag + bytes((*out, size)) + raw

    zeros = zstandard.ZstdCompressor(level=3)
    for label, size in (("sized", 1024 * mib), ("unsized", -1)):
        stream = zeros.compressobj(size=size)
        parts = [stream.compress(bytes(16 * mib)) for _ in range(64)] + [stream.flush()]
        yield f"zstd 1 GiB {label}", b"".join(parts), squeezed
    wide = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27)
    )
    yield "zstd window", wide.compress(bytes(64 * mib)), squeezed
    yield "too large", bytes(40 * mib), proto
    yield "empty datums", b"\x1a\x00" * (8 * mib), proto
    yield "empty chunks", framed(b"\x1a", b"\x0a\x00" * (8 * mib)), proto
    shape = framed(b"\x22", b"\x01" * (8 * mib))
    tensor = framed(b"\x12", b"\x0a\x01x" + framed(b"\x12", b"\x18\x01" + shape))
    yield "long shape", framed(b"\x1a", tensor), proto
    yield (
        "loose shape",
        framed(b"\x1a", framed(b"\x12", b"\x0a\x01x" + framed(b"\x12", b"\x20\x01" * (4 * mib)))),
        proto,
    )
    yield "deep JSON", b'{"a":' * 200_000 + b"1" + b"}" * 200_000, sample
    yield "deep list", b"[" * mib, old_pass
    lists = b"[" + b"[]," * (8 * mib) + b"[]]"
    yield "empty lists", b'{"forward_backward_input":{"data":' + lists + b"}}", old_pass
    yield "empty lists", b'{"prompt":{"chunks":' + lists + b"}}", sample
    numbers = b"[" + b"1.5," * (7 * mib) + b"1]"
    yield "many numbers", b'{"prompt":{"chunks":[{"tokens":' + numbers + b"}]}}", sample
    strings = b"[" + b'"ab",' * (6 * mib) + b'"ab"]'
    yield "many strings", b'{"prompt":{"chunks":[{"tokens":' + strings + b"}]}}", sample
    tags = b'{"tags":[' + b"1," * 500_000 + b'1],"user_metadata":null,"sdk_version":""}'
    yield "many errors", tags, lambda raw: _read("create_session", raw)
    pairs = b",".join(b'"%d":1' % n for n in range(80_000))
    yield (
        "many bad pairs",
        b'{"model_id":"m","user_metadata":{' + pairs + b"}}",
        (lambda raw: _read("save_weights", raw)),
    )
    yield "long text", b'{"loss_fn_input":"' + b"x" * (23 * mib) + b'"}', old_pass
    yield "many digits", b'{"prompt":{"chunks":[{"tokens":[' + b"1" * mib + b"]}]}}", sample
    wide_row = b"[" + b"[1,1]," * 100_000 + b"[1,1]]"
    topk = b'{"sequences":[],"topk_prompt_logprobs":[' + b"null," * 100_000 + wide_row + b"]}"
    yield "one wide row", topk, _result("SampleResponse", JSON)
    count = framed(b"\x12", b"\x18" + b"\xff" * 8 + b"\x7f")
    yield "datums without fields", count, _result("ForwardBackwardOutput", PROTOBUF)
    tensor_json = b'{"data":[1],"dtype":"int64","shape":[2147483648,2147483648]}'
    start = b'{"prompt":{"chunks":[]},"sampling_params":{},"target_prompt_logprobs":'
    yield "huge shape", start + tensor_json + b"}", sample


def _status_mib(field: str) -> float:
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if field in li)
    return int(line.split()[1]) / 1024


def extra_mib(run: Callable[[], object]) -> float:
    """How far the process grew at its largest while `run` ran."""
    gc.collect()
    if not Path("/proc/self/clear_refs").exists():  # macOS has one peak for the whole process
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024**2
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status_mib("VmRSS")
    run()
    return max(_status_mib("VmHWM") - before, 0.0)


def attempt(name: str, raw: bytes, decode: Decode) -> bool:
    """Whether the body was refused, as opposed to understood."""
    try:
        decode(raw)
    except InvalidInputError:
        return True
    except BaseException as error:
        kind = type(error).__name__
        print(f"{kind} from {name}: {error}\n{raw[:2000]!r}", file=sys.stderr)
        raise
    return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    corpus = seeds()
    refused = 0
    for name, raw, decode in corpus:
        try:
            decode(raw)
        except InvalidInputError as error:
            raise AssertionError(f"the undamaged body {name} is refused: {error}") from error
    start = time.perf_counter()

    def fuzz() -> None:
        nonlocal refused
        for _ in range(options.count):
            name, raw, decode = rng.choice(corpus)
            refused += attempt(name, mutate(raw, rng, rng.choice(corpus)[1]), decode)

    def explode(name: str, raw: bytes, decode: Decode) -> None:
        assert attempt(name, raw, decode), f"the bomb {name!r} was accepted"

    fuzz_mib = extra_mib(fuzz)
    bomb_mib = {
        name: round(extra_mib(lambda b=(name, raw, decode): explode(*b)), 1)
        for name, raw, decode in bombs()
    }
    answer = {"bodies": options.count, "refused": refused, "fuzz_mib": round(fuzz_mib, 1)}
    answer |= {"bombs_mib": bomb_mib, "seconds": round(time.perf_counter() - start, 1)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
