"""`tinkex admin ...`: look after a server of your own, its data and its users.

`backup`, `restore`, `fsck`, `vacuum` and `adopt` work on the server's data folder, so they need its
machine and no key. `backup` and `fsck` may run beside the server, `restore` makes a new folder,
`vacuum` and `adopt` want the server stopped. `users`, `usage`, `disable`, `enable`, `unpause`,
`stop` and `delete-run` ask the server that runs, with an admin key; from wherever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tinkex.cli.listing import Listing
from tinkex.cli.output import Table, plain, properties, size
from tinkex.cli.state import Noun, State, pass_state

if TYPE_CHECKING:
    from tinkex.server.files.adoption import Adopted
    from tinkex.server.files.backup import Found
    from tinkex.store import WholeRun
    from tinkex.types.account.administration import AdminUsage, AdminUser

_FOLDER = click.Path(path_type=Path)


def _deep(*, is_default: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--deep/--no-deep",
        default=is_default,
        show_default=True,
        help="Read all weights and compare their digests.",
    )


@click.group(cls=Noun)
def admin() -> None:
    """Look after your own server: its data, and what its users do."""


@admin.command()
@click.option("--data-dir", type=_FOLDER, help="Data folder of the server.")
@click.option("--output", type=_FOLDER, required=True, help="Tar file to write; must not exist.")
@pass_state
def backup(state: State, /, data_dir: Path | None, output: Path) -> None:
    """Copy database, checkpoints, state and secrets into one tar; the server may run."""
    from tinkex.server.files import backup as files

    checked = files.backup(_data_dir(data_dir), output)
    _show(state, checked, {"Backup": str(output), "Bytes": output.stat().st_size})


@admin.command()
@click.option("--input", "source", type=_FOLDER, required=True, help="Tar file of a backup.")
@click.option("--data-dir", type=_FOLDER, required=True, help="New or empty folder to fill.")
@_deep(is_default=True)
@pass_state
def restore(state: State, /, source: Path, data_dir: Path, deep: bool) -> None:
    """Unpack a backup into a new data folder and check it."""
    from tinkex.server.files import backup as files

    _show(state, files.restore(source, data_dir, deep=deep), {"Data folder": str(data_dir)})


@admin.command()
@click.option("--data-dir", type=_FOLDER, help="Data folder of the server.")
@_deep(is_default=False)
@pass_state
def fsck(state: State, /, data_dir: Path | None, deep: bool) -> None:
    """Hold the data folder against its database; exits 1 when something is missing or damaged."""
    from tinkex.server.files import backup as files

    folder = _data_dir(data_dir)
    _show(state, files.check(folder, deep=deep), {"Data folder": str(folder)})


@admin.command()
@click.argument("source", type=_FOLDER)
@click.option("--run", default="", help="Only the run of this name or id.")
@click.option("--owner", default="", help="The user the runs belong to here; default: the same.")
@click.option("--data-dir", type=_FOLDER, help="Data folder that takes them.")
@pass_state
def adopt(state: State, /, source: Path, run: str, owner: str, data_dir: Path | None) -> None:
    """Bring the runs of SOURCE, another data folder, into this server's; stop both servers first.

    Names, notes, settings, curves and checkpoints are copied, and checked by digest; SOURCE stays
    as it is, and a run that is here already too. State does not come along: an adopted run is
    resumed from a checkpoint. Adopt only folders that you trust.
    """
    from tinkex.server.files.adoption import adopt as adopt_runs
    from tinkex.server.process.config import load_config
    from tinkex.server.serve import open_store

    config = load_config(flags={} if data_dir is None else {"data_dir": data_dir})
    store = open_store(config)
    try:
        adopted = adopt_runs(store, config.data_dir, source.expanduser(), run=run, owner=owner)
    finally:
        store.close()
    _show_adopted(state, config.data_dir, adopted)


@admin.command()
@click.option("--data-dir", type=_FOLDER, help="Data folder of the server.")
@pass_state
def vacuum(state: State, /, data_dir: Path | None) -> None:
    """Give unused room of the database back to the disk; stop the server first."""
    from tinkex.server.files import backup as files

    before, after = files.vacuum(_data_dir(data_dir))
    facts = {"Bytes before": before, "Bytes after": after}
    state.show(properties(None, facts), {"before_bytes": before, "after_bytes": after})


# ------------------------------------------------------------------------------------ users

_user = click.option("--user", required=True, help="Who it is about.")
_reason = click.option("--reason", default="", help="Told to the user, and kept in the audit log.")


def _standing(user: AdminUser) -> str:
    if user.disabled_at:
        return "disabled"
    if user.paused_until:
        return f"paused until {user.paused_until:%H:%M:%S} UTC"
    return "admin" if user.is_admin else "active"


_USERS = Listing(
    "users",
    "Users",
    {
        "User": "user_id",
        "State": _standing,
        "Keys": "num_keys",
        "Sessions": "num_sessions",
        "Models": "num_models",
        "Disk": lambda user: size(user.disk_bytes),
        "Queued": "num_queued",
        "Running": "num_running",
    },
)


@admin.command()
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Most users to show.")
@click.option("--offset", type=click.IntRange(0), default=0, help="Users to leave out first.")
@pass_state
def users(state: State, /, limit: int, offset: int) -> None:
    """List users, what they hold and what they have under way. Needs an admin key."""
    with state.admin() as client:
        answer = client.list_users(limit, offset).result()
    title = f"Users ({len(answer.users)} of {answer.cursor.total_count})"
    state.show(_USERS.table(answer.users, title=title), plain(answer, rfc3339=True))
    for user in answer.users:
        if user.paused_until:
            state.note(f"{user.user_id}: {user.pause_reason}. `tinkex admin unpause` ends it.")


@admin.command()
@click.option("--by", type=click.Choice(["user", "key", "run"]), default="user", help="Of whom.")
@click.option("--hours", type=click.IntRange(1, 744), default=24, help="How far to look back.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Most lines to show.")
@pass_state
def usage(state: State, /, by: Literal["user", "key", "run"], hours: int, limit: int) -> None:
    """Tokens and device seconds of each user, key or run. Needs an admin key."""
    with state.admin() as client:
        answer = client.get_usage(by, hours, limit).result()
    heads = {"user": ("User",), "key": ("Key", "Name", "User"), "run": ("Run", "User")}
    rows = [
        (*_whose(by, usage), *(_count(kind, usage.counts.get(kind, 0.0)) for kind in _USED))
        for usage in answer.usage
    ]
    title = f"Usage by {by}, last {hours} hours"
    table = Table(title=title, columns=(*heads[by], *_USED.values()), rows=rows)
    state.show(table, plain(answer, rfc3339=True))


_USED = {
    "training": "Trained",
    "sampling_prefill": "Read",
    "sampling_prefill_cached": "Cached",
    "sampling_sample": "Sampled",
    "device_seconds": "Device s",
}


def _count(kind: str, number: float) -> float:
    return round(number, 1) if kind == "device_seconds" else int(number)  # seconds, or tokens


def _whose(by: str, usage: AdminUsage) -> tuple[Any, ...]:
    if by == "key":
        return usage.key_id or "none", usage.key_name or "", usage.user_id
    return (usage.run_id or "base models", usage.user_id) if by == "run" else (usage.user_id,)


@admin.command()
@_user
@_reason
@pass_state
def disable(state: State, /, user: str, reason: str) -> None:
    """Refuse a user and end their work; what they stored is kept. Needs an admin key."""
    with state.admin() as client:
        num_ended = client.disable_user(user, reason).result().num_ended
    _told(state, {"user": user, "state": "disabled", "num_ended": num_ended})


@admin.command()
@_user
@pass_state
def enable(state: State, /, user: str) -> None:
    """Let a disabled user in again. Needs an admin key."""
    with state.admin() as client:
        client.enable_user(user).result()
    _told(state, {"user": user, "state": "active"})


@admin.command()
@_user
@pass_state
def unpause(state: State, /, user: str) -> None:
    """Run the work again of a user whose jobs ended workers. Needs an admin key."""
    with state.admin() as client:
        client.lift_pause(user).result()
    _told(state, {"user": user, "state": "active"})


@admin.command()
@click.option("--user", help="End everything this user has queued and running.")
@click.option("--session", help="End this session and its work; it takes nothing more.")
@click.option("--run", help="End what this run has queued and running; its client goes on.")
@_reason
@pass_state
def stop(
    state: State, /, user: str | None, session: str | None, run: str | None, reason: str
) -> None:
    """End work of a user, a session or a run. Needs an admin key."""
    named = [(k, v) for k, v in (("user", user), ("session", session), ("run", run)) if v]
    if len(named) != 1:
        raise click.UsageError("Name one of --user, --session and --run.")
    kind, name = named[0]
    with state.admin() as client:
        ends = {"user": client.stop_user, "session": client.stop_session, "run": client.stop_run}
        num_ended = ends[kind](name, reason).result().num_ended
    _told(state, {kind: name, "num_ended": num_ended})


@admin.command("delete-run")
@click.argument("run_id")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@pass_state
def delete_run(state: State, /, run_id: str, yes: bool) -> None:
    """Delete a run of any user for good, as its owner could. Needs an admin key."""
    if not yes:
        question = f"Delete the run {run_id} and all its checkpoints for good?"
        click.confirm(question, abort=True, err=True)
    with state.admin() as client:
        deleted = client.delete_run(run_id).result()
    freed = f"{deleted.num_checkpoints} checkpoints, {size(deleted.freed_bytes)}"
    state.show(f"Deleted the run {run_id}: {freed}.", deleted)


def _told(state: State, facts: dict[str, Any]) -> None:
    names = {"num_ended": "Requests ended"}
    shown = {names.get(name, name.capitalize()): value for name, value in facts.items()}
    state.show(properties(None, shown), facts)


# ------------------------------------------------------------------------------------ data


def _data_dir(given: Path | None) -> Path:
    from tinkex.server.process.config import load_config

    flags: dict[str, Any] = {} if given is None else {"data_dir": given}
    return load_config(flags=flags).data_dir


def _show_adopted(state: State, data_dir: Path, adopted: Adopted) -> None:
    def told(runs: list[WholeRun]) -> list[dict[str, Any]]:
        return [{"run_id": run.model_id, "name": run.name, "user": run.user_id} for run in runs]

    num_bytes = sum(saved.size_bytes for run in adopted.runs for saved in run.checkpoints)
    facts: dict[str, Any] = {"Data folder": str(data_dir), "Adopted": len(adopted.runs)}
    facts |= {"Bytes": size(num_bytes), "Here already": len(adopted.there)}
    facts |= {f"Refused: {run_id}": why for run_id, why in adopted.refused.items()}
    if adopted.names_in_use:
        facts["Names in use here"] = ", ".join(adopted.names_in_use)
    body = {
        "data_dir": str(data_dir),
        "adopted": told(adopted.runs),
        "there": told(adopted.there),
        "refused": adopted.refused,
        "names_in_use": adopted.names_in_use,
    }
    state.show(properties(None, facts), body)
    if adopted.refused:
        raise click.exceptions.Exit(1)


def _show(state: State, found: Found, facts: dict[str, Any]) -> None:
    facts |= {"Listed folders": found.num_listed, "Missing": len(found.missing)}
    if found.num_stored:
        facts["In the object store"] = found.num_stored
    facts["Not listed"] = len(found.strays)
    facts["Damaged"] = "; ".join(found.damaged) or "none"
    facts["Problems"] = "; ".join(found.problems) or "none"
    body = {
        "num_listed": found.num_listed,
        "missing": found.missing,
        "num_stored": found.num_stored,
        "strays": found.strays,
        "damaged": found.damaged,
        "problems": found.problems,
        "ok": found.ok,
    }
    state.show(properties(None, facts), body)
    if not found.ok:
        raise click.exceptions.Exit(1)
