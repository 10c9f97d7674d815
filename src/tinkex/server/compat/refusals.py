"""How OpenAI and Anthropic say no: our error answers in the shape of the API that was called.

Every failure is first an answer of ours (`process.problems`); the path of the request decides whose
words it takes. That holds for what routes refuse and for what never reaches one: an unknown path, a
body too large, a quota that is spent.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from tinkex.server.guard.callers import ANTHROPIC, is_foreign

_MESSAGES = "/v1/messages"
# Not Content-Length, which is that of the body in our own words.
_KEPT_HEADERS = ("retry-after", "connection", "allow")

_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def in_their_words(path: str, ours: Response) -> Response:
    """An error answer as the API at `path` would give it; our own paths keep ours."""
    if not is_foreign(path):
        return ours
    error_of = anthropic_error if path.startswith((_MESSAGES, ANTHROPIC)) else openai_error
    return Response(
        orjson.dumps(error_of(ours)),
        status_code=ours.status_code,
        media_type="application/json",
        headers={name: ours.headers[name] for name in _KEPT_HEADERS if name in ours.headers},
    )


def openai_error(ours: Response) -> dict[str, Any]:
    body = orjson.loads(ours.body)
    default = "server_error" if ours.status_code >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": body["detail"],
            "type": _OPENAI.get(ours.status_code, default),
            "param": body.get("path"),
            "code": body["code"],
        }
    }


def anthropic_error(ours: Response) -> dict[str, Any]:
    body = orjson.loads(ours.body)
    path, text = body.get("path"), body["detail"]
    default = "api_error" if ours.status_code >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {
            "type": _ANTHROPIC.get(ours.status_code, default),
            "message": text if not path or text.startswith(path) else f"{path}: {text}",
        },
    }
