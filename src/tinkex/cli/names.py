"""The meaning of a name on the command line: a checkpoint, a run, a base model; on which server.

A name means what it means to the server (`server/compat/model_names.py` has the order), which is
asked by the route that OpenAI clients use. A run of this machine is known by its folder, too, which
remembers its server and its last checkpoint; where nobody named a server, a name that no folder has
is asked of the other servers of this machine as well, and so is a checkpoint's path. A folder, and
a name with a slash, which is a model of the hub, are not asked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from tinkex.cli.address import detail_of, resolve_address, send
from tinkex.cli.arguments import near_runs
from tinkex.cli.state import State
from tinkex.errors import LocalServerError, ModelNotFoundError
from tinkex.runs.names import NamedRun, find, find_path, known
from tinkex.types.account.checkpoints import TinkerPath, is_tinker_path
from tinkex.wire.endpoints import API
from tinkex.wire.local_servers import living_servers, private_data_folder

if TYPE_CHECKING:
    import httpx

_NOT_IN_IDS = re.compile(r"[/?#% ]")


def resolve(state: State, text: str) -> str:
    """A name as the path of a checkpoint, or as the base model that it is.

    The state then talks to the server that has it.

    Raises:
        ModelNotFoundError: No server here knows it; the text has near names.
    """
    if is_tinker_path(text):
        _go_to_server_of(state, text)
        return text
    if (run := find(text)) is not None:
        go_to(state, run)
        if (other := _of_server(state, text, run)) is not None:
            return other
        return find_path(text) or text
    if "/" in text or Path(text).exists():
        return text  # a model of the Hugging Face hub, or a folder or file of one
    return _asked(state, text)


def resolve_checkpoint(state: State, text: str) -> str:
    """A name as the path of a checkpoint.

    Raises:
        ModelNotFoundError: It is none; the text has near names.
    """
    path = resolve(state, text)
    if not is_tinker_path(path):
        raise ModelNotFoundError(
            f"{text!r} is neither a checkpoint, which looks like tinker://RUN/weights/NAME, nor a "
            f"run.{near_names(state, text)}"
        )
    return path


def go_to(state: State, run: NamedRun) -> None:
    """Talk to the server that has a run, unless the command names another one.

    That is the one its folder names; when it was on this machine and is gone, the one here that has
    the run: it was started on another port, or another server adopted its runs.
    """
    from tinkex.client.config import is_loopback

    is_named = state.base_url is not None
    state.go_to(run)
    run_id = _id_of(run)
    if is_named or not run_id or run.server == "local" or not is_loopback(run.server):
        return
    route = _run_route(run_id)
    if _get_if_there(run.server, route) is not None:
        return
    for server in servers_here():
        answer = _get_if_there(server, route)
        if answer is not None and answer.status_code == 200:
            state.base_url = server
            return


def resolve_start(state: State, text: str) -> str:
    """A run or a checkpoint as the path of what to train on from.

    Raises:
        ModelNotFoundError: It is neither; the text has near names.
    """
    if (run := find(text)) is not None:
        go_to(state, run)
        return find_path(text, for_training=True) or text
    if not is_tinker_path(text):
        for server, answer in _answers(state, _run_route(text)):
            last = answer.json().get("last_checkpoint") if answer.status_code == 200 else None
            if last is not None:
                state.base_url = server
                return str(last["tinker_path"])
    return resolve_checkpoint(state, text)


def run_of(state: State, text: str) -> str:
    """A run as its server knows it: by its id, or by the name it has there.

    The state then talks to the server that has it. One that none has is left to the first of them,
    which says so.
    """
    if is_tinker_path(text):
        text = TinkerPath.parse(text).run_id
    elif (run := find(text)) is not None:
        go_to(state, run)
        return _id_of(run) or text
    _go_where_found(state, _run_route(text))
    return _id_by_name(state, text) if _NOT_IN_IDS.search(text) else text


def near_names(state: State, text: str) -> str:
    """A sentence with the names near to `text`: of runs of this machine, and of the server's."""
    named = (str(model["id"]) for model in _listed(state) if model.get("parent"))  # no base models
    offered = [name for name in named if not is_tinker_path(name)]
    if text in offered and "/" in text:
        return (
            f" The server has a run of that name, but a name with '/' is a model of the hub here. "
            f'Call it otherwise: `tinkex run rename "{text}" NAME`.'
        )
    return near_runs(text, offered)


def run_here(state: State, text: str) -> NamedRun | None:
    """The run of this machine that a name, an id, a folder or a path means; None where none is.

    A name that no folder has may have been given later, by `tinkex run rename` or in the console:
    it is asked of the servers of this machine.
    """
    if (run := find(text)) is not None:
        return run
    run_id = TinkerPath.parse(text).run_id if is_tinker_path(text) else text
    for server in (state.base_url, *_others(state)):
        answer = _get_if_there(server, _run_route(run_id))
        if answer is not None and answer.status_code == 200:
            described = answer.json()
            segments = described.get("segments") or ()
            ids = {described["training_run_id"], *(segment["run_id"] for segment in segments)}
            return next((run for run in known() if _id_of(run) in ids), None)
    return None


