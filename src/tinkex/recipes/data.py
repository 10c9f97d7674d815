"""Read training data and say, row by row, what is wrong with it.

JSONL, JSON, CSV or a Hugging Face dataset id become lists of conversations, preference pairs or
prompts. A row that cannot be used is never dropped in silence: it is kept as a `BadRow` with its
line number and the reason. This module knows rows and messages; tokens are `render.py`'s business.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tinkex.errors import InvalidInputError

__all__ = [
    "BadRow",
    "Conversation",
    "Loaded",
    "Message",
    "Preference",
    "Prompt",
    "check_source",
    "load_conversations",
    "load_preferences",
    "load_prompts",
]

Message = Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    line: int
    """Line of the file, from 1; row of the dataset where there are no lines."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    line: int
    messages: tuple[Message, ...]
    """Ends with the assistant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    line: int
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    line: int
    messages: tuple[Message, ...]
    """Ends with the user."""
    row: Mapping[str, Any]
    """The whole row, for the reward function."""


@dataclass(kw_only=True)
class Loaded(Generic[T]):
    """The rows of a source: usable ones, and the others with their reasons."""

    source: str
    rows: list[T]
    bad: list[BadRow] = field(default_factory=list)

    def report(self, limit: int = 10) -> str:
        """A few lines for a person: how many rows are usable and why the others are not."""
        lines = [f"{self.source}: {len(self.rows)} usable rows, {len(self.bad)} not usable"]
        lines += [f"  line {bad.line}: {bad.reason}" for bad in self.bad[:limit]]
        if len(self.bad) > limit:
            lines.append(f"  ... and {len(self.bad) - limit} more")
        return "\n".join(lines)


def load_conversations(source: str | Path) -> Loaded[Conversation]:
    """Rows with `messages`, or with `prompt` and `completion`."""
    return _load(source, _conversation)


def load_preferences(source: str | Path) -> Loaded[Preference]:
    """Rows with `prompt`, `chosen` and `rejected`, each text or messages."""
    return _load(source, _preference)


def load_prompts(source: str | Path | Iterable[Mapping[str, Any]]) -> Loaded[Prompt]:
    """Rows with `prompt` or `messages`; all other fields reach the reward function."""
    if isinstance(source, str | Path):
        return _load(source, _prompt)
    return _parse("prompts", enumerate(source, 1), _prompt)


# ------------------------------------------------------------------------------ one row


def _conversation(line: int, row: Mapping[str, Any]) -> Conversation:
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
    elif "prompt" in row and "completion" in row:
        messages = _prompt_messages(row["prompt"]) + (
            {"role": "assistant", "content": _answer(row["completion"], "completion")},
        )
    else:
        raise _wrong(f"needs 'messages', or 'prompt' and 'completion'; has {_names(row)}")
    if messages[-1]["role"] != "assistant":
        raise _wrong(
            f"ends with '{messages[-1]['role']}'; the last message must be the assistant's"
        )
    if messages[0]["role"] == "assistant":
        raise _wrong("begins with the assistant; there is nothing to answer")
    return Conversation(line=line, messages=messages)


def _preference(line: int, row: Mapping[str, Any]) -> Preference:
    if missing := [name for name in ("chosen", "rejected") if name not in row]:
        raise _wrong(f"needs 'chosen' and 'rejected'; '{missing[0]}' is missing, has {_names(row)}")
    if "prompt" in row:
        prompt = _prompt_messages(row["prompt"])
    elif isinstance(row["chosen"], list):
        prompt = _messages(row["chosen"], "chosen")[:-1]
    else:
        raise _wrong("needs 'prompt' when 'chosen' is text")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise _wrong("the prompt must end with the user's message")
    chosen, rejected = (_answer(row[name], name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise _wrong("'chosen' and 'rejected' are the same")
    return Preference(line=line, prompt=prompt, chosen=chosen, rejected=rejected)


def _prompt(line: int, row: Mapping[str, Any]) -> Prompt:
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
    elif "prompt" in row:
        messages = _prompt_messages(row["prompt"])
    else:
        raise _wrong(f"needs 'prompt' or 'messages'; has {_names(row)}")
    if messages[-1]["role"] == "assistant":
        raise _wrong("ends with the assistant; there is nothing left to answer")
    return Prompt(line=line, messages=messages, row=dict(row))


def _prompt_messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": _text(value, "prompt")},)
    if not isinstance(value, list):
        raise _wrong(f"'prompt' must be text or a list of messages, got {_shown(value)}")
    return _messages(value, "prompt")


def _answer(value: Any, name: str) -> str:
    """An answer is text, or messages of which the last one counts."""
    if isinstance(value, list):
        last = _messages(value, name)[-1]
        if last["role"] != "assistant":
            raise _wrong(f"'{name}' must end with the assistant's message, got '{last['role']}'")
        return last["content"]
    return _text(value, name)


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(f"'{name}' must be a list of messages, got {_shown(value)}")
    messages = []
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(item, dict):
            raise _wrong(f"'{where}' must be an object with role and content, got {_shown(item)}")
        if item.get("role") not in ("system", "user", "assistant", "tool"):
            raise _wrong(
                f"'{where}.role' must be system, user, assistant or tool, "
                f"got {_shown(item.get('role'))}"
            )
        content = _text(item.get("content"), f"{where}.content")
        messages.append({"role": item["role"], "content": content})
    return tuple(messages)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(f"'{name}' must be text, got {_shown(value)}")
    if not value.strip():
        raise _wrong(f"'{name}' is empty")
    return value


def _wrong(reason: str) -> InvalidInputError:
    return InvalidInputError(reason)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(f"'{name}'" for name in row) or "no fields"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# ------------------------------------------------------------------------------ sources


def _load(source: str | Path, parse: Callable[[int, Mapping[str, Any]], T]) -> Loaded[T]:
    loaded = _parse(str(source), _rows(source), parse)
    if not loaded.rows:
        raise InvalidInputError(f"No usable row.\n{loaded.report()}")
    return loaded


def _parse(
    source: str, rows: Iterable[tuple[int, Any]], parse: Callable[[int, Mapping[str, Any]], T]
) -> Loaded[T]:
    loaded: Loaded[T] = Loaded(source=source, rows=[])
    for line, row in rows:
        try:
            if isinstance(row, InvalidInputError):
                raise row
            if not isinstance(row, Mapping):
                raise _wrong(f"must be an object, got {_shown(row)}")
            loaded.rows.append(parse(line, row))
        except InvalidInputError as exc:
            loaded.bad.append(BadRow(line=line, reason=str(exc)))
    return loaded


def check_source(source: str | Path) -> None:
    """Check that a source exists and how it is read, without reading it.

    Raises:
        InvalidInputError: There is none.
    """
    _reader(source)


def _rows(source: str | Path) -> Iterator[tuple[int, Any]]:
    return _reader(source)()


def _reader(source: str | Path) -> Callable[[], Iterator[tuple[int, Any]]]:
    path = Path(source)
    if path.is_file():
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise InvalidInputError(
                f"{path} ends in '{path.suffix}'; known are {', '.join(_READERS)}."
            )
        return partial(reader, path)
    if path.suffix.lower() in _READERS or path.is_absolute() or str(source).startswith("."):
        raise InvalidInputError(f"There is no file {path}. Check the name and the folder.")
    return partial(_hub_rows, str(source))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as exc:
                yield number, _wrong(f"not JSON: {exc}")


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as exc:
        raise InvalidInputError(
            f"{path} is not JSON: {exc}. For a row per line name it .jsonl."
        ) from exc
    if not isinstance(value, list):
        raise InvalidInputError(f"{path} must hold a list of rows, got {_shown(value)}.")
    yield from enumerate(value, 1)


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        reader = csv.DictReader(text, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        for row in reader:
            extra = row.pop(None, None)
            if extra is not None:
                yield reader.line_num, _wrong(f"{len(extra)} more cells than the header has names")
            else:
                yield (
                    reader.line_num,
                    {name: cell for name, cell in row.items() if cell is not None},
                )


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}


def _hub_rows(name: str) -> Iterator[tuple[int, Any]]:
    """Rows of a dataset on the Hugging Face hub, `ORG/NAME` or `ORG/NAME:SPLIT`."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]
    except ImportError as exc:
        raise InvalidInputError(
            f"There is no file '{name}'. If it is a Hugging Face dataset: pip install datasets."
        ) from exc
    dataset, _, split = name.partition(":")
    return enumerate(load_dataset(dataset, split=split or "train"), 1)


def split_off(rows: Sequence[T], share: float, *, at_most: int = 200) -> tuple[list[T], list[T]]:
    """Hold out every n-th row for evaluation. Depends on the order only: a resume sees the same."""
    num_held = min(at_most, int(len(rows) * share))
    if num_held < 1:
        return list(rows), []
    stride = len(rows) / num_held
    held = {int(index * stride) for index in range(num_held)}
    return (
        [row for index, row in enumerate(rows) if index not in held],
        [row for index, row in enumerate(rows) if index in held],
    )
