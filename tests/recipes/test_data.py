"""What the loaders accept, and what they say about rows they cannot use."""

from __future__ import annotations

import json
import sys
import types

import pytest

from tinkex.errors import InvalidInputError
from tinkex.recipes.data import load_conversations, load_preferences, load_prompts, split_off


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
    ({"text": "x"}, "needs 'messages', or 'prompt' and 'completion'; has 'text'"),
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
    path = write(tmp_path, "data.jsonl", {"text": "x"})
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
