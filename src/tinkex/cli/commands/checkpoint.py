"""`tinkex checkpoint ...`: everything one does to saved weights short of training on.

PATH is a checkpoint's path, its short name, or a run, which stands for its last checkpoint to
sample from; the command talks to the server of this machine that has it.
Downloads and pushes are done by `tinkex.client.service.downloads`; this module asks and reports.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tinkex.cli.arguments import paging_options, run_or_path_argument
from tinkex.cli.commands.checkpoint_delete import delete
from tinkex.cli.commands.checkpoint_upload import upload
from tinkex.cli.listing import Listing, collect
from tinkex.cli.names import resolve_checkpoint, resolve_start, run_of
from tinkex.cli.output import print_json, properties, size, span
from tinkex.cli.state import Noun, State, pass_state

_PAGE = 1000
_SEARCH_PAGE = 200
_CHECKPOINTS = Listing(
    "checkpoints",
    "Checkpoints",
    {
        "Checkpoint ID": "checkpoint_id",
        "Type": "checkpoint_type",
        "Size": lambda item: size(item.size_bytes),
        "Public": "public",
        "Created": "time",
        "Expires": lambda item: item.expires_at or "Never",
        "Path": "tinker_path",
    },
)
_FOUND = replace(_CHECKPOINTS, columns={**_CHECKPOINTS.columns, "Base Model": "base_model"})
_NAMES = Listing("names", "", {"Name": "name", "Path": "path"})


@click.group(cls=Noun)
def checkpoint() -> None:
    """List, publish, download and delete checkpoints."""


checkpoint.add_command(delete)
checkpoint.add_command(upload)


@checkpoint.command("list")
@click.option("--run-id", help="Only this run's checkpoints; its id or name.")
@paging_options
@pass_state
def list_(state: State, run_id: str | None, limit: int, offset: int) -> None:
    """List checkpoints, newest first."""
    total: int | None
    run_id = run_id and run_of(state, run_id)
    with state.rest() as rest:
        if run_id:
            checkpoints = rest.list_checkpoints(run_id).result().checkpoints
            rows, total = checkpoints[offset:][: limit or None], max(offset, len(checkpoints))
        else:
            rows, total = collect(
                rest.list_user_checkpoints, "checkpoints", limit=limit, offset=offset, page=_PAGE
            )
    run = {"run_id": run_id} if run_id else {}
    state.show(_CHECKPOINTS.table(rows, total), {**run, "checkpoints": rows})


@checkpoint.command()
@click.option("--project", "projects", multiple=True, help="Only of this project; repeatable.")
@click.option("--base-model", "bases", multiple=True, help="Only of this model; repeatable.")
@click.option(
    "--type",
    "type_",
    type=click.Choice(["training", "sampler", "external"]),
    help="Only this kind.",
)
@click.option("--metadata", "pairs", multiple=True, metavar="KEY=VALUE", help="Saved with this.")
@click.option("--limit", type=click.IntRange(min=0), default=20, help="Most rows; 0 shows all.")
@pass_state
def search(
    state: State,
    projects: tuple[str, ...],
    bases: tuple[str, ...],
    type_: Any,
    pairs: tuple[str, ...],
    limit: int,
) -> None:
    """Find checkpoints by project, base model, type or metadata, newest first."""
    from tinkex import types

    request = types.CheckpointSearchRequest(
        project_ids=list(projects) or None,
        base_models=list(bases) or None,
        checkpoint_type=type_,
        user_metadata=dict(_pair(pair) for pair in pairs),
    )
    rows: list[types.Checkpoint] = []
    with state.rest() as rest:
        while True:
            want = min(limit - len(rows), _SEARCH_PAGE) if limit else _SEARCH_PAGE
            page = rest.search_checkpoints(request.replaced(limit=want)).result()
            rows += page.checkpoints
            if page.next_cursor is None or (limit and len(rows) >= limit):
                break
            request = request.replaced(cursor=page.next_cursor)
    state.show_items(_FOUND, rows)


def _pair(text: str) -> tuple[str, str]:
    key, is_pair, value = text.partition("=")
    if not is_pair or not key:
        raise click.UsageError(f"--metadata {text!r} is not KEY=VALUE.")
    return key, value


@checkpoint.command()
@click.argument("sources", nargs=-1, required=True, metavar="PATH=COEFFICIENT...")
@click.option("--name", help="The name of the new checkpoint, in the run of the first one.")
@pass_state
def interpolate(state: State, sources: tuple[str, ...], name: str | None) -> None:
    """Add up LoRA matrices of checkpoints, each times its coefficient, to sample from.

    PATH=0.9 PATH=0.1 is a moving average. The checkpoints need one base model and one rank.
    """
    pairs = [_weighted(source) for source in sources]
    paths = [resolve_checkpoint(state, path) for path, _ in pairs]
    with state.rest() as rest:
        response = rest.interpolate_checkpoints(paths, [c for _, c in pairs], name).result()
    parts = " + ".join(f"{c:g} x {path}" for path, (_, c) in zip(paths, pairs, strict=True))
    state.show(
        properties(None, {"Checkpoint": response.path, "Sum of": parts}), response.model_dump()
    )


def _weighted(text: str) -> tuple[str, float]:
    path, is_pair, number = text.rpartition("=")
    try:
        if not is_pair or not path:
            raise ValueError("not a path and a number")
        return path, float(number)
    except ValueError as exc:
        raise click.UsageError(
            f"{text!r} is not PATH=COEFFICIENT, such as tinker://RUN/sampler_weights/NAME=0.5."
        ) from exc


@checkpoint.command()
@run_or_path_argument
@pass_state
def info(state: State, path: str) -> None:
    """Show one checkpoint."""
    from tinkex.types import ParsedCheckpointTinkerPath

    path = resolve_checkpoint(state, path)
    run_id = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    with state.rest() as rest:
        of_run = {
            item.tinker_path: item for item in rest.list_checkpoints(run_id).result().checkpoints
        }
        if path not in of_run:
            raise click.ClickException(
                f"No checkpoint {path}. See `tinkex checkpoint list --run-id {run_id}`."
            )
        weights = rest.get_weights_info_by_tinker_path(path).result()
    item = of_run[path]
    extra = {"is_lora": weights.is_lora, "lora_rank": weights.lora_rank}
    shown = {
        **_CHECKPOINTS.cells(item),
        "Base Model": weights.base_model,
        "LoRA": f"Rank {weights.lora_rank}" if weights.lora_rank else weights.is_lora,
        **{f"Metadata: {key}": value for key, value in (item.user_metadata or {}).items()},
    }
    state.show(
        properties(f"Checkpoint {item.checkpoint_id}", shown), {**item.model_dump(), **extra}
    )


@checkpoint.command()
@click.argument("name")
@click.option("--base-model", help="Start a fresh adapter on this model.")
@click.option("--from", "source", help="Or take this checkpoint, or a run's last one.")
@click.option("--rank", type=click.IntRange(min=1), default=32, help="LoRA rank of a fresh one.")
@click.option("--seed", type=int, help="Seed of a fresh one's weights.")
@click.option("--sampler", is_flag=True, help="For sampling only, without optimizer state.")
@click.option("--ttl", type=int, metavar="SECONDS", help="Delete it this long from now.")
@pass_state
def save(
    state: State,
    name: str,
    base_model: str | None,
    source: str | None,
    rank: int,
    seed: int | None,
    sampler: bool,
    ttl: int | None,
) -> None:
    """Save a checkpoint called NAME."""
    if (base_model is None) == (source is None):
        raise click.UsageError("Give exactly one of --base-model and --from.")
    source = source and resolve_start(state, source)
    with state.service() as service:
        if source is not None:
            training = service.create_training_client_from_state(source)
        else:
            assert base_model is not None
            training = service.create_lora_training_client(base_model, rank=rank, seed=seed)
        if sampler:
            path = training.save_weights_for_sampler(name, ttl_seconds=ttl).result().path
        else:
            path = training.save_state(name, ttl_seconds=ttl).result().path
    state.show(
        properties(None, {"Checkpoint": path, "Run": training.model_id}),
        {"tinker_path": path, "training_run_id": training.model_id},
    )


@checkpoint.command()
@run_or_path_argument
@pass_state
def publish(state: State, path: str) -> None:
    """Let every user of the server read a checkpoint."""
    path = resolve_checkpoint(state, path)
    with state.rest() as rest:
        rest.publish_checkpoint_from_tinker_path(path).result()
    _done(state, f"Published: every user of the server may read {path}", path=path, public=True)


@checkpoint.command()
@run_or_path_argument
@pass_state
def unpublish(state: State, path: str) -> None:
    """Keep a checkpoint to yourself again."""
    path = resolve_checkpoint(state, path)
    with state.rest() as rest:
        rest.unpublish_checkpoint_from_tinker_path(path).result()
    _done(state, f"Private: only you may read {path}", path=path, public=False)


@checkpoint.command("set-ttl")
@run_or_path_argument
@click.option("--ttl", type=int, metavar="SECONDS", help="Delete it this long from now.")
@click.option("--remove", is_flag=True, help="Keep it until someone deletes it.")
@pass_state
def set_ttl(state: State, path: str, ttl: int | None, remove: bool) -> None:
    """Set or remove a checkpoint's time to live."""
    if (ttl is None) == (not remove):
        raise click.UsageError("Give exactly one of --ttl SECONDS and --remove.")
    path = resolve_checkpoint(state, path)
    with state.rest() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(path, ttl).result()
    until = "stays until it is deleted" if ttl is None else f"expires in {span(ttl)}"
    _done(state, f"{path} {until}", path=path, ttl_seconds=ttl)


