"""What the loaders accept, and what they say about rows they cannot use."""

from __future__ import annotations

import json
import sys
import types

import pytest

from tinkex.errors import InvalidInputError
from tinkex.recipes.data import (
    BadRow,
    Loaded,
    load_conversations,
    load_preferences,
    load_prompts,
    split_off,
)


def write(tmp_path, name, *lines):
    path = tmp_path / name
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def test_messages_and_prompt_completion_rows_both_become_conversations(tmp_path):
    path = write(
        tmp_path,
        "data.jsonl",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "c", "completion": "d"},
    )
    loaded = load_conversations(path)
    assert [[m["content"] for m in row.messages] for row in loaded.rows] == [["a", "b"], ["c", "d"]]
    assert loaded.bad == []


def test_a_completion_of_several_messages_is_kept_whole(tmp_path):
    turns = [("assistant", "2+2?"), ("tool", "4"), ("assistant", "It is four.")]
    completion = [{"role": role, "content": content} for role, content in turns]
    asked = [{"role": "user", "content": "Again?"}, *completion]
    path = write(
        tmp_path,
        "data.jsonl",
        {"prompt": "What is it?", "completion": completion},
        {"prompt": "What is it?", "completion": asked},
    )
    loaded = load_conversations(path)
    assert said(loaded.rows[0]) == [("user", "What is it?"), *turns]
    assert [bad.reason for bad in loaded.bad] == [
        "'completion' must begin with the assistant, got 'user'"
    ]


def said(row):
    return [(message["role"], message["content"]) for message in row.messages]


def test_alpaca_rows_ask_the_instruction_with_its_input_below(tmp_path):
    path = write(
        tmp_path,
        "alpaca.json",
        json.dumps(
            [
                {"instruction": "Add.", "input": "1 and 2", "output": "3"},
                {"instruction": "Greet.", "input": "", "output": "Hi", "system": "Be kind."},
            ]
        ),
    )
    first, second = load_conversations(path).rows
    assert said(first) == [("user", "Add.\n\n1 and 2"), ("assistant", "3")]
    assert said(second) == [("system", "Be kind."), ("user", "Greet."), ("assistant", "Hi")]
    (prompt, _) = load_prompts(path).rows
    assert prompt.messages == ({"role": "user", "content": "Add.\n\n1 and 2"},)
    assert prompt.row["output"] == "3"


def test_sharegpt_rows_become_conversations(tmp_path):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    named = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    path = write(
        tmp_path,
        "share.jsonl",
        {"conversations": [{"from": "system", "value": "s"}, *turns], "id": 7},
        {"conversations": turns, "system": "t"},
        {"conversations": named},
    )
    first, second, third = load_conversations(path).rows
    assert said(first) == [("system", "s"), ("user", "a"), ("assistant", "b")]
    assert said(second) == [("system", "t"), ("user", "a"), ("assistant", "b")]
    assert said(third) == [("user", "c"), ("assistant", "d")]


def test_plain_text_and_content_in_parts_are_read(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = write(
        tmp_path,
        "data.jsonl",
        {"text": "Once upon a time"},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]},
    )
    first, second = load_conversations(path).rows
    assert (first.text, first.messages) == ("Once upon a time", ())
    assert said(second) == [("user", "ab"), ("assistant", "c")]


def test_a_reason_is_told_once_for_all_rows_that_it_holds_for(tmp_path):
    """The same reason was printed ten times, and the others not at all."""
    rows = [{"question": "x"}] * 12 + [{"prompt": "x", "completion": ""}]
    path = write(tmp_path, "data.jsonl", {"prompt": "a", "completion": "b"}, *rows)
    lines = load_conversations(path).report().splitlines()
    assert lines[0].endswith("1 usable rows, 13 not usable")
    assert lines[1].startswith("  lines 2, 3, 4, 5, 6 and 7 more: needs 'messages'")
    assert lines[2:] == ["  line 14: 'completion' is empty"]


def test_reasons_that_differ_in_a_number_are_told_with_one_example():
    bad = [BadRow(line=line, reason=f"{line}00 tokens, more than max_length 64") for line in (3, 5)]
    report = Loaded(source="x", rows=[], bad=bad).report()
    assert "  lines 3, 5: such as: 300 tokens, more than max_length 64" in report


def test_csv_and_json_hold_the_same_rows_as_jsonl(tmp_path):
    rows = [{"prompt": "one, two", "completion": "three\nfour"}, {"prompt": "x", "completion": "y"}]
    jsonl = write(tmp_path, "a.jsonl", *rows)
    as_json = write(tmp_path, "a.json", json.dumps(rows))
    as_csv = write(tmp_path, "a.csv", "prompt,completion", '"one, two","three\nfour"', "x,y")
    expected = [row.messages for row in load_conversations(jsonl).rows]
    assert [row.messages for row in load_conversations(as_json).rows] == expected
    assert [row.messages for row in load_conversations(as_csv).rows] == expected


