"""Accounts, sessions, runs, samplers, checkpoints and usage keep what they promise."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from store_rows import checkpoint, model, sampling, session

from tinkex.store import (
    CustomLoss,
    SessionQuery,
    Snapshot,
    Store,
    TrajectoryAnswer,
    UsageCount,
)


def test_a_key_is_found_by_its_text_and_stored_as_a_hash(store: Store) -> None:
    store.accounts.ensure_user("ann")
    record = store.accounts.add_key("tml-secret-of-ann", "ann")
    assert store.accounts.find_key("tml-secret-of-ann") == record
    assert store.accounts.find_key("tml-other") is None
    with store._database.reader.connect() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM api_keys").all()
    assert "secret-of-ann" not in repr(rows)


def test_a_revoked_key_is_not_found_until_it_is_added_again(store: Store) -> None:
    record = store.accounts.add_key("tml-a", "ann")
    assert store.accounts.revoke_key(record.key_id)
    assert not store.accounts.revoke_key(record.key_id)
    assert store.accounts.find_key("tml-a") is None
    assert store.accounts.add_key("tml-a", "ann").key_id == record.key_id


def test_a_session_round_trips_with_its_metadata(store: Store) -> None:
    made = session(tags=["a", "b"], user_metadata={"x": "ü"}, created_at=1700000000.123456)
    store.sessions.create(made)
    assert store.sessions.get("s") == made


def test_the_first_finish_wins(store: Store) -> None:
    store.sessions.create(session())
    done = {"type": "client_finished", "reason": {"type": "success"}}
    assert store.sessions.finish("s", done)
    assert not store.sessions.finish("s", {"type": "cancelled"})
    found = store.sessions.get("s")
    assert found is not None
    assert found.status == done


def test_heartbeats_are_written_by_the_next_flush(store: Store) -> None:
    store.sessions.create(session("old", last_heartbeat=100.0))
    store.sessions.create(session("live", last_heartbeat=100.0))
    store.sessions.heartbeat("live", 900.0)
    store.flush()
    seen = {name: store.sessions.get(name) for name in ("old", "live")}
    assert {name: found and found.last_heartbeat for name, found in seen.items()} == {
        "old": 100.0,
        "live": 900.0,
    }


def test_a_search_pages_through_every_session_once(store: Store) -> None:
    for n in range(7):
        # Two sessions of the same instant: the id decides, and none is lost between pages.
        store.sessions.create(session(f"s{n}", created_at=1000.0 + n // 2, display_name=f"Run {n}"))
    store.sessions.create(session("foreign", user_id="bob"))
    seen: list[str] = []
    before = None
    while page := store.sessions.search(SessionQuery(user_ids=["ann"], before=before), 2):
        seen += [s.session_id for s in page]
        before = (page[-1].created_at, page[-1].session_id)
    assert seen == [f"s{n}" for n in (6, 5, 4, 3, 2, 1, 0)]


def test_a_search_treats_percent_and_case_as_text(store: Store) -> None:
    store.sessions.create(session("a", display_name="Half 50% Done"))
    store.sessions.create(session("b", display_name="Half 500 done"))
    query = SessionQuery(user_ids=["ann"], display_name="done 50%")
    assert [s.session_id for s in store.sessions.search(query, 10)] == ["a"]


def test_a_snapshot_replaces_the_one_before_and_gives_it_back(store: Store) -> None:
    first = Snapshot(model_id="m", seq_id=4, folder="/a", created_at=1.0)
    second = Snapshot(model_id="m", seq_id=9, folder="/b", created_at=2.0)
    assert store.models.save_snapshot(first) is None
    assert store.models.save_snapshot(second) == first
    assert store.models.get_snapshot("m") == second


def test_runs_are_listed_to_their_owner_and_public_ones_on_request(store: Store) -> None:
    store.models.create(model("s:train:0", created_at=1.0))
    store.models.create(model("t:train:0", "bob", created_at=2.0))
    store.models.create(model("u:train:0", "bob", created_at=3.0))
    public = checkpoint(model_id="u:train:0", user_id="bob", public=True)
    store.checkpoints.put(public)
    mine, total = store.models.page("ann", 10, 0)
    assert ([m.model_id for m in mine], total) == (["s:train:0"], 1)
    seen, total = store.models.page("ann", 10, 0, with_public=True)
    assert ([m.model_id for m in seen], total) == (["u:train:0", "s:train:0"], 2)


def test_a_sampling_session_made_twice_is_one(store: Store) -> None:
    first = store.sampling.create(sampling(3))
    again = store.sampling.create(sampling(3, sampling_session_id="else", base_model="x"))
    assert again == first


def test_every_client_that_joins_gets_a_number_of_its_own(store: Store) -> None:
    made = store.sampling.create(sampling())
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: store.sampling.join(made.sampling_session_id), range(40)))
    assert sorted(numbers) == list(range(1, 41))


def test_a_custom_loss_round_trips(store: Store) -> None:
    loss = CustomLoss(
        loss_id="l",
        session_id="s",
        user_id="ann",
        seq_id=0,
        name="f",
        inputs=[{"name": "logprobs", "rank": 1}],
        graph={"format": 1, "nodes": []},
        created_at=1.0,
    )
    assert store.sampling.create_loss(loss) == loss
    assert store.sampling.get_loss("l") == loss


def test_an_overwritten_checkpoint_gives_back_the_folder_that_may_go(store: Store) -> None:
    store.checkpoints.put(checkpoint(folder="/a"))
    replaced = store.checkpoints.put(checkpoint(folder="/b"))
    assert replaced is not None
    assert replaced.folder == "/a"
    found = store.checkpoints.get("tinker://s:train:0/weights/first")
    assert found is not None
    assert found.folder == "/b"


def test_an_expired_checkpoint_is_not_listed_and_is_due_for_the_sweeper(store: Store) -> None:
    store.checkpoints.put(checkpoint("gone", expires_at=time.time() - 1))
    store.checkpoints.put(checkpoint("kept", expires_at=time.time() + 60))
    assert store.checkpoints.get("tinker://s:train:0/weights/gone") is None
    assert [c.name for c in store.checkpoints.of_run("s:train:0")] == ["kept"]
    assert [c.name for c in store.checkpoints.expired()] == ["gone"]


def test_the_last_checkpoint_of_each_run_and_kind_is_found(store: Store) -> None:
    store.checkpoints.put(checkpoint("a", created_at=1.0))
    store.checkpoints.put(checkpoint("b", created_at=2.0))
    store.checkpoints.put(checkpoint("c", "sampler_weights", created_at=3.0))
    last = store.checkpoints.last_of_runs(["s:train:0", "none"], "weights")
    assert {run: c.name for run, c in last.items()} == {"s:train:0": "b"}


def test_an_idempotency_key_keeps_its_first_value(store: Store) -> None:
    assert store.checkpoints.remember("ann", "k", "one") == "one"
    assert store.checkpoints.remember("ann", "k", "two") == "one"
    assert store.checkpoints.remember("bob", "k", "two") == "two"


def test_the_ledger_adds_up_per_hour_run_and_kind(store: Store) -> None:
    def count(tokens: float, at: float, kind: str = "sampling_sample") -> UsageCount:
        return UsageCount(kind=kind, count=tokens, user_id="ann", session_id="s", at=at)  # type: ignore[arg-type]

    store.usage.add([count(5, 7200.0), count(6, 7300.0), count(7, 10800.0)])
    store.usage.add([count(8, 7200.0, "sampling_prefill")])
    store.flush()
    store.usage.add([count(1, 7200.0)])
    rows = store.usage.events("ann", 7200, 10801)
    assert [(row.bucket_start, row.kind, row.count) for row in rows] == [
        (7200, "sampling_prefill", 8),
        (7200, "sampling_sample", 12),
        (10800, "sampling_sample", 7),
    ]
    assert store.usage.events("bob", 0, 10**9) == []


def test_the_ledger_tells_users_keys_and_runs_by_time_of_the_device(store: Store) -> None:
    now = time.time()

    def count(
        kind: str, amount: float, key_id: int | None, run: str = "r", at: float = 0.0
    ) -> None:
        user = "bob" if key_id == 3 else "ann"
        used = UsageCount(
            kind=kind,  # type: ignore[arg-type]
            count=amount,
            user_id=user,
            model_id=run,
            key_id=key_id,
            at=at,
        )
        store.usage.add([used])

    count("training", 10, 1)
    count("device_seconds", 1.0, 1)
    count("training", 5, 2, "q")
    count("device_seconds", 2.0, 2, "q")
    count("training", 900, 3)
    count("training", 7, None)
    count("storage", 1e12, None)
    count("training", 1e6, 1, at=now - 50 * 3600)
    store.flush()
    keys = store.usage.used("key", now - 86_400, 10)
    assert [(one.user_id, one.key_id, one.counts) for one in keys] == [
        ("ann", 2, {"training": 5, "device_seconds": 2.0}),
        ("ann", 1, {"training": 10, "device_seconds": 1.0}),
        ("bob", 3, {"training": 900}),
        ("ann", 0, {"training": 7}),
    ]
    runs = store.usage.used("run", now - 86_400, 1)
    assert [(one.user_id, one.model_id, one.counts) for one in runs] == [
        ("ann", "q", {"training": 5, "device_seconds": 2.0})
    ]
    users = store.usage.used("user", now - 86_400, 10)
    assert [(one.user_id, one.counts.get("training")) for one in users] == [
        ("ann", 22),
        ("bob", 900),
    ]
    assert store.usage.tokens(now - 3600) == {"training": 922}
    # A user's bill knows no keys: the hour, the run and the kind are one row.
    billed = [row for row in store.usage.events("ann", now - 7200, now + 1) if row.model_id == "r"]
    assert [(row.kind, row.count) for row in billed if row.kind == "training"] == [("training", 17)]


def test_audit_entries_are_kept_apart_by_user_kind_and_time(store: Store) -> None:
    store.audit.record("ann", "checkpoint_deleted", {"tinker_path": "x"})
    store.audit.record("ann", "project_session_assigned", {})
    store.audit.record("bob", "checkpoint_deleted", {})
    store.flush()
    window = {"start": time.time() - 60, "end": time.time() + 60}
    assert len(store.audit.entries("ann", prefixes=None, **window)) == 2
    found = store.audit.entries("ann", prefixes=["checkpoint_"], **window)
    assert [(entry.event, entry.details) for entry in found] == [
        ("checkpoint_deleted", {"tinker_path": "x"})
    ]
    assert store.audit.entries("ann", prefixes=None, start=0, end=1) == []


def test_totals_of_sessions_and_projects_add_up(store: Store) -> None:
    store.models.create(model("s:train:0"))
    store.checkpoints.put(checkpoint("a", size_bytes=10))
    store.checkpoints.put(checkpoint("b", size_bytes=20, project_id="p"))
    assert store.checkpoints.totals_of_sessions(["s", "t"]) == {"s": (2, 30)}
    assert store.checkpoints.storage_by_project("ann") == {None: (1, 10), "p": (1, 20)}


def test_moving_a_session_moves_its_checkpoints(store: Store) -> None:
    store.sessions.create(session())
    store.models.create(model())
    store.checkpoints.put(checkpoint())
    store.sessions.set_project("s", "p")
    assert store.checkpoints.storage_by_project("ann") == {"p": (1, 100)}


def test_a_name_is_its_owners_and_can_be_moved(store: Store) -> None:
    store.names.put("ann", "pirate", "tinker://a/weights/1")
    store.names.put("ann", "pirate", "tinker://a/weights/2")
    store.names.put("ben", "pirate", "tinker://b/weights/1")
    found = store.names.get("ann", "pirate")
    assert found is not None
    assert found.path == "tinker://a/weights/2"
    assert [named.path for named in store.names.of_user("ben")] == ["tinker://b/weights/1"]
    assert store.names.remove("ann", "pirate")
    assert not store.names.remove("ann", "pirate")


def test_a_trajectory_keeps_its_answers_in_order_and_apart_from_others(store: Store) -> None:
    def answer(user_id: str, parent_id: int | None) -> TrajectoryAnswer:
        return TrajectoryAnswer(
            user_id=user_id,
            trajectory_id="t",
            parent_id=parent_id,
            history=b"h",
            prompt_tokens=b"1234",
            tokens=b"12345678",
            logprobs=b"12345678",
            stop_reason="stop",
            model="m",
            snapshot="",
            created_at=time.time(),
        )

    store.count_bytes()
    (first,) = store.trajectories.add([answer("ann", None)])
    (second,) = store.trajectories.add([answer("ann", first)])
    store.trajectories.add([answer("ben", None)])
    found = store.trajectories.of("ann", "t")
    assert [(a.answer_id, a.parent_id) for a in found] == [(first, None), (second, first)]
    assert store.stored.of("ann")["trajectories"] == 40
    assert store.trajectories.remove("ann", "t") == 2
    assert store.trajectories.forget_before(time.time() + 1) == 1