@checkpoint.command()
@run_or_path_argument
@click.argument("name")
@pass_state
def name(state: State, path: str, name: str) -> None:
    """Give a checkpoint a short NAME, for OpenAI and Anthropic clients and for yourself."""
    path = resolve_checkpoint(state, path)
    with state.rest() as rest:
        rest.name_checkpoint(path, name).result()
    _done(state, f"{name} is {path}", path=path, name=name)


@checkpoint.command()
@click.argument("name")
@pass_state
def unname(state: State, name: str) -> None:
    """Take a short NAME back; its checkpoint stays."""
    with state.rest() as rest:
        rest.remove_checkpoint_name(name).result()
    _done(state, f"{name} is no name any more", name=name)


@checkpoint.command()
@pass_state
def names(state: State) -> None:
    """List the short names of your checkpoints."""
    with state.rest() as rest:
        state.show_items(_NAMES, rest.list_checkpoint_names().result().names)


def _done(state: State, words: str, **facts: Any) -> None:
    """Say on stderr what was done; a program reads it as JSON from stdout."""
    state.note(words)
    if state.format == "json":
        print_json(facts)


@checkpoint.command()
@run_or_path_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Parent folder of the download; the current one by default.",
)
@click.option("--force", is_flag=True, help="Replace a folder of that name.")
@pass_state
def download(state: State, path: str, output: Path | None, force: bool) -> None:
    """Download a checkpoint as a PEFT folder named <run>_<kind>_<name>."""
    from tinkex.cli.downloads import fetch_folder, folder_name

    path = resolve_checkpoint(state, path)
    folder = (output or Path()) / folder_name(path)
    num_bytes = fetch_folder(state, path, folder, force=force)
    state.show(
        properties(None, {"Checkpoint": path, "Destination": folder, "Size": size(num_bytes)}),
        {"checkpoint_path": path, "destination": str(folder), "file_size_bytes": num_bytes},
    )