BAD = [
    ("{", "not JSON"),
    ("[1]", "must be an object"),
    (
        {"question": "x"},
        "needs 'messages', 'conversations', 'prompt' and 'completion', 'instruction' and "
        "'output', or 'text'; has 'question'",
    ),
    ({"text": " "}, "'text' is empty"),
    ({"instruction": "x", "output": None}, "'output' must be text, got None"),
    ({"conversations": [{"from": "narrator", "value": "x"}]}, "'conversations[0].from' must be"),
    ({"conversations": [{"from": "human"}]}, "'conversations[0].value' must be text"),
    ({"conversations": "x"}, "'conversations' must be a list of turns"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "'messages[0].content' must be text",
    ),
    ({"prompt": "x", "completion": ""}, "'completion' is empty"),
    ({"prompt": "x", "completion": 3}, "'completion' must be text, got 3"),
    ({"messages": []}, "'messages' must be a list of messages"),
    ({"messages": ["x"]}, "'messages[0]' must be an object"),
    ({"messages": [{"role": "me", "content": "x"}]}, "'messages[0].role' must be"),
    ({"messages": [{"role": "user", "content": None}]}, "'messages[0].content' must be text"),
    ({"messages": [{"role": "user", "content": "x"}]}, "the last message must be the assistant's"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "begins with the assistant"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_bad_row_is_reported_with_its_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path, "data.jsonl", {"prompt": "a", "completion": "b"}, "", row)
    loaded = load_conversations(path)
    assert len(loaded.rows) == 1
    assert [bad.line for bad in loaded.bad] == [3]
    assert reason in loaded.bad[0].reason
    assert f"line 3: {loaded.bad[0].reason}" in loaded.report()


def test_a_csv_row_with_too_many_cells_is_reported(tmp_path):
    path = write(tmp_path, "a.csv", "prompt,completion", "a,b", "c,d,e")
    loaded = load_conversations(path)
    assert [(bad.line, bad.reason) for bad in loaded.bad] == [
        (3, "1 more cells than the header has names")
    ]


def test_a_file_without_a_usable_row_is_an_error_that_shows_why(tmp_path):
    path = write(tmp_path, "data.jsonl", {"question": "x"})
    with pytest.raises(InvalidInputError, match="line 1: needs 'messages'"):
        load_conversations(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [("missing.jsonl", "There is no file"), ("./x", "There is no file"), ("data.xml", "known are")],
)
def test_a_source_that_cannot_be_read_says_so(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.xml").write_text("x")
    with pytest.raises(InvalidInputError, match=message):
        load_conversations(source)


def test_preferences_share_a_prompt_and_differ_in_the_answer(tmp_path):
    def chat(answer):
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]

    path = write(
        tmp_path,
        "p.jsonl",
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"chosen": chat("good"), "rejected": chat("bad")},
        {"prompt": "q", "chosen": "same", "rejected": "same"},
        {"prompt": "q", "chosen": "x"},
    )
    loaded = load_preferences(path)
    assert [(p.prompt[0]["content"], p.chosen, p.rejected) for p in loaded.rows] == [
        ("q", "good", "bad")
    ] * 2
    assert [bad.line for bad in loaded.bad] == [3, 4]
    assert "'rejected' is missing" in loaded.bad[1].reason


ASKED = {"role": "user", "content": "q"}
OTHER = {"role": "user", "content": "another"}
SAID = {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"function": {"name": "f"}}]}


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in said]


@pytest.mark.parametrize(
    ("load", "row", "reason"),
    [
        (load_conversations, {"messages": [ASKED, CALL]}, "'messages[1].tool_calls' would be left"),
        (
            load_conversations,
            {"messages": [ASKED, {**SAID, "weight": 0}, ASKED, {**SAID, "weight": 1}]},
            "'messages[1].weight' 0 would be ignored",
        ),
        (
            load_prompts,
            {"messages": [ASKED, CALL, ASKED]},
            "'messages[1].tool_calls' would be left",
        ),
        (
            load_conversations,
            {
                "conversations": turns(
                    ("system", "x"), ("system", "y"), ("human", "q"), ("gpt", "a")
                )
            },
            "has 2 system messages",
        ),
        (
            load_conversations,
            {"system": "x", "conversations": turns(("system", "y"), ("human", "q"), ("gpt", "a"))},
            "has 2 system messages",
        ),
        (
            load_preferences,
            {"chosen": [ASKED, SAID], "rejected": [OTHER, {**SAID, "content": "b"}]},
            "'rejected' answers another prompt than 'chosen'",
        ),
        (
            load_preferences,
            {"prompt": "q", "chosen": [OTHER, SAID], "rejected": "b"},
            "'chosen' answers another prompt than 'prompt'",
        ),
    ],
)
def test_what_would_be_left_out_or_mixed_up_is_refused_with_its_line(tmp_path, load, row, reason):
    good = {"prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"}
    loaded = load(write(tmp_path, "mixed.jsonl", good, row))
    assert [bad.line for bad in loaded.bad] == [2]
    assert reason in loaded.bad[0].reason
    assert len(loaded.rows) == 1


def test_prompts_keep_the_whole_row_for_the_reward():
    loaded = load_prompts([{"prompt": "2+2?", "answer": 4}, {"answer": 5}])
    assert loaded.rows[0].row["answer"] == 4
    assert loaded.bad[0].line == 2


def test_held_out_rows_and_the_others_are_all_the_rows():
    train, held = split_off(list(range(100)), 0.1)
    assert len(held) == 10
    assert sorted(train + held) == list(range(100))
    assert split_off([1, 2, 3], 0.1) == ([1, 2, 3], [])


def test_a_dataset_id_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInputError, match="pip install datasets"):
        load_conversations("org/name")


def test_a_dataset_id_names_its_split_after_a_colon(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [{"prompt": "a", "completion": "b"}, {"prompt": "a"}]

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    loaded = load_conversations("org/name:validation")
    assert (len(loaded.rows), loaded.bad[0].line) == (1, 2)
    load_conversations("org/name")
    assert asked == [("org/name", "validation"), ("org/name", "train")]
