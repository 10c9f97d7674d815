"""A long run of random tenants while processes are killed, the disk fills and folders are renamed.

Each round a few tenants train a step, save a checkpoint, delete an old checkpoint; then one of:
nothing, `kill -9` of the worker, `kill -9` of the server, a stop, a full disk. A server that starts
again is given another spelling of its data folder. After a sixth of the time the server itself is
left alone, so that files, memory and sockets of one process, which has run for as long as an idle
session stays in memory, are compared between a third of the time and the end; its memory is
printed every minute. Then it starts again, and every checkpoint that was saved and not deleted is
loaded.

With `--attackers` a hostile key runs the attacks of `attackers.py` meanwhile, one after the other.

    python benchmarks/soak.py [--no-bar] [--minutes 30] [--attackers]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import report
from attackers import HOSTILE, ROOT, Target, in_turns

for _folder in ("harness", "server"):
    sys.path.insert(0, str(ROOT / "tests" / _folder))
from fuzz import talking_toy  # noqa: E402
from patience import until  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from small_disk import Disk, small_disk  # noqa: E402
from wire_client import PROTO, SESSION, Failed, WireClient, loss_of, train_body  # noqa: E402

NUM_TENANTS = 6
KEEP = 4
"""Checkpoints a tenant keeps; older ones are deleted."""
DISK_BYTES, MIN_FREE_BYTES = 200_000_000, 8_000_000
ATTACK_S = 20.0
FULL = 507


class Tenant:
    """One key with one run after another, and what it must find again."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        self.client = WireClient(server.base_url, key=f"tml-{number}")
        self.saved: list[str] = []
        self.model = ""
        self.seq_id = 0
        self.num_runs = 0
        self.failures = 0

    def act(self, rng: random.Random) -> None:
        if not self.model or rng.random() < 0.05:
            self.model = self.client.model(self.client.session())
            self.seq_id, self.num_runs = 0, self.num_runs + 1
        self.client.result(self.client.train(self.model, self._next(), [1, 2, rng.randrange(60)]))
        self.client.result(self.client.step(self.model, self._next()))
        if rng.random() < 0.3:
            self._save()
        while len(self.saved) > KEEP:
            self._delete(self.saved.pop(0))

    def work_on_full_disk(self, disk: Disk) -> int:
        """What is refused keeps its number, what is accepted ends; gives how many were refused."""
        num_refused = 0
        if not self.model:
            return 0
        disk.fill()
        time.sleep(1.5)  # the server looks at the room every second
        accepted = []
        for _ in range(3):
            body = train_body(self.model, self.seq_id + 1, [1, 2, 3])
            answer = self.client.post("forward_backward", body, headers=PROTO)
            if answer.status_code == FULL:
                num_refused += 1
                continue
            assert answer.status_code == 200, answer.text
            self.seq_id += 1
            accepted.append(answer.json())
        disk.clear()
        # The server looks at the room every second, when attackers leave it the time.
        until(lambda: self.client.post("create_session", SESSION).status_code == 200)
        for promise in accepted:
            assert loss_of(self.client.result(promise)) > 0
        return num_refused

    def _next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def _save(self) -> None:
        body = {"model_id": self.model, "path": f"c{self.seq_id}", "seq_id": self._next()}
        made = self.client.result(self.client.ok("save_weights", body))
        self.saved.append(str(made["path"]))

    def _delete(self, path: str) -> None:
        run, kind, name = path.removeprefix("tinker://").split("/")
        url = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
        answer = self.client.http.delete(url)
        assert answer.status_code in (200, 204, 404), answer.text

    def lost(self) -> int:
        """How many of the saved checkpoints do not load any more."""
        num_lost = 0
        for path in self.saved:
            model = self.client.model(self.client.session())
            body = {"model_id": model, "path": path, "seq_id": 1, "optimizer": True}
            try:
                self.client.result(self.client.ok("load_weights", body))
            except (Failed, AssertionError) as exc:
                print(f"{path} does not load: {exc}", file=sys.stderr)
                num_lost += 1
        return num_lost


