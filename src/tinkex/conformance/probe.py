"""Raw HTTP against a server under test, with just enough protobuf to read the answers.

Deliberately none of our SDK: no retries, no leniency, nothing that would paper over a deviation.
It makes one session, one sampler and as many training runs as the checks ask for.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import zstandard

from tinkex.conformance.suite import Mismatch, Unsupported, expect
from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.loopback import DIRECT

__all__ = ["Probe", "ProbeRun", "datum", "logprobs_of"]

# What a server is told; some answer old versions in another way.
SDK_VERSION = "0.36.0"
# Small ids, which every vocabulary has.
TOKENS = [5, 17, 42, 9, 301, 77, 12, 3]
_MISSING = (404, 405, 501)


class Probe:
    """A caller of one server. `model` is the base model to use; the first one by default."""

    def __init__(
        self, base_url: str, api_key: str, *, model: str | None = None, timeout_s: float = 120.0
    ) -> None:
        self.http = httpx.Client(
            base_url=base_url.rstrip("/") + "/api/v1/",
            headers={"X-API-Key": api_key, "User-Agent": f"AsyncTinker/Python {SDK_VERSION}"},
            timeout=60.0,
            follow_redirects=True,
            mounts=DIRECT,
        )
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._model = model
        self._model_seq = itertools.count()
        self.sampler_seq = itertools.count()
        self._sample_seq = itertools.count()

    def close(self) -> None:
        self.http.close()

    # ------------------------------------------------------------------------------ calls

    def call(self, verb: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send a request and give the answer, whatever its status."""
        return self.http.request(verb, path, json=body, **options)

    def ask(self, verb: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Send a request that must be answered by a JSON object; no such endpoint: unsupported."""
        answer = self.call(verb, path, body, **options)
        if answer.status_code in _MISSING:
            raise Unsupported(f"{verb} {path} answers {answer.status_code}")
        expect(answer.is_success, f"2xx from {verb} {path}", shown(answer))
        value = answer.json() if answer.content else {}
        expect(isinstance(value, dict), f"a JSON object from {verb} {path}", shown(answer))
        return dict(value)

    def promise(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submit; the promise must carry a request id."""
        promise = self.ask("POST", path, body)
        request_id = promise.get("request_id")
        expect(
            isinstance(request_id, str) and bool(request_id),
            f"a promise with request_id from POST {path}",
            promise,
        )
        return promise

    def result(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submit and wait for a JSON result."""
        value = self.wait(str(self.promise(path, body)["request_id"]))
        assert isinstance(value, dict)
        return value

    def wait(self, request_id: str, message: Any = None) -> Any:
        """Poll a future as a client does. `message` is the protobuf type of the result, if any.

        Raises:
            Mismatch: It failed, or did not end in time.
        """
        deadline = time.monotonic() + self.timeout_s
        metadata_only = True
        while time.monotonic() < deadline:
            answer = self.call(
                "POST",
                "retrieve_future",
                {"request_id": request_id, "allow_metadata_only": metadata_only},
                headers={"Accept": "application/x-protobuf"} if message else None,
            )
            # 408 ends a long poll without a result; clients repeat polls that failed, too.
            if answer.status_code == 408 or answer.status_code >= 500:
                continue
            expect(answer.is_success, "a result or 408 from retrieve_future", shown(answer))
            if "application/x-protobuf" in answer.headers.get("content-type", ""):
                expect(message is not None, "JSON for a result that is JSON", "protobuf")
                return message.FromString(answer.content)
            value = answer.json()
            if value.get("type") == "try_again":
                continue
            if value.get("status") == "complete_metadata":
                expect(metadata_only, "the size of a payload once", "complete_metadata twice")
                metadata_only = False  # It is ready: now ask for the payload itself.
                continue
            if "error" in value:
                raise Mismatch("a result", f"failed future: {value}")
            expect(message is None, "protobuf for this result", f"JSON {value}")
            return value
        raise Mismatch(f"a result within {self.timeout_s:.0f} s", f"{request_id} still pending")

    def expect_refusal(self, answer: httpx.Response, what: str = "", *, category: str = "") -> None:
        """Refused at once with 4xx, or by a failed future, of that category where one is named."""
        if not answer.is_success:
            expect(400 <= answer.status_code < 500, f"4xx{what}", shown(answer))
            return
        request_id = answer.json()["request_id"]
        try:
            value = self.wait(request_id)
        except Mismatch as exc:
            if not exc.got.startswith("failed future: "):
                raise
            body = {"request_id": request_id, "allow_metadata_only": False}
            failure = self.call("POST", "retrieve_future", body).json()
            expect("error" in failure, "an error", failure)
            if category:
                expect(failure.get("category") == category, f"category {category}", failure)
            return
        raise Mismatch("a failed future", value)

    # ------------------------------------------------------------------------------ what exists

    def require(self, flag: str) -> None:
        """Go on only where the server says in its client config that it does this."""
        if not self.ask("POST", "client/config", {"sdk_version": SDK_VERSION}).get(flag):
            raise Unsupported(f"{flag} is off")

    @functools.cached_property
    def model(self) -> str:
        if self._model:
            return self._model
        models = self.ask("GET", "get_server_capabilities").get("supported_models", [])
        for model in models:
            if model.get("model_name") and model.get("trainable") is not False:
                return str(model["model_name"])
        raise Unsupported("the server lists no trainable model")

    @functools.cached_property
    def session_id(self) -> str:
        return self.new_session()

    def new_session(self) -> str:
        answer = self.ask(
            "POST",
            "create_session",
            {
                "tags": [],
                "user_metadata": {},
                "sdk_version": SDK_VERSION,
                "type": "create_session",
            },
        )
        expect(isinstance(answer.get("session_id"), str), "session_id, a string", answer)
        return str(answer["session_id"])

    def new_run(self, rank: int = 4) -> ProbeRun:
        """A fresh LoRA run of the probe's session."""
        seq = next(self._model_seq)
        answer = self.result(
            "create_model",
            {
                "session_id": self.session_id,
                "model_seq_id": seq,
                "base_model": self.model,
                "lora_config": {
                    "rank": rank,
                    "seed": 1,
                    "train_unembed": True,
                    "train_mlp": True,
                    "train_attn": True,
                },
                "optimizer_config": {"type": "adamw"},
                "type": "create_model",
            },
        )
        expect(
            answer.get("model_id") == f"{self.session_id}:train:{seq}",
            f"model_id {self.session_id}:train:{seq}",
            answer,
        )
        return ProbeRun(probe=self, model_id=str(answer["model_id"]))

    @functools.cached_property
    def run(self) -> ProbeRun:
        """A run shared by checks that leave no gradients behind."""
        return self.new_run()

    def new_sampler(self, model_path: str | None = None) -> str:
        body = {
            "session_id": self.session_id,
            "sampling_session_seq_id": next(self.sampler_seq),
            "type": "create_sampling_session",
            **({"model_path": model_path} if model_path else {"base_model": self.model}),
        }
        answer = self.ask("POST", "create_sampling_session", body)
        expect(isinstance(answer.get("sampling_session_id"), str), "sampling_session_id", answer)
        return str(answer["sampling_session_id"])

    @functools.cached_property
    def sampler(self) -> str:
        return self.new_sampler()

    def sample(
        self, sampler: str | None = None, prompt: Sequence[int] = TOKENS, **fields: Any
    ) -> tuple[dict[str, Any], pb.SampleResponse]:
        """Sample once; gives the promise and the decoded result."""
        promise = self.promise("asample", self.sample_body(sampler, prompt, **fields))
        return promise, self.wait(str(promise["request_id"]), pb.SampleResponse)

    def sample_body(
        self, sampler: str | None = None, prompt: Sequence[int] = TOKENS, **fields: Any
    ) -> dict[str, Any]:
        params = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_tokens": 8}
        return {
            "sampling_session_id": sampler or self.sampler,
            "seq_id": next(self._sample_seq),
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
            "topk_sample_logprobs": 0,
            "prompt_alt_tokens_k": 0,
            "record_stability_info": False,
            "type": "sample",
            **fields,
            "sampling_params": {**params, **fields.get("sampling_params", {})},
        }


@dataclass
class ProbeRun:
    """A training run under test: it hands out sequence numbers and decodes results."""

    probe: Probe
    model_id: str
    seq: int = 0

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def post_training(
        self,
        data: Sequence[pb.Datum],
        loss_fn: str = "cross_entropy",
        *,
        seq: int | None = None,
        forward_only: bool = False,
        loss_id: str = "",
        compress: bool = False,
    ) -> httpx.Response:
        """Send one forward_backward, whatever the answer."""
        request = pb.ForwardBackwardRequest(
            model_id=self.model_id,
            seq_id=self.next_seq() if seq is None else seq,
            data=data,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        if loss_id:
            request.loss_fn_config_v2["loss_id"].text = loss_id
        content, headers = request.SerializeToString(), {"Content-Type": "application/x-protobuf"}
        if compress:
            content, headers["Content-Encoding"] = zstandard.compress(content), "zstd"
        return self.probe.http.post("forward_backward", content=content, headers=headers)

    def forward_backward(
        self, data: Sequence[pb.Datum], loss_fn: str = "cross_entropy", **options: Any
    ) -> pb.ForwardBackwardOutput:
        answer = self.post_training(data, loss_fn, **options)
        expect(answer.is_success, f"2xx from forward_backward ({loss_fn})", shown(answer))
        return self.probe.wait(answer.json()["request_id"], pb.ForwardBackwardOutput)  # type: ignore[no-any-return]

    def loss(self, data: Sequence[pb.Datum]) -> float:
        """Cross-entropy without training."""
        return float(self.forward_backward(data, forward_only=True).metrics["loss:sum"])

    def optim_step(self, learning_rate: float = 1e-3) -> dict[str, Any]:
        return self.submit(
            "optim_step",
            adam_params={
                "learning_rate": learning_rate,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-12,
                "weight_decay": 0.0,
                "grad_clip_norm": 0.0,
            },
        )

    def submit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """A training request other than forward_backward, sent and waited for."""
        return self.probe.result(kind, self.body(kind, **fields))

    def body(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"model_id": self.model_id, "seq_id": self.next_seq(), "type": kind, **fields}

    def save(self, name: str) -> str:
        path = self.submit("save_weights", path=name, overwrite=False).get("path")
        expect(
            path == f"tinker://{self.model_id}/weights/{name}",
            f"tinker://{self.model_id}/weights/{name}",
            path,
        )
        return str(path)


def datum(
    tokens: Sequence[int] = TOKENS, weight: float = 1.0, **inputs: Sequence[float]
) -> pb.Datum:
    """A next-token example; `inputs` add or replace loss inputs, one float per target."""
    targets = list(tokens[1:])
    item = pb.Datum(
        model_input=[
            pb.Chunk(
                encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens[:-1], "<i4").tobytes())
            )
        ]
    )
    item.loss_fn_inputs["target_tokens"].CopyFrom(_tensor(np.array(targets, "<i8"), pb.DTYPE_INT64))
    floats = {"weights": [weight] * len(targets)} if not inputs else inputs
    for name, values in floats.items():
        item.loss_fn_inputs[name].CopyFrom(_tensor(np.array(values, "<f4"), pb.DTYPE_FLOAT32))
    return item


def _tensor(array: Any, dtype: pb.DType) -> pb.Tensor:
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=list(array.shape))


def logprobs_of(output: pb.ForwardBackwardOutput) -> list[Any]:
    """The `logprobs` of each datum."""
    logprobs = []
    for record in output.loss_fn_outputs:
        # One ragged tensor for all datums: `offsets` are bytes of `data`, one more than datums.
        tensor = record.fields["logprobs"]
        offsets = np.frombuffer(tensor.offsets, "<i8")
        logprobs += [
            np.frombuffer(tensor.data[start:end], "<f4")
            for start, end in itertools.pairwise(offsets.tolist())
        ]
    return logprobs


def shown(answer: httpx.Response) -> str:
    text = answer.text if "protobuf" not in answer.headers.get("content-type", "") else "protobuf"
    return f"{answer.status_code} {text[:300]}"
