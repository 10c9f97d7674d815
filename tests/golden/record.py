"""Record what the official SDKs put on the wire, for tests/wire to compare with.

    python tests/golden/record.py 0.4.1 0.36.0

For each version a throw-away venv runs this file again with `--inside`: it starts a server on a
loopback port that keeps every body, sends each request of request_cases.py through the SDK's own
client, and dumps each result with the SDK's own classes. Only bodies are stored, never its code.
"""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import request_cases
import result_cases

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------------ outside


def main(versions: list[str]) -> None:
    for version in versions:
        python = peer_python(version)
        target = HERE / f"sdk-{version}.json"
        subprocess.run([python, __file__, "--inside", version, str(target)], check=True)
        print(f"{target.name}: {target.stat().st_size} bytes")


def peer_python(version: str) -> str:
    """The interpreter of a cached venv that has this SDK version, made when it is missing."""
    sys.path.insert(0, str(HERE.parent / "peers"))
    from venvs import sdk_python

    return str(sdk_python(version))


# ------------------------------------------------------------------------------------ inside


class Capture(http.server.BaseHTTPRequestHandler):
    """Answers every request and keeps the last body."""

    protocol_version = "HTTP/1.1"
    bodies: list[tuple[str, str, bytes]] = []

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        self.bodies.append((self.path, self.headers.get("content-type") or "", body))
        answer = {
            "request_id": "r",
            "session_id": "S",
            "status": "accepted",
            "sampling_session_id": "S:sample:0",
            "model_id": "S:train:0",
            "model_data": {},
            "client_counter": 1,
            "tinker_path": "p",
            "completions": [],
            "cursor": 0,
            "sessions": [],
            "base_model": "m",
            "is_lora": True,
        }
        raw = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_POST = do_PUT = do_GET = do_DELETE = _answer


def inside(version: str, target: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Capture)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    recorded: dict[str, Any] = {"sdk": version}
    recorded["requests"] = asyncio.run(_requests(version, address))
    if version != "0.4.1":
        recorded["requests"] |= _public_calls(address)
    recorded["results"] = _results(version)
    recorded["proto_results"] = {} if version == "0.4.1" else _proto_results()
    recorded["names"] = _names()
    recorded["members"] = _members()
    lines = json.dumps(recorded, indent=0, ensure_ascii=False, sort_keys=True)
    target.write_text(lines + "\n")


async def _requests(version: str, address: str) -> dict[str, Any]:
    from tinker import types
    from tinker._client import AsyncTinker

    client = AsyncTinker(api_key="tml-recorded", base_url=address)
    recorded = {}
    for case, endpoint, build in request_cases.requests(version):
        send = _sender(client, endpoint)
        if send is None:
            continue
        await send(build(_everything(types)))
        recorded[case] = {"endpoint": endpoint, **_last()}
    return recorded


class _everything:
    """The types module, with the types that the SDK keeps in modules of their own."""

    def __init__(self, types: Any) -> None:
        self.types = types

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.types, name):
            return getattr(self.types, name)
        from tinker.types.generic_event import GenericEvent

        return {"GenericEvent": GenericEvent}[name]


def _sender(client: Any, endpoint: str) -> Any:
    """The low-level call of the SDK that posts to an endpoint."""
    places = {
        "asample": ("sampling", "asample"),
        "client_config": ("service", "client_config"),
        "client_dynamic_config": ("service", "client_dynamic_config"),
        "copy_weights": ("models", "copy_weights"),
        "create_custom_loss": ("service", "create_custom_loss"),
        "create_model": ("models", "create"),
        "create_sampling_session": ("service", "create_sampling_session"),
        "create_session": ("service", "create_session"),
        "forward": ("training", "forward"),
        "forward_backward": ("training", "forward_backward"),
        "get_info": ("models", "get_info"),
        "join_sampling_session": ("service", "join_sampling_session"),
        "load_weights": ("weights", "load"),
        "optim_step": ("training", "optim_step"),
        "retrieve_future": ("futures", "retrieve"),
        "retrieve_futures": ("futures", "retrieve_multi"),
        "save_weights": ("weights", "save"),
        "save_weights_external": ("weights", "save_external"),
        "save_weights_for_sampler": ("weights", "save_for_sampler"),
        "session_heartbeat": ("service", "session_heartbeat"),
        "telemetry": ("telemetry", "send"),
        "unload_model": ("models", "unload"),
    }
    if endpoint not in places:
        return None
    resource, method = places[endpoint]
    call = getattr(getattr(client, resource), method)

    async def send(request: Any) -> None:
        try:
            if endpoint == "session_heartbeat":
                await call(session_id=request.session_id)
            else:
                await call(request=request)
        except Exception as error:  # an answer that does not fit is no matter: the body is kept
            print(f"  {endpoint}: {type(error).__name__}", file=sys.stderr)

    return send


