"""A whole run goes from one store to another, and goes away, with all its rows or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy.exc import IntegrityError
from store_rows import checkpoint, ended, model, op, sampling, session

from tinkex.errors import InvalidInputError
from tinkex.store import Store, StoredCurve


@pytest.fixture
def filled(store: Store) -> Store:
    """Ann's run of two segments, and a run that is not meant."""
    store.count_bytes()
    store.sessions.create(session())
    for number in range(3):
        store.models.create(model(f"s:train:{number}", model_seq_id=number, created_at=number))
    store.models.continue_run("s:train:1", "s:train:0", {"continues_step": 1, "first_step": 1})
    for number in range(3):
        made = checkpoint(f"c{number}", model_id=f"s:train:{number}", folder=f"f{number}")
        store.checkpoints.put(made)
        curve = StoredCurve(model_id=f"s:train:{number}", name="loss", stride=1, points=b"x")
        store.curves.save([curve])
    store.names.put("ann", "best", store.checkpoints.of_run("s:train:1")[0].path)
    store.journal.append(op(1)).result()
    store.journal.note([ended(1)]).result()
    return store


def test_a_deleted_run_takes_its_segments_and_leaves_the_others(filled: Store) -> None:
    run = filled.models.get("s:train:0")
    assert run is not None
    sampler = sampling(model_id="s:train:1", folder="u", ephemeral=True, size_bytes=7)
    filled.sampling.create(sampler)
    for segment in (segments := filled.runs.check_deletable(run)):
        filled.journal.drop_run(segment.model_id)
    deleted = filled.runs.delete(run, segments)
    assert deleted.model_ids == ("s:train:0", "s:train:1")
    assert deleted.num_checkpoints == 2
    assert {"f0", "f1", "u"} == set(filled.folders.deleted())
    assert [one.model_id for one in filled.models.page("ann", 9, 0)[0]] == ["s:train:2"]
    assert filled.names.of_user("ann") == []
    assert filled.curves.of_run("s:train:1") == []
    assert filled.journal.since("s:train:0", -1) == []
    assert filled.stored.of("ann") == filled.recount_bytes()["ann"]


def test_a_run_that_was_resumed_or_published_meanwhile_is_not_deleted(filled: Store) -> None:
    run = filled.models.get("s:train:2")
    assert run is not None
    segments = filled.runs.check_deletable(run)
    filled.models.create(model("s:train:3", model_seq_id=3))
    filled.models.continue_run("s:train:3", "s:train:2", {"continues_step": 1, "first_step": 1})
    with pytest.raises(InvalidInputError, match="meanwhile"):
        filled.runs.delete(run, segments)
    filled.checkpoints.set_public(filled.checkpoints.of_run("s:train:2")[0].path, True)
    with pytest.raises(InvalidInputError, match="unpublish"):
        filled.runs.delete(run, segments)
    assert filled.models.get("s:train:2") is not None


def test_a_whole_run_is_added_to_another_store_once(
    filled: Store, new_url: Callable[[], str]
) -> None:
    [resumed, other] = filled.runs.all()
    assert [one.model_id for one in resumed.segments] == ["s:train:0", "s:train:1"]
    target = Store(new_url(), full_sync=False)
    try:
        target.count_bytes()
        ours = resumed.given_to("bob", resumed.checkpoints)
        assert target.runs.add(ours) == []
        assert target.runs.add(other.given_to("bob", [])) == []
        [last, *_] = [one for one in target.runs.all() if one.model_id == "s:train:1"]
        assert (last.user_id, len(last.checkpoints), len(last.curves)) == ("bob", 2, 2)
        assert all(one.unloaded for one in last.segments)
        assert target.names.get("bob", "best") is not None
        assert target.stored.of("bob") == target.recount_bytes()["bob"]
        with pytest.raises(IntegrityError):
            target.runs.add(ours)
    finally:
        target.close()