def servers_here() -> list[str]:
    """The servers of this machine that have runs of this user: private, and `tinkex serve`."""
    private = private_data_folder()
    servers = ["local"] if (private / "tinkex.db").exists() else []
    for record in living_servers():
        is_other = record.get("data_dir") != str(private.resolve())
        if is_other and record.get("needs_key") is False:
            servers.append(str(record.get("base_url")))
    return servers


def _of_server(state: State, text: str, run: NamedRun) -> str | None:
    """The meaning of a run's name to its server, where that is not this run.

    A base model or a checkpoint may have the same name, or a newer run that another program made.
    """
    if not run.is_named or "/" in text or Path(text).is_dir():
        return None  # its folder was named
    answer = _get(state.base_url, _model_route(text))
    if answer.status_code != 200:
        return None  # its server calls it otherwise, or is none of ours
    path = answer.json().get("path")
    if path is None:  # the private server takes any name for a base model of the hub
        return text if any(model["id"] == text for model in _listed(state)) else None
    own = {TinkerPath.parse(p).run_id for p in (run.state_path, run.sampler_path) if p}
    return None if TinkerPath.parse(path).run_id in own else str(path)


def _listed(state: State) -> list[dict[str, Any]]:
    """The models that a command's server lists: base models, named checkpoints, runs."""
    answer = _get_if_there(state.base_url, "/v1/models")
    return list(answer.json()["data"]) if answer is not None and answer.status_code == 200 else []


def _go_to_server_of(state: State, path: str) -> None:
    """Talk to the server of this machine that has a checkpoint, unless the command names one."""
    for run in known():
        if path in (run.state_path, run.sampler_path):
            go_to(state, run)
            return
    _go_where_found(state, _model_route(path))


def _go_where_found(state: State, route: str) -> None:
    if _others(state):
        answers = _answers(state, route)
        having = (server for server, answer in answers if answer.status_code == 200)
        state.base_url = next(having, state.base_url)


def _asked(state: State, text: str) -> str:
    refusal = ""
    offering: list[str | None] = []
    for server, answer in _answers(state, _model_route(text)):
        if answer.status_code == 200 and (path := answer.json().get("path")):
            state.base_url = server
            return str(path)
        if answer.status_code in (404, 400):
            refusal = refusal or detail_of(answer)
        else:  # it offers such a base model, or is none of ours and will say what it knows
            offering.append(server)
    if not offering:
        near = "" if "Did you mean" in refusal else near_runs(text)
        raise ModelNotFoundError(f"{refusal}{near}")
    state.base_url = offering[0]
    return text


def _id_by_name(state: State, name: str) -> str:
    """The id of a run whose name is none that the client takes for an id.

    Raises:
        ModelNotFoundError: The server has no such run; the text has near names.
    """
    if "/" in name:  # the route of a run takes none, that of a model does
        answer = _get(state.base_url, _model_route(name))
        if answer.status_code == 200 and (path := answer.json().get("path")):
            return TinkerPath.parse(path).run_id
        raise ModelNotFoundError(
            f"No training run {name!r} with a checkpoint. Find its id with `tinkex run list`."
        )
    answer = _get(state.base_url, _run_route(name))
    if answer.status_code != 200:
        refusal = detail_of(answer).replace("GET /training_runs", "`tinkex run list`")
        raise ModelNotFoundError(refusal)
    return str(answer.json()["training_run_id"])


def _id_of(run: NamedRun) -> str:
    """The id of the segment that a run's last checkpoint is of; empty before the first one."""
    path = run.state_path or run.sampler_path
    return TinkerPath.parse(path).run_id if path else ""


def _run_route(run: str) -> str:
    return f"{API}/training_runs/{quote(run, safe='')}"


def _model_route(name: str) -> str:
    return f"/v1/models/{quote(name, safe='')}"


def _answers(state: State, route: str) -> Iterator[tuple[str | None, httpx.Response]]:
    """The answers of a command's servers: of its own, which has to answer, then of the others."""
    yield state.base_url, _get(state.base_url, route)
    for server in _others(state):
        if (answer := _get_if_there(server, route)) is not None:
            yield server, answer


def _others(state: State) -> list[str]:
    """The servers of this machine that are asked as well, where no server was named."""
    config = state.config(patient=False)
    is_named = config.base_url != "local" or config.is_private  # by flag or environment
    return [] if is_named else servers_here()


def _get_if_there(server: str | None, route: str) -> httpx.Response | None:
    with contextlib.suppress(click.ClickException, LocalServerError):
        return _get(server, route)
    return None


def _get(server: str | None, route: str) -> httpx.Response:
    with resolve_address(State(base_url=server)) as (base_url, key):
        return send("GET", base_url, route, key)
