"""The server's log: lines for people, or JSON objects; each names the request it belongs to.

The front door says which request is being answered (`answering`); what is logged meanwhile, on this
task or on a thread it starts, carries that id. Bodies, queries and keys are never logged.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

import orjson

answering: ContextVar[str] = ContextVar("answering", default="")
"""The id of the request that is being answered; empty outside of one."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        request_id = answering.get()
        return super().format(record) + (f" [{request_id}]" if request_id else "")


class JsonLines(logging.Formatter):
    """An object a line: at, level, logger, message, and where there is one, request_id."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := answering.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def set_up(level: str, log_format: str) -> None:
    """Log to stderr, in place of whatever the command line had set up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
