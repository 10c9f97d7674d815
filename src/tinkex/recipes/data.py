"""Read training data and say, row by row, what is wrong with it.

JSONL, JSON, CSV or a Hugging Face dataset id become lists of conversations, preference pairs or
prompts. A row that cannot be used is never dropped in silence: it is kept as a `BadRow` with its
line number and the reason. This module knows rows and messages; tokens are `render.py`'s business.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tinkex.errors import InvalidInputError

__all__ = [
    "CHAT_FORMS",
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
    messages: tuple[Message, ...] = ()
    """Ends with the assistant."""
    num_prompt: int = 0
    """The first messages that are a prompt: read, not learned, whoever speaks."""
    text: str = ""
    """Plain text instead of messages: learned as it is, without a chat template."""


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
        kinds: dict[str, list[BadRow]] = {}
        for bad in self.bad:  # Reasons that differ in their numbers only are of one kind.
            kinds.setdefault(re.sub(r"\d+", "0", bad.reason), []).append(bad)
        lines += [_reported(rows) for rows in list(kinds.values())[:limit]]
        if len(kinds) > limit:
            more = sum(map(len, list(kinds.values())[limit:]))
            lines.append(f"  ... and {more} more, for other reasons")
        return "\n".join(lines)


def _reported(rows: Sequence[BadRow]) -> str:
    """A line for rows that are not usable for the same kind of reason."""
    if len(rows) == 1:
        return f"  line {rows[0].line}: {rows[0].reason}"
    shown = ", ".join(str(bad.line) for bad in rows[:5])
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    such = "" if len({bad.reason for bad in rows}) == 1 else "such as: "
    return f"  lines {shown}{more}: {such}{rows[0].reason}"


def load_conversations(source: str | Path) -> Loaded[Conversation]:
    """Rows in any form of `CHAT_FORMS`, or with plain `text`."""
    return _load(source, _conversation)


def load_preferences(source: str | Path) -> Loaded[Preference]:
    """Rows with `prompt`, `chosen` and `rejected`, each text or messages."""
    return _load(source, _preference)


def load_prompts(source: str | Path | Iterable[Mapping[str, Any]]) -> Loaded[Prompt]:
    """Rows with `prompt`, `messages` or `instruction`; all fields reach the reward function."""
    if isinstance(source, str | Path):
        return _load(source, _prompt)
    return _parse("prompts", enumerate(source, 1), _prompt)


# ------------------------------------------------------------------------------ one row


def _conversation(line: int, row: Mapping[str, Any]) -> Conversation:
    form = next((form for form in CHAT_FORMS if all(name in row for name in form)), None)
    if form is None and "text" in row:
        return Conversation(line=line, text=_text(row["text"], "text"))
    if form is None:
        forms = ", ".join(" and ".join(f"'{name}'" for name in form) for form in CHAT_FORMS)
        raise _wrong(f"needs {forms}, or 'text'; has {_names(row)}")
    messages = CHAT_FORMS[form](row)
    if messages[-1]["role"] != "assistant":
        raise _wrong(
            f"ends with '{messages[-1]['role']}'; the last message must be the assistant's"
        )
    if messages[0]["role"] == "assistant":
        raise _wrong("begins with the assistant; there is nothing to answer")
    num_prompt = len(_prompt_messages(row["prompt"])) if form == PROMPT_AND_COMPLETION else 0
    return Conversation(line=line, messages=messages, num_prompt=num_prompt)


def _completed(row: Mapping[str, Any]) -> tuple[Message, ...]:
    prompt, completion = _prompt_messages(row["prompt"]), row["completion"]
    if not isinstance(completion, list):
        return (*prompt, {"role": "assistant", "content": _text(completion, "completion")})
    said = _messages(completion, "completion")
    if said[0]["role"] != "assistant":
        raise _wrong(f"'completion' must begin with the assistant, got '{said[0]['role']}'")
    return (*prompt, *said)


def _alpaca(row: Mapping[str, Any]) -> tuple[Message, ...]:
    answer = _text(row["output"], "output")
    return (*_instruction(row), {"role": "assistant", "content": answer})


def _instruction(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """`instruction`, with what it is about (`input`) below it, where there is any."""
    asked = _text(row["instruction"], "instruction")
    if row.get("input"):
        asked = f"{asked}\n\n{_text(row['input'], 'input')}"
    return (*_system(row), {"role": "user", "content": asked})


def _system(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if not row.get("system"):
        return ()
    return ({"role": "system", "content": _text(row["system"], "system")},)


_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Who speaks in ShareGPT's files, by the role that chat templates know."""


