"""The page docs/endpoints.md: every call and every request, from the table that both sides read."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from tinkex.contract import cost
from tinkex.contract.cost import Cost

HEAD = """# Endpoints

Every call of the protocol and every field of its request, with the bounds that the SDK and the
server refuse by. What the calls mean is in [the wire](wire.md); a running server shows the same at
`/docs`. *Ordered* calls carry `model_id` and `seq_id` and run in that order; a call that *changes
state* is replayed after a crash; one that runs *alone* waits for what came before it. Bodies are
*small* (1 MiB), *medium* (16 MiB), *large* and *file* (the server's `max_body_bytes`), or an
*upload* (`max_upload_bytes`).
"""
_SIZES = {
    cost.SMALL.sent_bytes: "small",
    cost.MEDIUM.sent_bytes: "medium",
    cost.LARGE.sent_bytes: "large",
    cost.FILE.sent_bytes: "file",
    cost.UPLOAD.sent_bytes: "upload",
}


def _size(limit: Cost) -> str:
    return _SIZES[limit.sent_bytes]


def endpoints_page() -> str:
    from tinkex.wire.endpoints import ENDPOINTS

    lines = [
        HEAD,
        "| name | call | request | answer | body | in order |",
        "|---|---|---|---|---|---|",
    ]
    for row in ENDPOINTS.values():
        words = ("ordered", "changes state", "alone")
        flags = (row.is_ordered, row.changes_state, row.is_barrier)
        order = ", ".join(word for word, is_so in zip(words, flags, strict=True) if is_so)
        answer = _name(row.result) + (f" of {_name(row.promised)}" if row.promised else "")
        lines.append(
            f"| `{row.name}` | {row.method} `{row.path}` | {_name(row.request)} | {answer} | "
            f"{_size(row.limit) if row.request or row.limit.files else ''} | {order} |"
        )
    requests = {row.request.__name__: row.request for row in ENDPOINTS.values() if row.request}
    parts = ["\n".join(lines) + "\n", "## Requests\n"]
    shown: set[str] = set()
    for name in sorted(requests):
        schema = TypeAdapter(requests[name]).json_schema(mode="validation")
        definitions = schema.get("$defs", {})
        for part, found in [(name, schema), *sorted(definitions.items())]:
            if part not in shown and found.get("properties"):
                shown.add(part)
                parts.append(_message(part, found))
    return "\n".join(parts)


def _message(name: str, schema: dict[str, Any]) -> str:
    text = " ".join(schema.get("description", "").split()).replace("|", "\\|")
    lines = [f"### {name}\n", *([f"{text}\n"] if text else []), "| field | value |", "|---|---|"]
    for field, found in schema["properties"].items():
        needed = " (required)" if field in schema.get("required", ()) else ""
        lines.append(f"| `{field}`{needed} | {_words(found)} |")
    return "\n".join(lines) + "\n"


def _words(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_words(choice) for choice in choices))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kinds = schema.get("type", "anything")
    kind = kinds if isinstance(kinds, str) else " or ".join(kinds)
    if kind == "array":
        return f"{_most(schema, 'maxItems')}items, each {_words(schema.get('items', {}))}"
    if kind == "object":
        return str(schema.get("title") or f"{_most(schema, 'maxProperties')}fields")
    if kind == "string":
        return f"text{_limit(schema, 'maxLength', ', at most {} characters')}"
    least = _limit(schema, "minimum", ", from {}") + _limit(
        schema, "exclusiveMinimum", ", above {}"
    )
    most = _limit(schema, "maximum", " to {}") + _limit(schema, "exclusiveMaximum", ", below {}")
    return f"{kind}{least}{most}"


def _most(schema: dict[str, Any], name: str) -> str:
    return f"at most {schema[name]:,} " if name in schema else ""


def _limit(schema: dict[str, Any], name: str, form: str) -> str:
    return form.format(f"{schema[name]:,}") if name in schema else ""


def _name(kind: Any) -> str:
    return "" if kind is None else f"`{kind.__name__}`"