def _public_calls(address: str) -> dict[str, Any]:
    """Bodies that only the public clients build."""
    import tinker
    from tinker import types

    rest = tinker.RestClient(base_url=address, api_key="tml-recorded")
    path = "tinker://r/weights/x"
    recorded = {}

    def keep(case: str, endpoint: str, call: Any, ending: str) -> None:
        try:
            future = call()
            if hasattr(future, "result"):
                future.result(timeout=20)
        except Exception as error:
            print(f"  {case}: {type(error).__name__}: {error}", file=sys.stderr)
        recorded[case] = {"endpoint": endpoint, **_last(ending)}

    ttl = rest.set_checkpoint_ttl_from_tinker_path
    keep("set_checkpoint_ttl/value", "set_checkpoint_ttl", lambda: ttl(path, 3600), "/ttl")
    keep("set_checkpoint_ttl/none", "set_checkpoint_ttl", lambda: ttl(path, None), "/ttl")
    info = rest.get_weights_info_by_tinker_path
    keep("weights_info", "weights_info", lambda: info(path), "/weights_info")
    assign = rest.assign_session_project
    keep("assign_session_project", "assign_session_project", lambda: assign("S", "p"), "/project")
    for case, endpoint, build in request_cases.requests("0.36.0"):
        if endpoint == "search_sessions":
            request = build(types)
            keep(case, endpoint, lambda r=request: rest.search_sessions(r), "/search")
    service = tinker.ServiceClient(base_url=address, api_key="tml-recorded")
    service.create_sampling_client(base_model="m")
    keep("finish_session/none", "finish_session", lambda: service.close("success"), "/finish")
    service = tinker.ServiceClient(base_url=address, api_key="tml-recorded")
    service.create_sampling_client(base_model="m")
    close = service.close
    keep("finish_session/detail", "finish_session", lambda: close("errored", "why"), "/finish")
    return recorded


def _last(ending: str = "") -> dict[str, Any]:
    ignored = ("/telemetry", "/session_heartbeat") if ending else ()
    matching = [
        item
        for item in Capture.bodies
        if item[0].split("?")[0].endswith(ending) and not item[0].endswith(ignored or ("\0",))
    ]
    path, content_type, body = matching[-1]
    if "protobuf" in content_type:
        return {"path": path, "proto": base64.b64encode(body).decode()}
    return {"path": path, "json": body.decode()}


def _results(version: str) -> dict[str, str]:
    from tinker import types

    recorded = {}
    for kind, fields in result_cases.results(version):
        recorded[kind] = getattr(types, kind)(**fields).model_dump_json()
    if version == "0.4.1":
        recorded["SampleResponse"] = types.SampleResponse(
            **result_cases.SAMPLE_V04
        ).model_dump_json()
        recorded["ForwardBackwardOutput"] = types.ForwardBackwardOutput(
            **result_cases.PASS_V04
        ).model_dump_json()
    return recorded


