"""MinT's forward_backward_reverse_kl: the loss `reverse_kl` with a teacher, in MinT's messages.

A datum has two contexts and one continuation. The model that learns reads its own context, the
reference the other one, and both are compared at the continuation. MinT computes the KL over the
vocabulary; this is its estimate at the tokens that were sampled, with the same gradient on average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.teachers import TeacherName
from tinkex.engine.jobs import Array, ModelInfo, TrainDatum, TrainResult
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.jobs import validation
from tinkex.server.jobs.decode import TrainRequest, array_of, tokens_of
from tinkex.server.jobs.teaching import T, Teaching
from tinkex.server.operations.passes import ForwardBackward
from tinkex.server.work.futures import Outcome
from tinkex.server.work.operation import OperationAddress, json_outcome
from tinkex.types.training.reverse_kl import ForwardBackwardReverseKLRequest, ReverseKLDatum
from tinkex.wire.requests import Opened

PATH = "reference_model_path"


class ForwardBackwardReverseKL(ForwardBackward):
    """MinT's call: gradients of the KL to a reference model, estimated at sampled continuations."""

    name = "forward_backward_reverse_kl"
    is_unnumbered = True

    def peek(self, opened: Opened) -> OperationAddress:
        return OperationAddress(opened.address().model_id, None)

    def read(self, opened: Opened) -> TrainRequest:
        asked: ForwardBackwardReverseKLRequest = opened.read()
        if asked.temperature != 1.0:
            raise NotSupportedError(
                f"logprobs are those of temperature 1, got {asked.temperature!r}; leave it out",
                path="temperature",
            )
        teacher = TeacherName(asked.reference_model_path)
        if not teacher.is_checkpoint:
            raise InvalidInputError(
                f"must be a tinker:// path, got {asked.reference_model_path!r:.200}", path=PATH
            )
        data = list(enumerate(asked.data))
        return TrainRequest(
            data=tuple(_datum(index, datum, "student_input") for index, datum in data),
            loss_fn="reverse_kl",
            loss_fn_config={},
            teaching=Teaching.of(teacher),
            references=tuple(_datum(index, datum, "reference_input") for index, datum in data),
        )

    def _judge(self, opened: Opened, info: ModelInfo | None) -> TrainRequest:
        checked = super()._judge(opened, info)
        for index, datum in enumerate(checked.references):
            validation.check_tokens(datum.tokens, f"data[{index}].reference_input", info)
        return checked

    def outcome(self, checked: TrainRequest, result: TrainResult) -> Outcome:
        parts = list(_parts(checked, result))
        losses = [float((weights * gaps**2 / 2).sum()) for weights, gaps in parts]
        kl = sum(float((weights * gaps).sum()) for weights, gaps in parts)
        num_tokens = sum(int(np.count_nonzero(weights)) for weights, _ in parts)
        tensors = [{"data": [loss], "shape": [1], "dtype": "float32"} for loss in losses]
        metrics = {
            "loss:mean": sum(losses) / max(num_tokens, 1),
            "reverse_kl:mean": kl / max(num_tokens, 1),
            "num_samples:sum": float(len(parts)),
            "num_tokens:sum": float(num_tokens),
        }
        outputs = [{"loss": tensor} for tensor in tensors]
        return json_outcome({"outputs": outputs, "metrics": metrics, "type": f"mint_{self.name}"})


def _datum(index: int, datum: ReverseKLDatum, context: str) -> TrainDatum:
    """A context and its continuation, as training data in which only the continuation counts."""
    where = f"data[{index}]"
    before = tokens_of(getattr(datum, context), f"{where}.{context}")
    targets, weights = (_plain(datum, name, where) for name in ("target_tokens", "weights"))
    if len(before) == 0:
        raise InvalidInputError("must hold at least one token", path=f"{where}.{context}")
    if len(weights) != len(targets):
        raise InvalidInputError(
            f"has {len(weights)} numbers for {len(targets)} target_tokens", path=f"{where}.weights"
        )
    whole = np.concatenate([before, targets.astype(np.int64)])
    skipped = np.zeros(len(before) - 1, np.float32)
    inputs: Mapping[str, Array] = {
        "target_tokens": whole[1:],
        "weights": np.concatenate([skipped, weights.astype(np.float32)]),
    }
    return TrainDatum(tokens=whole[:-1], inputs=inputs)


def _plain(datum: ReverseKLDatum, name: str, where: str) -> Array:
    values = array_of(getattr(datum, name))
    if not isinstance(values, np.ndarray) or values.ndim != 1 or len(values) == 0:
        raise InvalidInputError(
            "must be a dense list with an entry for each token", path=f"{where}.{name}"
        )
    if not np.isfinite(values).all() or (name == "target_tokens" and values.dtype.kind not in "iu"):
        raise InvalidInputError(
            "must hold finite numbers, tokens whole ones", path=f"{where}.{name}"
        )
    return values


def _parts(
    checked: TrainRequest, result: TrainResult
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of each datum the weights, and how much likelier its tokens are for the model that learns."""
    for datum, output in zip(checked.data, result.outputs, strict=True):
        weights = np.asarray(datum.inputs["weights"], np.float64)
        counts = weights != 0
        gaps = np.asarray(output["logprobs"], np.float64) - np.asarray(output[T], np.float64)
        yield weights[counts], gaps[counts]