@checkpoint.command("push-hf")
@run_or_path_argument
@click.option("-r", "--repo", help="Repository, USER/NAME; made from the path by default.")
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--revision", help="Branch to push to.")
@click.option("--commit-message", help="What the commit says.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of pushing.")
@click.option("--allow-pattern", multiple=True, help="Push only files like this; repeatable.")
@click.option("--ignore-pattern", multiple=True, help="Leave out files like this; repeatable.")
@click.option("--no-model-card", is_flag=True, help="Write no README.md.")
@pass_state
def push_hf(
    state: State,
    /,
    path: str,
    repo: str | None,
    public: bool,
    revision: str | None,
    no_model_card: bool,
    **options: Any,
) -> None:
    """Push a checkpoint to the Hugging Face hub as a PEFT adapter."""
    from tinkex.cli.downloads import folder_name, push_to_hub

    path = resolve_checkpoint(state, path)
    repo_id = repo or folder_name(path)
    options |= {"public": public, "revision": revision, "model_card": not no_model_card}
    push_to_hub(state, path, repo_id, **options)
    state.show(
        properties(
            None,
            {"Checkpoint": path, "Repository": repo_id, "Revision": revision, "Public": public},
        ),
        {
            "checkpoint_path": path,
            "repo_id": repo_id,
            **({"revision": revision} if revision else {}),
            "public": public,
        },
    )