def _proto_results() -> dict[str, Any]:
    """Protobuf results, with what the SDK's own reader makes of them."""
    import numpy as np
    from tinker.proto import response_conv
    from tinker.proto import tinker_public_pb2 as pb

    recorded = {}
    for case, message in {**_sample_messages(pb, np), **_pass_messages(pb, np)}.items():
        raw = message.SerializeToString(deterministic=True)
        if type(message).__name__ == "SampleResponse":
            view = _sample_view(response_conv.deserialize_sample_response(raw))
        else:
            view = _pass_view(response_conv.deserialize_forward_backward_output(raw))
        recorded[case] = {
            "kind": type(message).__name__,
            "proto": base64.b64encode(raw).decode(),
            "view": view,
        }
    return recorded


def _sample_messages(pb: Any, np: Any) -> dict[str, Any]:
    def topk(n: int, k: int) -> Any:
        ids = np.arange(n * k, dtype="<i4").reshape(n, k)
        values = -ids.astype("<f4")
        ids[0], values[0] = 0, -99999.0
        return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=n)

    tokens = np.array([1, 2, 2**31 - 1], "<i4").tobytes()
    logprobs = np.array([-0.5, np.nan, -np.inf], "<f4").tobytes()
    plain = pb.SampledSequence(stop_reason=1, tokens=tokens, logprobs=logprobs)
    f2 = np.array([[0.5, 1.5]], "<f4")
    return {
        "sample/plain": pb.SampleResponse(sequences=[plain]),
        "sample/empty": pb.SampleResponse(),
        "sample/no-logprobs": pb.SampleResponse(
            sequences=[pb.SampledSequence(tokens=tokens), pb.SampledSequence()]
        ),
        "sample/prompt": pb.SampleResponse(
            sequences=[plain],
            prompt_logprobs=np.array([np.nan, -1.5], "<f4").tobytes(),
            prompt_cache_hit_tokens=7,
        ),
        "sample/topk": pb.SampleResponse(
            sequences=[
                pb.SampledSequence(
                    tokens=tokens, logprobs=logprobs, topk_sampled_logprobs=topk(3, 2)
                )
            ],
            topk_prompt_logprobs=topk(4, 3),
        ),
        "sample/targets": pb.SampleResponse(
            sequences=[plain],
            target_prompt_logprobs=pb.Tensor(dense=f2.tobytes(), dtype=1, shape=[1, 2]),
        ),
        "sample/alternatives": pb.SampleResponse(
            sequences=[plain],
            prompt_alt_tokens=pb.PromptAltTokens(
                tokens=pb.Tensor(dense=np.array([[3, 4]], "<i4").tobytes(), dtype=3, shape=[1, 2]),
                logprobs=pb.Tensor(dense=f2.tobytes(), dtype=1, shape=[1, 2]),
            ),
        ),
    }


def _pass_messages(pb: Any, np: Any) -> dict[str, Any]:
    def batched(arrays: list[Any], dtype: int, trailing: list[int] = []) -> Any:  # noqa: B006
        offsets = np.cumsum([0, *[a.nbytes for a in arrays]]).astype("<i8")
        return pb.BatchedTensor(
            data=b"".join(a.tobytes() for a in arrays),
            offsets=offsets.tobytes(),
            dtype=dtype,
            trailing_shape=trailing,
        )

    f = [np.array([-0.5, np.nan], "<f4"), np.array([], "<f4"), np.array([1.5], "<f4")]
    i32 = [np.array([1], "<i4"), np.array([2, 3], "<i4"), np.array([], "<i4")]
    i64 = [np.array([2**40], "<i8"), np.array([], "<i8"), np.array([-1], "<i8")]
    two_d = [np.zeros((2, 3), "<f4"), np.ones((1, 3), "<f4"), np.zeros((0, 3), "<f4")]
    bf16 = [np.array([0x3F80], "<u2"), np.array([0xC020], "<u2"), np.array([], "<u2")]

    def output(**fields: Any) -> Any:
        record = pb.ArrayRecord(type_tag="ArrayRecord", num_datums=3, fields=fields)
        return pb.ForwardBackwardOutput(
            loss_fn_output_type="x:ArrayRecord",
            loss_fn_outputs=[record],
            metrics={"loss:sum": 1.25, "nan:mean": float("nan")},
        )

    return {
        "pass/float": output(logprobs=batched(f, 1)),
        "pass/int32": output(ids=batched(i32, 3)),
        "pass/int64": output(ids=batched(i64, 2)),
        "pass/two-d": output(logprobs=batched(two_d, 1, [3])),
        "pass/bfloat16": output(logprobs=batched(bf16, 4)),
        "pass/two-fields": output(a=batched(f, 1), b=batched(i64, 2)),
        "pass/no-fields": output(),
        "pass/no-records": pb.ForwardBackwardOutput(metrics={"a:sum": 1.0}),
        "pass/two-records": pb.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[
                pb.ArrayRecord(num_datums=3, fields={"logprobs": batched(f, 1)}),
                pb.ArrayRecord(num_datums=3, fields={"logprobs": batched(two_d, 1, [3])}),
            ],
        ),
        "pass/uncounted": pb.ForwardBackwardOutput(
            loss_fn_outputs=[pb.ArrayRecord(fields={"logprobs": batched(f, 1)})]
        ),
    }


