"""An archive is a stranger's file: it costs what it weighs, and what is in it runs nothing."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import hostile_tar
import numpy as np
import pytest
from app_world import AppWorld
from patience import soon

from tinkex.client.service import downloads
from tinkex.engine.lora.patterns import ModulePatterns
from tinkex.errors import ConfigError, InvalidInputError, NotSupportedError
from tinkex.server.files import backup

REAL_BYTES = 3 * 1024**3
CONFIG = {"r": 8, "peft_type": "LORA", "base_model_name_or_path": "toy"}


async def _import(world: AppWorld, body: bytes, status: int = 400) -> str:
    answer = await world.post(
        "checkpoints/import", body, headers={"content-type": "application/x-tar"}
    )
    assert answer.status_code == status, answer.text
    return answer.text


async def test_a_file_with_holes_is_not_imported(app_world: AppWorld, tmp_path: Path) -> None:
    body = hostile_tar.sparse("adapter_model.safetensors", REAL_BYTES)
    assert len(body) < 5000
    assert "sparse" in await _import(app_world, body)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) < 50_000_000


def test_a_file_with_holes_is_not_downloaded(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(hostile_tar.sparse("adapter_model.safetensors", REAL_BYTES))
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidInputError, match="sparse"):
        downloads.extract_archive(archive, tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


async def test_a_header_of_digits_holds_nobody_up(app_world: AppWorld) -> None:
    """`tarfile` takes the square of its length, in which no other thread of the process runs."""
    answers: list[float] = []

    async def ask_on() -> None:
        while True:
            assert (await app_world.http.get("/api/v1/healthz")).status_code == 200
            answers.append(time.perf_counter())
            await asyncio.sleep(0.01)

    others = asyncio.create_task(ask_on())
    await soon(lambda: answers)
    started = time.perf_counter()
    said = await _import(app_world, hostile_tar.digits(200_000))
    num_answers = len(answers)
    await soon(lambda: len(answers) > num_answers)
    others.cancel()
    gaps = np.diff([started, *(moment for moment in answers if moment > started)])
    assert gaps.max() < 20  # 51 s before
    assert "an extended header has 200000 bytes, at most 65536" in said


@pytest.mark.parametrize("name", ["._adapter_config.json", ".gitattributes", "adapter/a.json"])
async def test_an_import_with_other_files_is_told_how_to_pack(
    app_world: AppWorld, name: str
) -> None:
    """As tar on a Mac, or of a whole folder, packs them."""
    config = ("adapter_config.json", json.dumps(CONFIG).encode())
    said = await _import(app_world, hostile_tar.plain(config, (name, b"{}")))
    assert name in said
    assert "tar -cf a.tar -C FOLDER adapter_config.json" in said


async def test_names_chained_without_end_are_not_imported(app_world: AppWorld) -> None:
    assert "two extended headers" in await _import(app_world, hostile_tar.chained_names(3000))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (hostile_tar.digits(200_000), "an extended header has 200000 bytes"),
        (hostile_tar.chained_names(3000), "two extended headers"),
        (hostile_tar.folders(20_000), "over 10000 files and folders"),
    ],
    ids=["digits", "names", "folders"],
)
def test_an_archive_that_costs_more_than_it_weighs_is_not_downloaded(
    tmp_path: Path, body: bytes, word: str
) -> None:
    archive, out = tmp_path / "a.tar", tmp_path / "out"
    archive.write_bytes(body)
    out.mkdir()
    started = time.thread_time()  # of this thread alone: others keep the machine busy
    with pytest.raises(InvalidInputError, match=word):
        downloads.extract_archive(archive, out)
    assert time.thread_time() - started < 20
    assert sum(1 for _ in out.iterdir()) <= 10_001


def test_a_backup_that_was_tampered_with_is_not_restored(tmp_path: Path) -> None:
    mark = ("tinkex-backup.txt", b"made")
    for body in (
        hostile_tar.plain(mark, ("../evil", b"x")),
        hostile_tar.plain(mark, mark),
        hostile_tar.header(b"x", b"1" * 200_000) + hostile_tar.plain(mark),
        hostile_tar.plain(mark)[:1024],
        hostile_tar.plain(("other", b"")),
        bytes(1024),
    ):
        (tmp_path / "copy.tar").write_bytes(body)
        with pytest.raises(ConfigError, match=r"is no (whole )?backup"):
            backup.restore(tmp_path / "copy.tar", tmp_path / "deep" / "new")
        assert not list(tmp_path.rglob("evil"))
        assert not list((tmp_path / "deep").iterdir())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("adapter_config.json", {"r": 8, "lora_alpha": "x"}),
        ("adapter_config.json", {"r": True}),
        ("adapter_config.json", []),
        ("adapter_config.json", {"r": 8, "target_modules": [1, {}]}),
        ("x" * 300, CONFIG),
        ("a\tb", CONFIG),
        (".hidden", CONFIG),
        ("../up", CONFIG),
    ],
)
async def test_an_odd_import_is_refused_and_leaves_nothing(
    app_world: AppWorld, tmp_path: Path, name: str, config: Any
) -> None:
    said = await _import(app_world, hostile_tar.plain((name, json.dumps(config).encode())))
    assert str(tmp_path) not in said
    for task in list(app_world.service.shelf._clearing):
        await task
    assert list((tmp_path / "checkpoints").rglob("*")) == []


@pytest.mark.parametrize("levels", [500, 990, 100_000])
@pytest.mark.parametrize("name", ["tinkex.json", "checkpoint_complete.json"])
async def test_a_deep_manifest_is_refused_or_harmless(
    app_world: AppWorld, name: str, levels: int
) -> None:
    deep = b'{"content_sha256": "0", "a": ' + b'{"a": ' * levels + b"1" + b"}" * (levels + 1)
    files = [("adapter_config.json", json.dumps(CONFIG).encode()), (name, deep)]
    await _import(app_world, hostile_tar.plain(*files))


async def test_a_config_nested_without_end_is_refused(app_world: AppWorld) -> None:
    deep = b'{"r": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    await _import(app_world, hostile_tar.plain(("adapter_config.json", deep)))


@pytest.mark.parametrize(
    "pattern",
    ["(a|a|ab)" * 30 + "$", "((a+)+)+", "(.*.*.*)x", "[a-z]", "a{9}", "x" * 1000, ".*a" * 9],
)
def test_no_expression_of_a_strangers_folder_is_run(pattern: str) -> None:
    started = time.perf_counter()
    with pytest.raises(NotSupportedError):
        ModulePatterns({pattern: 1}, field="alpha_pattern")
    assert time.perf_counter() - started < 60  # run, the first one takes hours


def test_what_people_write_in_alpha_pattern_means_what_it_means_in_peft() -> None:
    keys = {r"layers\.0\..*q_proj": 1, "mlp.up_proj|down_proj": 2, "model.layers.1.k_proj": 3}
    patterns = ModulePatterns(keys, field="alpha_pattern")
    expected = {
        "model.layers.0.self_attn.q_proj": 1,
        "model.layers.10.self_attn.q_proj": 9,
        "model.layers.3.mlp.up_proj": 2,
        "model.layers.3.mlp.down_proj": 2,
        "model.layers.3.xdown_proj": 9,
        "model.layers.1.k_proj": 3,
    }
    assert {module: patterns.get(module, 9) for module in expected} == expected


def test_the_worst_map_of_patterns_ends_soon() -> None:
    keys = {f"{'a.*' * 8}{n}": 1 for n in range(60)} | {f"name{n}": 2 for n in range(9000)}
    patterns = ModulePatterns(keys, field="alpha_pattern")
    started = time.thread_time()  # of this thread alone: others keep the machine busy
    for n in range(500):
        patterns.get("model." + "a." * 100 + f"b{n}", 0)
    assert time.thread_time() - started < 10
