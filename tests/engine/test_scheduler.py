"""Who runs next, decided without tensors."""

from __future__ import annotations

import pytest

from tinkex.engine.loop.fair_share import FairShare
from tinkex.engine.sample.kv_cache import BlockPool
from tinkex.engine.sample.scheduler import Chunk, Scheduler, SchedulerConfig, Seq
from tinkex.errors import ConfigError


def make(num_blocks: int = 16, block_size: int = 4, **config: int) -> Scheduler:
    return Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, block_size))


def seq(num_tokens: int, first: int = 0, version: str = "") -> Seq:
    tokens = list(range(first, first + num_tokens))
    return Seq(version=version, tokens=tokens, num_reusable=num_tokens)


def step(scheduler: Scheduler) -> list[Chunk]:
    """One pass: everything planned is computed, and each completed sequence gains a token."""
    plan = scheduler.plan()
    for chunk in plan:
        complete = chunk.completes
        scheduler.done(chunk)
        if complete:
            chunk.seq.tokens.append(0)
    return plan


def shape(plan: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.length) for chunk in plan]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode():
    scheduler = make(max_pass_tokens=8)
    scheduler.add(seq(3))
    step(scheduler)
    scheduler.add(seq(16, first=100))
    assert shape(step(scheduler)) == [(3, 1), (0, 7)]
    assert shape(step(scheduler)) == [(4, 1), (7, 7)]
    assert shape(step(scheduler)) == [(5, 1), (14, 2)]
    assert shape(step(scheduler)) == [(6, 1), (16, 1)]


def test_a_shared_prefix_is_computed_once():
    scheduler = make()
    scheduler.add(seq(10))
    step(scheduler)
    second = seq(10)
    scheduler.add(second)
    assert shape(step(scheduler)) == [(10, 1), (8, 2)]
    assert second.num_hit == 8


def test_the_last_prompt_token_is_always_computed():
    scheduler = make()
    scheduler.add(seq(8))
    step(scheduler)
    scheduler.add(seq(8))
    assert shape(scheduler.plan())[1] == (4, 4)


def test_equal_prompts_that_arrive_together_are_computed_once():
    scheduler = make()
    twins = [seq(10), seq(10), seq(6)]
    for s in twins:
        scheduler.add(s)
    assert shape(step(scheduler)) == [(0, 10)]
    assert shape(step(scheduler)) == [(10, 1), (8, 2), (4, 2)]
    assert [s.num_hit for s in twins] == [0, 8, 4]
    for s in twins:
        scheduler.remove(s)
    assert scheduler.pool.num_available == 16


def test_another_adapter_version_shares_nothing():
    scheduler = make()
    scheduler.add(seq(8, version="a"))
    step(scheduler)
    scheduler.add(seq(8, version="b"))
    assert shape(scheduler.plan())[1] == (0, 8)


def test_tokens_that_must_be_scored_are_not_taken_from_the_cache():
    scheduler = make()
    scheduler.add(seq(12))
    step(scheduler)
    scored = seq(12)
    scored.num_reusable = 5
    scheduler.add(scored)
    assert shape(scheduler.plan())[1] == (4, 8)


def test_admission_waits_for_memory_and_keeps_the_order():
    scheduler = make(num_blocks=4)
    first, big, small = seq(7), seq(9, first=50), seq(2, first=90)
    for s in (first, big, small):
        scheduler.add(s)
    step(scheduler)
    assert scheduler.running == [first]
    scheduler.remove(first)
    step(scheduler)
    assert scheduler.running == [big]
    assert list(scheduler.waiting) == [small]


def test_the_youngest_is_preempted_and_returns_first():
    scheduler = make(num_blocks=4)
    old, young, later = seq(4), seq(4, first=50), seq(4, first=90)
    for s in (old, young, later):
        scheduler.add(s)
    for _ in range(6):
        step(scheduler)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young, later]
    assert scheduler.num_preempted == 1
    scheduler.remove(old)
    assert len(young.tokens) > 5
    plan = scheduler.plan()
    assert plan[0].seq is young
    assert plan[0].completes


