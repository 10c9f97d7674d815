"""What a client sends is a declared message, written by `wire`: the goldens hold those bytes."""

import ast
from pathlib import Path

import pytest

import tinkex
from tinkex.client.http.call import Call
from tinkex.errors import InvalidInputError
from tinkex.types import SessionHeartbeatRequest

ROOT = Path(tinkex.__file__).parent
SOURCES = [*(ROOT / "client").rglob("*.py"), *ROOT.glob("*.py")]
# `Call.to` makes every call; the backends pass on the bytes that a call carries.
MAY_MAKE_CALLS = {"client/http/call.py"}
HTTP = {"post", "put", "patch", "request", "stream"}
MAY_PASS_CONTENT = {"client/http/backends.py", "client/http/transport.py"}


def bypasses(path: str, source: str) -> list[str]:
    """The places of a module that could send bytes which no declared message was written to."""
    places = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if (
            name == "Body"
            or (name == "Call" and path not in MAY_MAKE_CALLS)
            or (name in HTTP and {"json", "data", "files"} & given.keys())
            or (name in HTTP and "content" in given and path not in MAY_PASS_CONTENT)
        ):
            places.append(f"{path}:{node.lineno}: {ast.unparse(node)[:100]}")
    return places


def test_no_call_of_the_client_bypasses_the_declared_messages():
    found = [
        place
        for source in SOURCES
        for place in bypasses(str(source.relative_to(ROOT)), source.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'Call(method="POST", path="cancel_future", body=body)',
        'wire.Body(orjson.dumps({"request_id": "r"}), JSON)',
        'client.post(url, json={"pid": 1})',
        "client.post(url, content=orjson.dumps(fields))",
    ],
)
def test_a_bypass_is_seen(source: str):
    assert bypasses("client/session/holder.py", source)


def test_a_call_refuses_what_its_endpoint_does_not_declare():
    with pytest.raises(
        InvalidInputError, match="cancel_future takes CancelFutureRequest, got dict"
    ):
        Call.to("cancel_future", {"request_id": "r"})
    with pytest.raises(InvalidInputError, match="cancel_future takes CancelFutureRequest"):
        Call.to("cancel_future", SessionHeartbeatRequest(session_id="S"))
