"""`interpolate_checkpoints`: what it makes of checkpoints, for whom, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from app_world import AppWorld, open_app
from datums import datum
from patience import soon
from safetensors.numpy import load_file
from server_process import ServerProcess
from tiny_llama import tiny_llama
from wire_client import optim_body

from tinkex import ServiceClient, TrainingClient, types
from tinkex.cluster import job_paths
from tinkex.engine.jobs import LoadAdapterJob
from tinkex.errors import TinkerError

ADAM = types.AdamParams(learning_rate=0.05)
KEYS = ("tml-ann=ann", "tml-bob=bob")
PATH = "mint/checkpoints/interpolate"


# ------------------------------------------------------------------------------------ real weights


def trained(training: TrainingClient, name: str, tokens: list[int]) -> str:
    training.forward_backward([datum(tokens)], "cross_entropy").result()
    training.optim_step(ADAM).result()
    return training.save_weights_for_sampler(name).result().path


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixing")


@pytest.fixture(scope="module")
def torch_service(torch_folder: Path) -> Iterator[ServiceClient]:
    folder = torch_folder
    for name in "ab":
        tiny_llama(folder / name)
    flags = ["--engine", "torch", "--device", "cpu", "--deterministic"]
    flags += [flag for name in "ab" for flag in ("--model", str(folder / name))]
    flags += ["--alias", f"first={folder / 'a'}", "--alias", f"second={folder / 'b'}"]
    with (
        ServerProcess(folder / "server", *flags) as server,
        ServiceClient(base_url=server.base_url, api_key="tml-x") as service,
    ):
        yield service


def matrices(folder: Path, path: str) -> dict[str, Any]:
    """Of a checkpoint, from the disk of the server."""
    name = path.rpartition("/")[2]
    (file,) = folder.glob(f"**/sampler_weights/{name}-*/adapter_model.safetensors")
    return dict(load_file(file))


def test_the_matrices_are_the_sums_of_the_sources_times_their_coefficients(
    torch_service: ServiceClient, torch_folder: Path
) -> None:
    training = torch_service.create_lora_training_client("first", rank=4, seed=1).result()
    paths = [trained(training, f"s{n}", list(range(n + 3, n + 15))) for n in range(3)]
    coefficients = [0.5, 0.75, -0.25]
    made = torch_service.interpolate_checkpoints(paths, coefficients, "between").result()
    assert made.path == f"tinker://{training.model_id}/sampler_weights/between"
    assert (made.source_paths, made.coefficients) == (paths, coefficients)
    found = matrices(torch_folder, made.path)
    sources = [matrices(torch_folder, path) for path in paths]
    assert found.keys() == sources[0].keys()
    for name, matrix in found.items():
        expected = sum(c * s[name] for c, s in zip(coefficients, sources, strict=True))
        assert (abs(matrix - expected) <= 1e-6).all(), name
    whole = torch_service.interpolate_checkpoints(paths[:2], [1.0, 0.0]).result()
    same = matrices(torch_folder, whole.path)
    assert all((same[name] == matrix).all() for name, matrix in sources[0].items())
    sampler = torch_service.create_sampling_client(model_path=whole.path).result()
    original = torch_service.create_sampling_client(model_path=paths[0]).result()
    prompt = types.ModelInput.from_ints([3, 5, 7, 9])
    assert sampler.compute_logprobs(prompt).result() == original.compute_logprobs(prompt).result()


def test_adapters_that_cannot_be_added_are_refused_by_name(torch_service: ServiceClient) -> None:
    def made(base: str, **lora: Any) -> str:
        training = torch_service.create_lora_training_client(base, **lora).result()
        return training.save_weights_for_sampler("x").result().path

    four, eight = made("first", rank=4), made("first", rank=8)
    other, parts = made("second", rank=4), made("first", rank=4, train_mlp=False)
    for second, said in ((eight, "rank=8"), (other, "was trained on"), (parts, "train_mlp=False")):
        with pytest.raises(TinkerError, match=said):
            torch_service.interpolate_checkpoints([four, second], [0.5, 0.5]).result()
    with pytest.raises(TinkerError, match="1 coefficients for 2|at least 2|2 items"):
        torch_service.interpolate_checkpoints([four, four], [0.5]).result()


def test_a_node_is_sent_every_folder_of_a_mixture() -> None:
    job = LoadAdapterJob(
        job_id="j",
        adapter_id="a",
        base_model="b",
        folder="/x/1",
        with_optimizer=False,
        mixture=(("/x/1", 0.5), ("/x/2", 0.25), ("/x/1", 0.25)),
    )
    assert job_paths.reads(job) == ("/x/1", "/x/2")
    there = job_paths.moved(job, lambda path: Path("/node") / Path(path).name)
    assert there.folder == "/node/1"
    assert there.mixture == (("/node/1", 0.5), ("/node/2", 0.25), ("/node/1", 0.25))


# ------------------------------------------------------------------------------------ toy


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    async with open_app(tmp_path, api_keys=KEYS) as opened:
        yield opened


async def checkpoints(world: AppWorld, key: str = "tml-ann", count: int = 2) -> list[str]:
    """Of one run, a step apart."""
    model, paths = await world.model(key=key), []
    for n in range(count):
        first = 3 * n + 1
        train = (await world.train(model, first, [n + 3, n + 4, n + 5], key=key)).json()
        await world.result(train, key=key)
        await world.result(
            await world.ok("optim_step", optim_body(model, first + 1), key=key), key=key
        )
        body = {"model_id": model, "seq_id": first + 2, "path": f"s{n}"}
        promise = await world.ok("save_weights_for_sampler", body, key=key)
        paths.append((await world.result(promise, key=key))["path"])
    return paths


def asked(paths: list[str], *coefficients: float, **more: Any) -> dict[str, Any]:
    return {"source_paths": paths, "coefficients": list(coefficients), **more}


async def mixed(world: AppWorld, body: dict[str, Any], key: str = "tml-ann") -> dict[str, Any]:
    return dict(await world.result(await world.ok(PATH, body, key=key), key=key))


async def test_a_repeat_gives_the_first_ones_checkpoint_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        paths = await checkpoints(world)
        body = asked(paths, 0.5, 0.5, output_path="mean")
        promises = await asyncio.gather(*(world.ok(PATH, body, key="tml-ann") for _ in range(3)))
        made = await mixed(world, body)
        assert {promise["request_id"] for promise in promises} == {promises[0]["request_id"]}
        unnamed = await mixed(world, asked(paths, 0.9, 0.1))
        assert unnamed == await mixed(world, asked(paths, 0.9, 0.1))
        assert unnamed["path"] != made["path"]
        usage = [
            row for row in await _listed(world, made["path"]) if row["tinker_path"] == made["path"]
        ]
        assert len(usage) == 1
        assert usage[0]["user_metadata"]["sources"] == " ".join(paths)
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert await world.result(promises[0], key="tml-ann") == made
        assert await mixed(world, body) == made
        answer = await world.post("retrieve_future", promises[0], key="tml-bob")
        assert answer.status_code == 404


async def _listed(world: AppWorld, path: str) -> list[dict[str, Any]]:
    run = path.split("/")[2]
    found = await world.call("GET", f"/training_runs/{run}/checkpoints", 200)
    return list(found["checkpoints"])


async def test_a_name_that_is_taken_by_something_else_is_refused(world: AppWorld) -> None:
    paths = await checkpoints(world)
    await mixed(world, asked(paths, 0.5, 0.5, output_path="mean"))
    for body in (
        asked(paths, 0.4, 0.6, output_path="mean"),
        asked(paths, 0.5, 0.5, output_path="s0"),
    ):
        answer = await world.post(PATH, body, key="tml-ann")
        assert answer.status_code in (400, 422), answer.text
        assert "exists already" in answer.text
    names = {row["checkpoint_id"] for row in await _listed(world, paths[0])}
    assert names == {f"sampler_weights/{name}" for name in ("s0", "s1", "mean")}


async def test_only_checkpoints_that_the_caller_may_read_are_mixed(world: AppWorld) -> None:
    theirs, mine = await checkpoints(world), await checkpoints(world, "tml-bob")
    for paths in (theirs, [mine[0], theirs[0]]):
        answer = await world.post(PATH, asked(paths, 0.5, 0.5), key="tml-bob")
        assert answer.status_code == 404, answer.text
    run, name = theirs[0].split("/")[2], theirs[0].rsplit("/", 1)[1]
    await world.call(
        "POST", f"/training_runs/{run}/checkpoints/sampler_weights/{name}/publish", 204
    )
    # In a run of the caller's own, for nobody saves into another one's.
    made = await mixed(world, asked([theirs[0], mine[0]], 0.5, 0.5), "tml-bob")
    assert made["path"].split("/")[2] not in (run, mine[0].split("/")[2])
    again = await mixed(world, asked([theirs[0], mine[0]], 0.5, 0.5), "tml-bob")
    assert again == made


async def test_the_right_to_read_is_looked_at_when_the_work_runs(world: AppWorld) -> None:
    """A source that is no longer shared when its turn comes is not read."""
    theirs, mine = await checkpoints(world), await checkpoints(world, "tml-bob")
    run = theirs[0].split("/")[2]
    where = f"/training_runs/{run}/checkpoints/sampler_weights/s0/publish"
    await world.call("POST", where, 204)
    gate = world.service.workers.training
    held = [gate.slot(f"other-{n}") for n in range(world.parts.config.max_running_training)]
    for slot in held:
        await slot.__aenter__()
    body = asked([mine[0], theirs[0]], 0.5, 0.5, output_path="stolen")
    asking = asyncio.create_task(world.post(PATH, body, key="tml-bob"))
    await soon(lambda: gate.num_waiting == 1)
    await world.call("DELETE", where, 204)
    for slot in held:
        await slot.__aexit__(None, None, None)
    answer = await asking
    assert answer.status_code == 404, answer.text
    names = {row["checkpoint_id"] for row in await _of(world, mine[0])}
    assert "sampler_weights/stolen" not in names


async def _of(world: AppWorld, path: str) -> list[dict[str, Any]]:
    run = path.split("/")[2]
    found = await world.call("GET", f"/training_runs/{run}/checkpoints", 200, key="tml-bob")
    return list(found["checkpoints"])


async def test_a_mixture_counts_against_the_disk_quota(world: AppWorld) -> None:
    paths = await checkpoints(world)
    stored = world.service.store.stored.total("ann")
    world.parts.quotas._defaults["disk_bytes"] = stored + 1
    answer = await world.post(PATH, asked(paths, 0.5, 0.5), key="tml-ann")
    assert answer.status_code in (400, 413, 429, 507), answer.text
    assert "disk" in answer.text
    assert len(await _listed(world, paths[0])) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source_paths": ["tinker://x/sampler_weights/y"]}, "source_paths"),
        ({"coefficients": [0.5]}, "coefficients"),
        ({"coefficients": [0.5, 2000.0]}, "coefficients"),
        ({"coefficients": [0.5, 0.5, 0.5]}, "3 coefficients for 2"),
        ({"output_path": "../x"}, "output_path"),
        ({"output_checkpoint_type": "training"}, "output_checkpoint_type"),
        ({"source_paths": ["mint://a", "mint://b"]}, "tinker://"),
    ],
)
async def test_what_is_wrong_is_named(world: AppWorld, change: dict[str, Any], said: str) -> None:
    paths = await checkpoints(world)
    answer = await world.post(PATH, {**asked(paths, 0.5, 0.5), **change}, key="tml-ann")
    assert answer.status_code in (400, 422), answer.text
    assert said in answer.text
