"""Samples and training passes as they are recorded: prompts, loss inputs, provenance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from case_values import PNG, UNICODE, Build, Cases


def _prompts(old: bool) -> dict[str, Build]:
    size: dict[str, Any] = (
        {"height": 10, "width": 20, "tokens": 5} if old else {"expected_tokens": 5}
    )
    prompts: dict[str, Build] = {
        "text": lambda t: t.ModelInput.from_ints([1, 2, 3]),
        "empty": lambda t: t.ModelInput.empty(),
        "no-tokens": lambda t: t.ModelInput.from_ints([]),
        "huge-ids": lambda t: t.ModelInput.from_ints([0, 2**31 - 1]),
        "typed": lambda t: t.ModelInput(
            chunks=[t.EncodedTextChunk(tokens=[1], type="encoded_text")]
        ),
        "appended": lambda t: t.ModelInput.from_ints([1]).append(t.EncodedTextChunk(tokens=[2])),
        "image": lambda t: t.ModelInput(
            chunks=[t.EncodedTextChunk(tokens=[1]), t.ImageChunk(data=PNG, format="png", **size)]
        ),
        "pointer": lambda t: t.ModelInput(
            chunks=[t.ImageAssetPointerChunk(format="jpeg", location=f"s3://{UNICODE}", **size)]
        ),
    }
    if not old:
        prompts["image-no-size"] = lambda t: t.ModelInput(
            chunks=[t.ImageChunk(data=b"", format="jpeg")]
        )
        prompts["dmel"] = lambda t: t.ModelInput(chunks=[t.DmelChunk(dmel=b"\x00\x02\x07\x50")])
    return prompts


def samples(old: bool) -> Cases:
    for label, prompt in _prompts(old).items():
        yield (
            f"asample/prompt-{label}",
            "asample",
            lambda t, prompt=prompt: t.SampleRequest(
                prompt=prompt(t), sampling_params=t.SamplingParams()
            ),
        )
    params: dict[str, Any] = {
        "max_tokens": 16,
        "seed": 2**31,
        "stop": [1, 2],
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 0.9,
    }
    stops: dict[str, Any] = {"stop-text": UNICODE, "stop-texts": ["a", "b"], "stop-none": []}
    variants = [{name: value} for name, value in params.items()]
    variants += [{"stop": value} for value in stops.values()] + [params]
    for index, fields in enumerate(variants):
        yield (
            f"asample/params-{index}-{'+'.join(fields)}",
            "asample",
            lambda t, fields=fields: t.SampleRequest(
                prompt=t.ModelInput.from_ints([1, 2]), sampling_params=t.SamplingParams(**fields)
            ),
        )
    optional: dict[str, Any] = {
        "num_samples": 4,
        "base_model": "m",
        "model_path": "tinker://r/sampler_weights/x",
        "sampling_session_id": "S:sample:0",
        "seq_id": 2**40,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
    }
    if not old:
        optional |= {
            "topk_sample_logprobs": 2,
            "prompt_alt_tokens_k": 4,
            "prompt_logprobs_last_n": 7,
            "record_stability_info": True,
        }
    turns = [{name: value} for name, value in optional.items()]
    turns += [{"prompt_logprobs": False}, {"prompt_logprobs": None}, optional]
    for index, fields in enumerate(turns):
        yield (
            f"asample/field-{index}-{'+'.join(fields)}",
            "asample",
            lambda t, fields=fields: t.SampleRequest(
                prompt=t.ModelInput.from_ints([1, 2]),
                sampling_params=t.SamplingParams(max_tokens=1),
                **fields,
            ),
        )
    yield from _targets(old)


def _targets(old: bool) -> Cases:
    if old:
        return
    tensors: dict[str, dict[str, Any]] = {
        "dense": {"data": [5, -1], "dtype": "int64", "shape": [2, 1]},
        "sparse": {
            "data": [5],
            "dtype": "int64",
            "shape": [2, 9],
            "sparse_crow_indices": [0, 0, 1],
            "sparse_col_indices": [8],
        },
    }
    for label, fields in tensors.items():
        yield (
            f"asample/targets-{label}",
            "asample",
            lambda t, fields=fields: t.SampleRequest(
                prompt=t.ModelInput.from_ints([1, 2, 3]),
                sampling_params=t.SamplingParams(),
                target_prompt_logprobs=fields,
            ),
        )


def _tensor_inputs(old: bool) -> dict[str, Build]:
    """Loss inputs in every form a caller may give."""
    inputs: dict[str, Build] = {
        "lists": lambda t: {"target_tokens": [2, 3, 4], "weights": [0.1, 0, 1]},
        "one-list": lambda t: {"target_tokens": [2, 3, 2**40]},
        "tensor": lambda t: {"x": t.TensorData(data=[1.5, -2.25], dtype="float32")},
        "tensor-shape": lambda t: {"x": t.TensorData(data=[1, 2], dtype="int64", shape=[2, 1])},
        "negative": lambda t: {"advantages": [-1.5, 1e-30, 3.0e38]},
        "empty": lambda t: {},
    }
    if not old:
        inputs |= {
            "sparse": lambda t: {
                "weights": t.TensorData(
                    data=[1.0, 2.0],
                    dtype="float32",
                    shape=[3, 4],
                    sparse_crow_indices=[0, 1, 2, 2],
                    sparse_col_indices=[0, 3],
                )
            },
            "nested": lambda t: {"target_tokens": [[1, 2], [3, 4]]},
            "empty-list": lambda t: {"weights": []},
        }
    return inputs


def _array_inputs(old: bool) -> dict[str, Callable[[Any, Any, Any], dict[str, Any]]]:
    """Loss inputs from numpy and torch: builders of (types, numpy, torch)."""
    inputs: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
        "numpy-float": lambda t, np, torch: {"weights": np.array([0.1, 2], np.float32)},
        "numpy-double": lambda t, np, torch: {"weights": np.array([0.1, 2.0])},
        "numpy-int": lambda t, np, torch: {"target_tokens": np.array([1, 2], np.int32)},
        "torch-float": lambda t, np, torch: {"weights": torch.tensor([0.1, 2.0])},
        "torch-int": lambda t, np, torch: {"target_tokens": torch.tensor([1, 2])},
    }
    if not old:
        inputs["torch-bf16"] = lambda t, np, torch: {
            "advantages": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)
        }
        inputs["torch-2d-sparse"] = lambda t, np, torch: {
            "weights": torch.zeros(8, 8).index_put_((torch.tensor([3]),), torch.tensor(1.5))
        }
        inputs["torch-2d-dense"] = lambda t, np, torch: {"weights": torch.ones(2, 2)}
        inputs["numpy-2d"] = lambda t, np, torch: {"logprobs": np.zeros((2, 3), np.float32)}
    return inputs


def passes(old: bool) -> Cases:
    def one(t: Any, datum: Any, **fields: Any) -> Any:
        config = {k: v for k, v in fields.items() if k == "loss_fn_config"}
        rest = {k: v for k, v in fields.items() if k != "loss_fn_config"}
        loss_fn = rest.pop("loss_fn", "cross_entropy")
        given = t.ForwardBackwardInput(data=datum, loss_fn=loss_fn, **config)
        return t.ForwardBackwardRequest(
            forward_backward_input=given, **{"model_id": "S:train:0", "seq_id": 1, **rest}
        )

    def simple(t: Any) -> Any:
        return t.Datum(model_input=t.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={})

    for label, inputs in _tensor_inputs(old).items():
        yield (
            f"forward_backward/inputs-{label}",
            "forward_backward",
            lambda t, inputs=inputs: one(
                t, [t.Datum(model_input=t.ModelInput.from_ints([1]), loss_fn_inputs=inputs(t))]
            ),
        )
    for label, arrays in _array_inputs(old).items():
        yield (
            f"forward_backward/inputs-{label}",
            "forward_backward",
            lambda t, arrays=arrays: one(
                t,
                [
                    t.Datum(
                        model_input=t.ModelInput.from_ints([1]),
                        loss_fn_inputs=arrays(t, *_array_modules()),
                    )
                ],
            ),
        )
    for label, prompt in _prompts(old).items():
        if label == "pointer" and not old:
            continue  # not encodable, as the contract says
        yield (
            f"forward_backward/input-{label}",
            "forward_backward",
            lambda t, prompt=prompt: one(t, [t.Datum(model_input=prompt(t), loss_fn_inputs={})]),
        )
    configs: dict[str, Any] = {"number": {"beta": 0.25}, "zero": {"clip": 0.0}, "none": None}
    if not old:
        configs |= {"text": {"loss_id": UNICODE}, "empty-text": {"loss_id": ""}}
    for label, config in configs.items():
        yield (
            f"forward_backward/config-{label}",
            "forward_backward",
            lambda t, config=config: one(t, [simple(t)], loss_fn="ppo", loss_fn_config=config),
        )
    yield (
        "forward_backward/no-seq-id",
        "forward_backward",
        lambda t: one(t, [simple(t)], seq_id=None),
    )
    yield (
        "forward_backward/many",
        "forward_backward",
        lambda t: one(t, [simple(t) for _ in range(200)], seq_id=2**31 - 1, model_id=UNICODE),
    )
    yield (
        "forward_backward/long",
        "forward_backward",
        lambda t: (
            one(t, [t.Datum(model_input=t.ModelInput.from_ints(list(range(40_000))))])
            if not old
            else one(
                t,
                [
                    t.Datum(
                        model_input=t.ModelInput.from_ints(list(range(40_000))), loss_fn_inputs={}
                    )
                ],
            )
        ),
    )
    if old:
        yield (
            "forward/simple",
            "forward",
            lambda t: t.ForwardRequest(
                forward_input=t.ForwardBackwardInput(data=[simple(t)], loss_fn="cross_entropy"),
                model_id="S:train:0",
                seq_id=3,
            ),
        )
        return
    yield from _provenance(one)


def _provenance(one: Any) -> Cases:
    def build(t: Any) -> Any:
        datum = t.Datum(
            model_input=t.ModelInput.from_ints([1, 2, 3]),
            loss_fn_inputs={"target_tokens": [2, 3, 4]},
        )
        prompt = t.PromptProvenanceSpan(sequence_id="s", offset=300, length=2)
        sampled = t.SampledProvenanceSpan(sequence_id=UNICODE, length=1)
        return one(
            t,
            [
                datum.with_provenance(
                    model_input=[prompt, sampled],
                    loss_fn_inputs=[t.SampledProvenanceSpan(sequence_id="s", offset=0, length=3)],
                )
            ],
        )

    yield "forward_backward/provenance", "forward_backward", build


def _array_modules() -> tuple[Any, Any]:
    import numpy
    import torch

    return numpy, torch