def _sharegpt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise _wrong(f"'conversations' must be a list of turns, got {_shown(turns)}")
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return _with_system(row, _messages(turns, "conversations"))
    messages = []
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, dict):
            raise _wrong(f"'{where}' must be an object with from and value, got {_shown(turn)}")
        speaker = turn.get("from")
        if speaker not in _SPEAKERS:
            raise _wrong(
                f"'{where}.from' must be one of {', '.join(_SPEAKERS)}, got {_shown(speaker)}"
            )
        text = _text(turn.get("value"), f"{where}.value")
        messages.append({"role": _SPEAKERS[speaker], "content": text})
    return _with_system(row, messages)


def _with_system(row: Mapping[str, Any], turns: Sequence[Message]) -> tuple[Message, ...]:
    """The turns with the row's system message before them; of two, it is not known which counts."""
    messages = (*_system(row), *turns)
    places = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if places not in ([], [0]):
        raise _wrong(
            f"has {len(places)} system messages, or one that is not the first; keep one, as "
            "'system' or as the first turn"
        )
    return messages


PROMPT_AND_COMPLETION = ("prompt", "completion")
CHAT_FORMS: Mapping[tuple[str, ...], Callable[[Mapping[str, Any]], tuple[Message, ...]]] = {
    ("messages",): lambda row: _messages(row["messages"], "messages"),
    ("conversations",): _sharegpt,
    PROMPT_AND_COMPLETION: _completed,
    ("instruction", "output"): _alpaca,
}
"""Fields of a row that is a conversation, and how it is read; the first that is there counts."""


def _preference(line: int, row: Mapping[str, Any]) -> Preference:
    if missing := [name for name in ("chosen", "rejected") if name not in row]:
        raise _wrong(f"needs 'chosen' and 'rejected'; '{missing[0]}' is missing, has {_names(row)}")
    asked = {name: _asked(row[name], name) for name in ("chosen", "rejected")}
    if "prompt" in row:
        prompt = _prompt_messages(row["prompt"])
    elif isinstance(row["chosen"], list):
        prompt = asked["chosen"]
    else:
        raise _wrong("needs 'prompt' when 'chosen' is text")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise _wrong("the prompt must end with the user's message")
    for name, before in asked.items():
        if before and before != prompt:
            other = "'prompt'" if "prompt" in row else "'chosen'"
            raise _wrong(f"'{name}' answers another prompt than {other}; both must answer one")
    chosen, rejected = (_answer(row[name], name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise _wrong("'chosen' and 'rejected' are the same")
    return Preference(line=line, prompt=prompt, chosen=chosen, rejected=rejected)


def _prompt(line: int, row: Mapping[str, Any]) -> Prompt:
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
    elif "prompt" in row:
        messages = _prompt_messages(row["prompt"])
    elif "instruction" in row:
        messages = _instruction(row)
    else:
        raise _wrong(f"needs 'prompt', 'messages' or 'instruction'; has {_names(row)}")
    if messages[-1]["role"] == "assistant":
        raise _wrong("ends with the assistant; there is nothing left to answer")
    return Prompt(line=line, messages=messages, row=dict(row))


def _prompt_messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": _text(value, "prompt")},)
    if not isinstance(value, list):
        raise _wrong(f"'prompt' must be text or a list of messages, got {_shown(value)}")
    return _messages(value, "prompt")


def _asked(value: Any, name: str) -> tuple[Message, ...]:
    """The messages before an answer; none where the answer stands alone."""
    return _messages(value, name)[:-1] if isinstance(value, list) else ()


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
        if item.get("tool_calls"):
            raise _wrong(
                f"'{where}.tool_calls' would be left out: recipes train on text. Write the call "
                "into 'content', as the model should say it"
            )
        if item.get("weight") not in (None, 1):
            raise _wrong(
                f"'{where}.weight' {_shown(item['weight'])} would be ignored: all turns of the "
                "assistant are learned, or the last one alone (--learn last). Leave it out"
            )
        content = _text(_joined(item.get("content")), f"{where}.content")
        messages.append({"role": item["role"], "content": content})
    return tuple(messages)


def _joined(content: Any) -> Any:
    """Content as text: chat APIs also write it as a list of parts, of which we know texts."""
    is_parts = isinstance(content, list) and content
    if is_parts and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


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
