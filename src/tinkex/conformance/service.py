"""Checks of transport, authentication, configuration, sessions and telemetry."""

from __future__ import annotations

import base64
import json
import time

from tinkex.conformance.probe import SDK_VERSION, Probe, shown
from tinkex.conformance.suite import Unsupported, check, expect
from tinkex.types import ClientConfigResponse


@check("1.5", "an error answer is JSON with a detail")
def error_body(probe: Probe) -> None:
    answer = probe.call("POST", "create_session", {"tags": 7, "sdk_version": SDK_VERSION})
    expect(400 <= answer.status_code < 500, "4xx for a wrong type", shown(answer))
    expect("detail" in answer.json(), "a JSON object with detail", shown(answer))


@check("1.6", "a 400 has a Content-Length above 0 and is not compressed")
def whole_400(probe: Probe) -> None:
    answer = probe.call("POST", "weights_info", {"tinker_path": "not-a-tinker-path"})
    if answer.status_code != 400:
        raise Unsupported(f"no 400 could be provoked, got {answer.status_code}")
    length = int(answer.headers.get("content-length", 0))
    expect(length > 0, "Content-Length above 0", dict(answer.headers))
    expect("content-encoding" not in answer.headers, "no Content-Encoding", dict(answer.headers))


@check("1.7", "a wrong key is refused with 401")
def wrong_key(probe: Probe) -> None:
    answer = probe.call(
        "GET", "get_server_capabilities", headers={"X-API-Key": "tml-certainly-not-a-key"}
    )
    if answer.is_success:
        raise Unsupported("the server takes any key")
    expect(answer.status_code == 401, "401", shown(answer))


@check("1.7", "auth/token exchanges a key for a JWT that ends in the future")
def token(probe: Probe) -> None:
    jwt = probe.ask("POST", "auth/token", {}).get("jwt", "")
    parts = str(jwt).split(".")
    expect(len(parts) == 3, "a JWT of three parts", jwt)
    claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    expect(claims.get("exp", 0) > time.time(), "exp in the future", claims)
    answer = probe.call("GET", "get_server_capabilities", headers={"X-API-Key": jwt})
    expect(answer.is_success, "the JWT accepted as X-API-Key", shown(answer))


@check("2.2", "healthz says ok")
def healthz(probe: Probe) -> None:
    answer = probe.ask("GET", "healthz")
    expect(answer.get("status") == "ok", '{"status": "ok"}', answer)


_FLAG_TYPES = {name: field.annotation for name, field in ClientConfigResponse.model_fields.items()}


@check("3.2", "client/config answers, with every flag of its type")
def client_config(probe: Probe) -> None:
    answer = probe.call("POST", "client/config", {"sdk_version": SDK_VERSION})
    # Not `ask`: stock clients cannot start without this endpoint, so its absence is a failure.
    expect(answer.is_success, "2xx: clients cannot start without it", shown(answer))
    for name, value in answer.json().items():
        if kind := _FLAG_TYPES.get(name):
            expect(type(value) is kind, f"{name} of type {kind.__name__}", {name: value})


@check("3.3", "client/dynamic_config answers")
def dynamic_config(probe: Probe) -> None:
    answer = probe.ask("POST", "client/dynamic_config", {"sdk_version": SDK_VERSION})
    interval = answer.get("refresh_interval_sec", 300)
    expect(isinstance(interval, int | float), "a number of seconds", answer)


@check("2.2", "capabilities list models by name")
def capabilities(probe: Probe) -> None:
    models = probe.ask("GET", "get_server_capabilities").get("supported_models")
    expect(isinstance(models, list) and bool(models), "a list of supported_models", models)
    assert isinstance(models, list)
    expect(all(isinstance(m.get("model_name"), str) for m in models), "model_name each", models)


@check("2.2", "a session begins, beats and ends")
def session(probe: Probe) -> None:
    session_id = probe.new_session()
    beat = {"session_id": session_id, "type": "session_heartbeat"}
    probe.ask("POST", "session_heartbeat", beat)
    body = {"reason": {"type": "success"}, "detail": None}  # an explicit null
    probe.ask("POST", f"sessions/{session_id}/finish", body)


@check("3.4", "a heartbeat of an unknown session is not accepted")
def unknown_heartbeat(probe: Probe) -> None:
    answer = probe.call(
        "POST", "session_heartbeat", {"session_id": "no-such", "type": "session_heartbeat"}
    )
    expect(answer.status_code in (404, 410), "410 or 404", shown(answer))


@check("3.5", "a sampling session is created and described")
def sampling_session(probe: Probe) -> None:
    described = probe.ask("GET", f"samplers/{probe.sampler}")
    expect(described.get("sampler_id") == probe.sampler, f"sampler_id {probe.sampler}", described)
    expect(described.get("base_model") == probe.model, f"base_model {probe.model}", described)


@check("6.5", "each process that joins a sampling session gets a counter of its own")
def join(probe: Probe) -> None:
    body = {"sampling_session_id": probe.sampler, "type": "join_sampling_session"}
    first, second = (
        probe.ask("POST", "join_sampling_session", body).get("client_counter") for _ in range(2)
    )
    expect(
        isinstance(first, int) and isinstance(second, int) and 0 < first != second > 0,
        "two different counters above 0",
        (first, second),
    )


@check("10", "telemetry is accepted")
def telemetry(probe: Probe) -> None:
    body = {
        "events": [
            {
                "event": "SESSION_START",
                "event_id": "00000000-0000-4000-8000-000000000001",
                "event_session_index": 0,
                "severity": "INFO",
                "timestamp": "2026-01-01T00:00:00Z",
            }
        ],
        "platform": "Linux",
        "sdk_version": SDK_VERSION,
        "session_id": probe.session_id,
    }
    answer = probe.ask("POST", "telemetry", body)
    expect(answer.get("status") == "accepted", '{"status": "accepted"}', answer)


@check("1.1", "an unknown path is 404")
def unknown_path(probe: Probe) -> None:
    answer = probe.call("GET", "no_such_endpoint")
    expect(answer.status_code == 404, "404", shown(answer))
