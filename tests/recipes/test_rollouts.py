"""The file of rollouts: what was said at each step, whole on resume, bounded."""

from __future__ import annotations

import json

from tinkex.chat.detokenizer import pieces_of
from tinkex.recipes.rollouts import Rollout, RolloutLog


def said(step: int, group: int = 0, text: str = "aye") -> Rollout:
    return Rollout(
        step=step, group=group, prompt="Say it", text=text, tokens=[1, 2], logprobs=[-0.5, -0.25]
    )


def lines(log: RolloutLog) -> list[dict]:
    return [json.loads(line) for line in log.file.read_text().splitlines()]


def test_a_line_has_the_answer_and_what_it_earned(tmp_path):
    log = RolloutLog(tmp_path)
    log.write([said(0), said(0, group=1)])
    assert [(line["step"], line["group"]) for line in lines(log)] == [(0, 0), (0, 1)]
    names = "step group prompt text tokens pieces logprobs reward advantage snapshot".split()
    assert set(lines(log)[0]) == set(names)


def test_a_resumed_run_forgets_the_steps_it_will_repeat(tmp_path):
    log = RolloutLog(tmp_path)
    log.write(said(step) for step in range(5))
    with log.file.open("a") as file:
        file.write('{"step": 5, "te')
    assert [line["step"] for line in lines(RolloutLog(tmp_path, start_step=3))] == [0, 1, 2]


def test_a_full_file_grows_no_further_and_says_so(tmp_path, caplog):
    log = RolloutLog(tmp_path, max_bytes=1000)
    for step in range(100):
        log.write([said(step)])
    assert 0 < log.file.stat().st_size <= 1000
    assert caplog.text.count("is full") == 1


def test_pieces_joined_are_the_text_also_where_a_token_is_half_a_character():
    class Bytes:
        def decode(self, tokens):
            return bytes(tokens).decode(errors="replace")

    text = "aé漢!"
    pieces = pieces_of(Bytes(), list(text.encode()))
    assert "".join(pieces) == text
    assert pieces[1:3] == ["", "é"]
