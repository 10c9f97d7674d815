"""Building, writing and reading a training request: Tinkex against the official SDK 0.36.

    python benchmarks/wire.py [--no-bar] [--write]

256 datums of 2,048 tokens. The peer runs in its own cached venv as a child process; ours runs in
another, and the two take turns, so that a busy machine slows both. Figures are medians of 5 turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/golden")]

import report  # noqa: E402
from record import peer_python  # noqa: E402

PEER = "0.36.0"
DATUMS, TOKENS, TURNS = 256, 2048, 5

# Each side runs this in a child of its own and answers one line per command. `sdk` is filled in.
CHILD = r"""
import json, sys, time
import numpy as np
DATUMS, TOKENS = {datums}, {tokens}
rng = np.random.default_rng(0)
ids = rng.integers(0, 150_000, (DATUMS, TOKENS + 1))
weights = rng.random((DATUMS, TOKENS)).astype(np.float32)
logprobs = [-rng.random(TOKENS).astype(np.float32) for _ in range(DATUMS)]
arrays = [(row[:-1].copy(), row[1:].copy(), w) for row, w in zip(ids, weights)]
lists = [tuple(part.tolist() for part in row) for row in arrays]
{sdk}

def build(rows):
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(as_tokens(tokens)),
            loss_fn_inputs={{"target_tokens": targets, "weights": w}},
        )
        for tokens, targets, w in rows
    ]
    given = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(
        forward_backward_input=given, model_id="S:train:0", seq_id=1
    )
    return encode(request)

def read():
    output = decode(result)
    total = 0.0
    for item in output.loss_fn_outputs:
        total += float(item["logprobs"].to_numpy()[-1])
    return total

size = len(build(lists))
commands = {{"lists": lambda: build(lists), "arrays": lambda: build(arrays), "decode": read}}
assert abs(read() - sum(float(row[-1]) for row in logprobs)) < 1e-3
print(json.dumps({{"size": size}}), flush=True)
for line in sys.stdin:
    run = commands[line.strip()]
    run()
    start = time.perf_counter()
    run()
    print(json.dumps({{"s": time.perf_counter() - start}}), flush=True)
"""

OURS = """
from tinkex import types
from tinkex.wire import proto_requests, proto_results
encode, decode = proto_requests.encode, proto_results.decode_pass
as_tokens = lambda tokens: tokens
result = proto_results.encode_pass(types.ForwardBackwardOutput(
    "ArrayRecord", [{"logprobs": types.TensorData.from_numpy(row)} for row in logprobs], {}))
"""

THEIRS = """
import tinker
from tinker import types
from tinker.proto import response_conv, request_conv, tinker_public_pb2 as pb
def as_tokens(tokens):  # 0.36 takes no arrays here
    return tokens if isinstance(tokens, list) else tokens.tolist()
def encode(request):
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()
decode = response_conv.deserialize_forward_backward_output
offsets = np.arange(DATUMS + 1, dtype="<i8") * (TOKENS * 4)
record = pb.ArrayRecord(type_tag="ArrayRecord", num_datums=DATUMS)
field = record.fields["logprobs"]
field.data = b"".join(row.tobytes() for row in logprobs)
field.offsets, field.dtype = offsets.tobytes(), pb.DTYPE_FLOAT32
result = pb.ForwardBackwardOutput(
    loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record]).SerializeToString()
"""


class Child:
    """One side of the comparison, alive for the whole run."""

    def __init__(self, python: str, sdk: str) -> None:
        code = CHILD.format(datums=DATUMS, tokens=TOKENS, sdk=sdk)
        self.process = subprocess.Popen(
            [python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.size_bytes = self._line()["size"]

    def _line(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side of the benchmark died, status {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run_s(self, command: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()["s"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def import_s(python: str, code: str, byte_code: str) -> float:
    """Seconds that `code` adds to the start of an interpreter, as if both SDKs were installed.

    `byte_code` is a folder for it. Without one, an SDK that is run from its source, where no byte
    code may be written, would be compiled anew each time.
    """
    env = {**os.environ, "PYTHONPYCACHEPREFIX": byte_code, "PYTHONDONTWRITEBYTECODE": ""}

    def run_s(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([python, "-c", code], check=True, cwd="/", env=env)
        return time.perf_counter() - start

    return max(run_s(code) - run_s("pass"), 1e-4)


def main() -> int:
    report.parse("wire")
    python = peer_python(PEER)
    ours, theirs = Child(sys.executable, OURS), Child(python, THEIRS)
    if ours.size_bytes != theirs.size_bytes:
        raise SystemExit(f"bodies differ: {ours.size_bytes} and {theirs.size_bytes} bytes")
    bars = {"lists": 1.5, "arrays": 4.0, "decode": 1.0}
    names = {
        "lists": "wire_encode_from_lists",
        "arrays": "wire_encode_from_numpy",
        "decode": "wire_decode_result",
    }
    figures = []
    for command, bar in bars.items():
        turns = [(ours.run_s(command), theirs.run_s(command)) for _ in range(TURNS)]
        mine, peer = (statistics.median(side) * 1e3 for side in zip(*turns, strict=True))
        figures.append(report.Figure(name=names[command], ours=mine, peer=peer, unit="ms", bar=bar))
    ours.close()
    theirs.close()
    # The bare import, and the import with the names a training loop touches: ours loads on demand.
    used = "import tinkex; tinkex.ServiceClient, tinkex.Datum, tinkex.AdamParams"
    for name, code, bar in (
        ("wire_import", "import tinkex", 8.0),
        ("wire_import_and_use", used, None),
    ):
        with tempfile.TemporaryDirectory() as folder:
            turns = [
                (import_s(sys.executable, code, folder), import_s(python, "import tinker", folder))
                for _ in range(1 + TURNS)
            ][1:]  # the first one compiles
        mine, peer = (statistics.median(side) * 1e3 for side in zip(*turns, strict=True))
        figures.append(report.Figure(name=name, ours=mine, peer=peer, unit="ms", bar=bar))
    return report.finish("wire", figures)


if __name__ == "__main__":
    sys.exit(main())
