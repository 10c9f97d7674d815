"""What a conversation is made of, before any template turns it into text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkex.errors import InvalidInputError

__all__ = ["ROLES", "Message", "Tool", "ToolCall"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT = {"type": "string"}
MAX_NAME = 256
"""Most characters of a function's name."""
MAX_DEPTH = 64
"""Most levels of lists and objects in the arguments of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """An assistant's wish to have a function called."""

    name: str
    arguments: str
    """A JSON object, as text: what travels in both APIs, so no number changes its spelling."""
    call_id: str = ""

    @classmethod
    def of(cls, name: str, arguments: Any) -> ToolCall | None:
        """A call that a model wrote; None when it cannot be told or sent back as one.

        Names and depths are those that a message may have. Half of a character (a lone surrogate,
        which JSON can spell) is no text that anyone can be sent.
        """
        if not isinstance(arguments, dict) or not 0 < len(name) <= MAX_NAME:
            return None
        if not _is_shallow(arguments):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return cls(name=name, arguments=text) if _is_text(name + text) else None

    def parsed(self) -> dict[str, Any]:
        """The arguments as a dict, which is what chat templates take.

        Raises:
            InvalidInputError: They are not a JSON object.
        """
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as exc:
            raise InvalidInputError(
                f"the arguments of the call to {self.name!r} are not JSON: {exc}",
                path="tool_calls",
            ) from exc
        if not isinstance(value, dict):
            raise InvalidInputError(
                f"the arguments of the call to {self.name!r} must be a JSON object, "
                f"got {type(value).__name__}",
                path="tool_calls",
            )
        if not _is_shallow(value):
            raise InvalidInputError(
                f"the arguments of the call to {self.name!r} have more than {MAX_DEPTH} levels of "
                "lists and objects in each other",
                path="tool_calls",
            )
        # Only an escape brings half of a character, and most arguments have none.
        if "\\u" in self.arguments and not _is_text(json.dumps(value, ensure_ascii=False)):
            raise InvalidInputError(
                f"the arguments of the call to {self.name!r} hold half of a character (a lone "
                "surrogate, such as \\ud800)",
                path="tool_calls",
            )
        return value


def _is_shallow(value: Any) -> bool:
    """Whether JSON is so deep at most that every part of the way can read and write it."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in layer]
        layer = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not layer:
            return True
    return False


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str = ""
    reasoning: str = ""
    """What the assistant thought before it spoke; empty for every other role."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Which call a `tool` message answers."""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """The dict that chat templates of transformers expect."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            # Qwen reads `reasoning_content`, gpt-oss `thinking`; a template ignores the other.
            fields["reasoning_content"] = fields["thinking"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.parsed()},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            fields["tool_call_id"] = self.tool_call_id
        if self.name:
            fields["name"] = self.name
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the assistant may ask for."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """A JSON schema of its arguments."""

    def text_arguments(self) -> set[str]:
        """Arguments that the schema declares to be texts."""
        listed = self.parameters.get("properties")
        properties = listed if isinstance(listed, dict) else {}
        return {
            name
            for name, schema in properties.items()
            if isinstance(schema, dict) and schema.get("type") == "string"
        }

    def outline(self) -> Tool:
        """The tool without its schema: a name and which arguments are texts, to read answers by."""
        texts = dict.fromkeys(self.text_arguments(), _TEXT)
        return Tool(name=self.name, parameters={"properties": texts})

    def for_template(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters) or {"type": "object", "properties": {}},
            },
        }