def test_every_sequence_finishes_however_small_the_memory():
    """No deadlock and no lost block: 9 sequences of up to 12 tokens through 5 blocks of 4."""
    scheduler = make(num_blocks=5, max_pass_tokens=3)
    todo = [seq(3 + i % 3, first=20 * i) for i in range(9)]
    for s in todo:
        scheduler.add(s)
    for _ in range(1000):
        for s in [s for s in scheduler.running if len(s.tokens) >= 12]:
            scheduler.remove(s)
        if not scheduler:
            break
        assert step(scheduler)
    assert len(scheduler) == 0
    assert scheduler.pool.num_available == 5


def test_followers_share_full_blocks_and_copy_the_partial_one():
    scheduler = make()
    leader = seq(6)
    leader.followers = [seq(6), seq(6)]
    scheduler.add(leader)
    step(scheduler)
    forks = scheduler.fork(leader)
    assert [fork.seq.blocks[0] for fork in forks] == [leader.blocks[0]] * 2
    assert [fork.copy[0] for fork in forks] == [leader.blocks[1]] * 2
    assert len({fork.copy[1] for fork in forks} | {leader.blocks[1]}) == 3
    for fork in forks:
        fork.seq.tokens.append(1)
    assert shape(scheduler.plan()) == [(6, 1)] * 3


def test_a_follower_without_room_waits_at_the_front():
    scheduler = make(max_running=2)
    leader, other = seq(6), seq(3, first=50)
    followers = leader.followers = [seq(6), seq(6)]
    scheduler.add(leader)
    scheduler.add(other)
    scheduler.config = SchedulerConfig(max_running=1)
    step(scheduler)
    scheduler.config = SchedulerConfig(max_running=2)
    assert [fork.seq for fork in scheduler.fork(leader)] == followers[:1]
    assert list(scheduler.waiting) == [followers[1], other]


def test_cancelled_sequences_free_their_blocks_at_once():
    scheduler = make()
    running, waiting = seq(8), seq(8, first=50)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(waiting)
    scheduler.remove(running)
    scheduler.remove(waiting)
    assert scheduler.pool.num_available == 16
    assert len(scheduler) == 0


def test_no_room_at_all_is_a_config_error():
    with pytest.raises(ConfigError, match="max_running"):
        SchedulerConfig(max_running=0)


def test_turns_are_shared_by_time_not_by_count():
    share = FairShare({"sample": 1.0, "train": 1.0})
    turns = []
    for _ in range(40):
        kind = share.pick(["sample", "train"])
        share.charge(kind, 0.1 if kind == "sample" else 0.9)
        turns.append(kind)
    assert turns.count("sample") == pytest.approx(9 * turns.count("train"), abs=5)
    assert "train" in turns[:3]
    assert "sample" in turns[:3]


def test_who_was_idle_does_not_save_up_time():
    share = FairShare({"sample": 1.0, "train": 1.0})
    for _ in range(100):
        share.charge(share.pick(["train"]), 1.0)
    turns = []
    for _ in range(10):
        kind = share.pick(["sample", "train"])
        share.charge(kind, 1.0)
        turns.append(kind)
    assert 4 <= turns.count("train") <= 6


def test_a_job_on_trial_has_passes_of_its_own_and_takes_turns_with_the_others():
    """Whatever happens in its pass is its own fault, and nobody waits for its end."""
    scheduler = make(num_blocks=64)
    others = [seq(3, first=n * 100) for n in range(2)]
    for other in others:
        scheduler.add(other)
    step(scheduler)
    suspect = seq(9, first=900)
    suspect.trial = "suspect"
    scheduler.add(suspect)
    turns = []
    for _ in range(6):
        trial, plan = scheduler.next_trial, step(scheduler)
        assert {chunk.seq.trial for chunk in plan} == {trial}, "it is known before the pass"
        turns.append([chunk.seq for chunk in plan])
        assert scheduler.plan_ahead(others) == []
    assert turns == [others, [suspect]] * 3
    scheduler.remove(suspect)
    assert [len(step(scheduler)) for _ in range(2)] == [2, 2]
    assert not scheduler.has_trial
