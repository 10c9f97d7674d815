"""The bytes of each user are counted as they are written, and equal to a recount at any moment."""

from __future__ import annotations

import random
import time

import pytest
from store_rows import checkpoint, ended, model, op, sampling, session

from tinkex.store import CustomLoss, Fetched, Snapshot, Store, TrajectoryAnswer

USERS = ("ann", "bob")


class RandomWork:
    """Everything that stores or drops bytes, in an order that a seed decides."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.seq = dict.fromkeys(USERS, 0)
        self.made = 0
        for user in USERS:
            store.sessions.create(session(user, user))
            store.models.create(model(f"{user}:train:0", user))

    def step(self) -> None:
        user = self.random.choice(USERS)
        name = self.random.choice([n for n in dir(self) if n.startswith("do_")])
        getattr(self, name)(user, f"{user}:train:0", self.random.randrange(1, 5000))

    def do_append(self, user: str, run: str, size: int) -> None:
        seq = self.random.randrange(self.seq[user] + 3)  # now and then a repeat
        self.seq[user] = max(self.seq[user], seq)
        rows = [op(s, run, user_id=user, body=b"x" * (s % 97)) for s in (seq, seq + 1, seq)]
        for done in [self.store.journal.append(row) for row in rows]:
            done.exception()
        refused = op(seq + 1000, run, user_id=user, body=b"x" * size, refused="no")
        self.store.journal.append(refused).exception()

    def do_end(self, user: str, run: str, size: int) -> None:
        for seq in range(0, self.seq[user] + 1, 3):
            self.store.journal.note([ended(seq, run, result=b"r" * size)]).result()

    def do_fail(self, user: str, run: str, size: int) -> None:
        self.store.journal.note([ended(0, run, result=None, error="no")]).result()

    def do_fetch(self, user: str, run: str, size: int) -> None:
        fetched = Fetched(request_id=f"{run}:0", drop_result_at=time.time() - 1)
        self.store.journal.note([fetched]).result()

    def do_sweep(self, user: str, run: str, size: int) -> None:
        self.store.journal.sweep(time.time() + self.random.choice([0, 25 * 3600, 8 * 86_400]))

    def do_replace(self, user: str, run: str, size: int) -> None:
        name = f"{run}:{self.random.randrange(self.seq[user] + 2)}"
        self.store.journal.replace_body(name, b"y" * size).result()

    def do_drop_results(self, user: str, run: str, size: int) -> None:
        self.store.journal.drop_results(run)

    def do_delete_run(self, user: str, run: str, size: int) -> None:
        if self.random.random() < 0.8:
            return
        found = self.store.models.get(run)
        assert found is not None
        self.store.journal.drop_run(run)
        self.store.models.drop_snapshot(run)
        self.store.runs.delete(found, self.store.runs.check_deletable(found))
        self.seq[user] = 0
        self.store.models.create(model(run, user))

    def do_release(self, user: str, run: str, size: int) -> None:
        self.store.journal.release_bodies(run, self.random.randrange(self.seq[user] + 1)).result()

    def do_snapshot(self, user: str, run: str, size: int) -> None:
        self.made += 1
        at = Snapshot(
            model_id=run, seq_id=0, folder=f"state/{self.made}", created_at=1.0, size_bytes=size
        )
        self.store.models.save_snapshot(at)

    def do_drop_snapshot(self, user: str, run: str, size: int) -> None:
        self.store.models.drop_snapshot(run)

    def do_save(self, user: str, run: str, size: int) -> None:
        self.made += 1
        name, folder = str(self.random.randrange(4)), f"checkpoints/{self.made}"
        self.store.checkpoints.put(
            checkpoint(name, model_id=run, user_id=user, folder=folder, size_bytes=size)
        )

    def do_delete(self, user: str, run: str, size: int) -> None:
        self.store.checkpoints.delete(f"tinker://{run}/weights/{self.random.randrange(4)}")

    def do_sampler(self, user: str, run: str, size: int) -> None:
        self.made += 1
        number = self.random.randrange(6)
        self.store.sampling.create(
            sampling(
                number,
                user,
                user_id=user,
                folder=f"ephemeral/{self.made}",
                ephemeral=True,
                model_id=run,
                size_bytes=size,
            )
        )

    def do_forget_sampler(self, user: str, run: str, size: int) -> None:
        self.store.sampling.forget_folder(f"{user}:sample:{self.random.randrange(6)}")

    def do_loss(self, user: str, run: str, size: int) -> None:
        number = self.random.randrange(6)
        self.store.sampling.create_loss(
            CustomLoss(
                loss_id=f"{user}:loss:{number}",
                session_id=user,
                user_id=user,
                seq_id=number,
                name="",
                inputs=[],
                graph={},
                created_at=1.0,
                size_bytes=size,
            )
        )

    def do_record(self, user: str, run: str, size: int) -> None:
        answer = TrajectoryAnswer(
            user_id=user,
            trajectory_id=str(size % 3),
            parent_id=None,
            history=b"",
            prompt_tokens=b"p" * size,
            tokens=b"t",
            logprobs=b"l",
            stop_reason="",
            model="",
            snapshot="",
            created_at=float(size),
        )
        self.store.trajectories.add([answer, answer])

    def do_unrecord(self, user: str, run: str, size: int) -> None:
        self.store.trajectories.remove(user, "1")
        self.store.trajectories.forget_before(float(size) / 2)


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_equal_to_a_recount_after_random_work(store: Store, seed: int) -> None:
    work = RandomWork(store, seed)
    for _ in range(30):
        work.step()
    store.count_bytes()
    for _ in range(300):
        work.step()
    counted = {user: store.stored.of(user) for user in USERS}
    recounted = store.recount_bytes()
    assert counted == {user: recounted.get(user, {}) for user in USERS}
    assert sum(recounted["ann"].values()), "something was counted"


def test_a_write_that_fails_counts_nothing(store: Store) -> None:
    store.count_bytes()
    store.models.create(model())

    def write(connection: object) -> None:
        store.stored.add("ann", "requests", 100)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store._writer.run(write)
    store.flush()
    assert not store.stored.of("ann")


def test_a_reservation_ends_with_the_commit_of_what_it_was_for(store: Store) -> None:
    store.count_bytes()
    store.stored.reserve("s:train:0:1", "ann", 6)
    store.stored.reserve("another", "ann", 10)
    assert (store.stored.total("ann"), store.stored.of("ann")) == (16, {})
    store.journal.append(op(1, body=b"sixsix")).result()
    assert (store.stored.total("ann"), store.stored.of("ann")) == (16, {"requests": 6})
    store.stored.release("another")
    store.stored.release("another")
    assert store.stored.total("ann") == 6