def _plain(value: Any) -> Any:
    """Lists with NaN and infinities spelled as text, so that the file is valid JSON."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return repr(value)
    return value


def _tensor_view(tensor: Any) -> Any:
    if tensor is None:
        return None
    return {"data": _plain(tensor.tolist()), "dtype": str(tensor.dtype), "shape": tensor.shape}


def _sample_view(response: Any) -> dict[str, Any]:
    alternatives = response.prompt_alt_tokens
    return {
        "sequences": [
            {
                "stop_reason": str(item.stop_reason),
                "tokens": _plain(item.tokens),
                "logprobs": _plain(item.logprobs),
                "topk_logprobs": _plain(item.topk_logprobs),
            }
            for item in response.sequences
        ],
        "prompt_logprobs": _plain(response.prompt_logprobs),
        "topk_prompt_logprobs": _plain(response.topk_prompt_logprobs),
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        "target_prompt_logprobs": _tensor_view(response.target_prompt_logprobs),
        "prompt_alt_tokens": alternatives
        and [_tensor_view(alternatives.tokens), _tensor_view(alternatives.logprobs)],
    }


def _pass_view(output: Any) -> dict[str, Any]:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: _tensor_view(tensor) for name, tensor in item.items()}
            for item in output.loss_fn_outputs
        ],
        "metrics": {name: _plain(value) for name, value in output.metrics.items()},
    }


def _names() -> dict[str, list[str]]:
    """Every public name, and every public member of the public classes."""
    import inspect

    import tinker
    from tinker import types

    names = {"tinker": sorted(n for n in tinker.__all__)}
    hidden = {"annotations"}
    names["tinker.types"] = sorted(
        n
        for n, value in vars(types).items()
        if not n.startswith("_") and n not in hidden and not inspect.ismodule(value)
    )
    for name in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient"):
        client = getattr(tinker, name, None)
        if client is None:
            from tinker.lib.public_interfaces import rest_client

            client = getattr(rest_client, name, None)
        if client is not None:
            names[name] = sorted(n for n in dir(client) if not n.startswith("_"))
    return names


def _members() -> dict[str, list[str]]:
    """The fields and own methods of every public type."""
    import inspect

    import pydantic
    from tinker import types

    inherited = {*dir(pydantic.BaseModel), *dir(str)}
    members = {}
    for name in _names()["tinker.types"]:
        value = getattr(types, name)
        if not inspect.isclass(value) or value is str:
            continue
        found = {n for n in dir(value) if not n.startswith("_") and n not in inherited}
        found |= set(getattr(value, "model_fields", ()))
        if not issubclass(value, pydantic.BaseModel):
            parameters = inspect.signature(value).parameters
            found |= {n for n in parameters if not n.startswith("_")} - {"value", "names"}
        members[name] = sorted(
            found - {"module", "qualname", "type", "start", "boundary", "model_computed_fields"}
        )
    return members


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:] or ["0.4.1", "0.36.0"])