def weigh(pid: int) -> dict[str, float]:
    """Open files, sockets among them, and memory of a process."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    status = Path(f"/proc/{pid}/status").read_text()
    memory = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "files": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "memory": int(memory.split()[1]) / 1024,
    }


def settle(tenants: list[Tenant], rng: random.Random) -> None:
    """Every tenant has just called, so that as many connections are open as before."""
    for tenant in tenants:
        tenant.act(rng)


def disturb(
    server: ServerProcess, spellings: list[Path], rng: random.Random, *, spare_server: bool
) -> str:
    """One of the things that happen to servers."""
    what = rng.choice(["nothing", "nothing", "worker", "full", "kill", "stop"])
    if what in ("kill", "stop") and spare_server:
        what = "worker"
    if what == "worker":
        server.kill_worker()
    elif what in ("kill", "stop"):
        server.kill() if what == "kill" else server.stop()
        server.folder = rng.choice(spellings)
        server.start()
    return what


def settings(folder: Path, *, attackers: bool) -> list[str]:
    """Flags of the server; with attackers its toy reads words, and the disk is shared out."""
    keys = [flag for n in range(NUM_TENANTS) for flag in ("--api-key", f"tml-{n}=user{n}")]
    file = folder / "settings.toml"
    file.write_text(f"min_free_bytes = {MIN_FREE_BYTES}\n")
    flags = ["--config", str(file), *keys]
    if not attackers:
        return ["--engine", "toy", *flags]
    toy = talking_toy(folder / "model")
    model = ["--model", str(folder / "model"), "--alias", f"toy={folder / 'model'}"]
    limits = ["--quota", f"disk_bytes={DISK_BYTES // 20}", "--api-key", f"{HOSTILE}=hostile"]
    return ["--engine", toy["engine"], *model, *flags, *limits]


def begin_attacks(port: int, seconds: float) -> threading.Thread:
    """Attack a server in another thread, until so many seconds are over."""
    until = time.monotonic() + seconds
    work = in_turns(Target(port), until, ATTACK_S)
    thread = threading.Thread(target=asyncio.run, args=(work,), name="attackers", daemon=True)
    thread.start()
    return thread


def soak(
    folder: Path, minutes: float, seed: int, *, attackers: bool = False
) -> list[report.Figure]:
    rng = random.Random(seed)
    home = folder / "home"
    home.mkdir()
    (folder / "link").symlink_to(home)
    spellings = [home, folder / "link", home / ".." / "home", folder / "." / "home"]
    counts = dict.fromkeys(("nothing", "worker", "full", "kill", "stop"), 0)
    server = ServerProcess(home, *settings(folder, attackers=attackers))
    num_rounds = num_refused = 0
    with (
        small_disk(home / "data", lambda: [server.pid, *server.worker_pids()], DISK_BYTES) as disk,
        server,
    ):
        tenants = [Tenant(server, n) for n in range(NUM_TENANTS)]
        started, early, weighed_at = time.monotonic(), None, 0.0
        # Not while the server is weighed: connections of attackers would hide what stays open.
        attacks = begin_attacks(server.port, minutes * 20) if attackers else None
        while (spent := time.monotonic() - started) < minutes * 60:
            num_rounds += 1
            for tenant in rng.sample(tenants, 3):
                try:
                    tenant.act(rng)
                except (Failed, AssertionError) as exc:
                    print(f"a call failed: {exc}", file=sys.stderr)
                    tenant.failures, tenant.model = tenant.failures + 1, ""
            if rng.random() < 0.2:
                what = disturb(server, spellings, rng, spare_server=spent > minutes * 10)
                counts[what] += 1
                if what == "full":
                    num_refused += rng.choice(tenants).work_on_full_disk(disk)
            if spent - weighed_at >= 60:
                weighed_at = spent
                told = ", ".join(f"{k} {v:.1f}" for k, v in weigh(server.pid).items())
                print(f"{spent / 60:.0f} min, process {server.pid}: {told}", file=sys.stderr)
            if early is None and spent > minutes * 20:
                if attacks is not None:
                    attacks.join()
                settle(tenants, rng)
                early = weigh(server.pid)
                if attacks is not None:
                    left_s = minutes * 60 - (time.monotonic() - started)
                    attacks = begin_attacks(server.port, left_s)
        if attacks is not None:
            attacks.join()
        settle(tenants, rng)
        late = weigh(server.pid)
        server.stop()
        server.folder = rng.choice(spellings)
        server.start()
        settle(tenants, rng)
        num_lost = sum(tenant.lost() for tenant in tenants)
        num_kept = sum(len(tenant.saved) for tenant in tenants)
        for tenant in tenants:
            tenant.client.close()
    early = early or late
    note = ", ".join(f"{count} x {what}" for what, count in counts.items())
    figures = [
        report.Figure(name="lost_checkpoints", ours=num_lost, unit="errors", bar=0, note=note),
        report.Figure(name="checkpoints_kept", ours=num_kept, unit="count"),
        report.Figure(name="rounds", ours=num_rounds, unit="count"),
        report.Figure(name="refused_on_full_disk", ours=num_refused, unit="count"),
        report.Figure(
            name="failed_calls", ours=sum(t.failures for t in tenants), unit="errors", bar=0
        ),
    ]
    for what in ("files", "sockets", "memory"):
        grown = late[what] / max(early[what], 1)
        text = f"{early[what]:.0f} then {late[what]:.0f}"
        figures.append(
            report.Figure(name=f"{what}_grown", ours=grown, unit="times", bar=1.1, note=text)
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attackers", action="store_true")
    flags, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(Path(folder), flags.minutes, flags.seed, attackers=flags.attackers)
    return report.finish("soak", figures, rest)


if __name__ == "__main__":
    sys.exit(main())
