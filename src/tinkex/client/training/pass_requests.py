"""Which requests a pass over training data becomes, and how its result is read.

It cuts the batch as the server wants it and picks the generation that the server speaks; the bytes
are `tinkex.wire`'s. The functions are pure; those over large batches run on worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tinkex import types
from tinkex.client.http.call import Call
from tinkex.client.session.flags import ServerFlags
from tinkex.client.session.polling import Expect
from tinkex.client.training.submission import CallPart
from tinkex.wire import chunking, requests


def pass_parts(
    flags: ServerFlags,
    model_id: str,
    data: Sequence[types.Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, float | str] | None,
    *,
    forward_only: bool,
) -> list[CallPart]:
    """The requests of one pass: the batch, cut as the server wants it."""
    limits = chunking.LIMITS_V04
    if not flags.old_generation:
        limits = chunking.ChunkLimits(
            max_datums=max(flags.fwdbwd_max_chunk_len, 1),
            max_size=max(flags.fwdbwd_max_chunk_bytes_count, 1),
        )
    parts = []
    for chunk in chunking.split(data, limits):
        # 0.4.1 tells "no config" from "a null config", so None is not passed on.
        config = () if loss_fn_config is None else (loss_fn_config,)
        batch = types.ForwardBackwardInput(chunk, loss_fn, *config)
        size_bytes = sum(map(chunking.datum_size, chunk))
        parts.append(CallPart(_pass_encoder(flags, model_id, batch, forward_only), size_bytes))
    return parts


def _pass_encoder(
    flags: ServerFlags, model_id: str, asked: types.ForwardBackwardInput, forward_only: bool
) -> Callable[[int], Call]:
    dialect = flags.generation
    path = "forward" if forward_only and flags.old_generation else "forward_backward"

    def encode(seq_id: int) -> Call:
        kind = types.ForwardRequest if forward_only else types.ForwardBackwardRequest
        request = kind(asked, model_id, seq_id)
        body = requests.encode(path, request, dialect, compress=flags.proto_compress_fwdbwd)
        return Call.to(path, body, name="forward" if forward_only else "forward_backward")

    return encode


EXPECT_FORWARD = Expect("Forward", types.ForwardBackwardOutput, in_protobuf=True)
EXPECT_FORWARD_BACKWARD = Expect("ForwardBackward", types.ForwardBackwardOutput, in_protobuf=True)
