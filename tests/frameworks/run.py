"""Run frameworks that speak Tinker against `tinkex serve` and print tables of the results.

`python tests/frameworks/run.py [NAME ...]` runs all of them, unmodified, each in an environment of
its own; exits 1 when a step failed. `--only TEXT` runs the recipes whose name has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.engine.model import default_model

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "peers"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "harness"))
from cached_venv import cache_dir
from cookbook import ANSWERER, MODEL, RECIPES, Recipe
from reports import Report, markdown, rewrite, run_program, table
from servers import Running, serving
from skyrl_tx import serving_skyrl
from stand_ins import make_workplace
from venvs import framework_python

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "frameworks.md"
SOURCE = HERE.parents[1] / "src"
KEPT = cache_dir() / "frameworks"
API_KEY = "tml-framework-key"
RECIPE_TIMEOUT_S = 1800
PROGRAM_TIMEOUT_S = 900
TOGETHER = 2
NAMES = (MODEL, ANSWERER, DEFAULT_MODEL)
"""Names that a program may give a tokenizer by."""
# Column of the table -> (environment, what runs a program in it).
COOKBOOKS = {
    "0.5.8, tinker 0.36.0": ("tinker-cookbook-0.5.8", ()),
    "0.6.1, tinker 0.38.0": ("tinker-cookbook-0.6.1", ()),
    "0.5.8, tinkex": ("tinker-cookbook-0.5.8", ("-m", "tinkex.compat")),
    "0.6.1, tinkex": ("tinker-cookbook-0.6.1", ("-m", "tinkex.compat")),
}
# Framework -> its program, of the folder `programs`.
PROGRAMS = {
    "openpipe-art-0.5.18": "openpipe_art.py",
    "mindlab-toolkit-0.2.0": "mindlab_toolkit.py",
    "trinity-rft-0.5.2": "trinity_rft.py",
    "axolotl-0.19.0": "axolotl_hatchery.py",
    "llmcomp-1.6.0": "llmcomp_finetuning.py",
}
# Servers of other hands, for our client.
SERVERS = {"skyrl-tx-0.3.0": serving_skyrl}


def run_cookbook(column: str, only: str = "") -> Report:
    """Every recipe whose name has `only`, over one server."""
    name, runner = COOKBOOKS[column]
    python = [str(framework_python(name)), *runner]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_workplace(folder / "work", default_model.folder(), *NAMES)
        with _server(folder / "server") as server, ThreadPoolExecutor(TOGETHER) as pool:
            chosen = {name: recipe for name, recipe in RECIPES.items() if only in name}
            run = partial(run_recipe, python, server.base_url, folder / "work", column >= "0.6")
            outcomes = dict(zip(chosen, pool.map(run, chosen.values()), strict=True))
            log = server.log.read_text()[-3000:]
    seconds = time.monotonic() - started
    return Report(column, "", seconds, outcomes, f"--- server\n{log}")


def run_recipe(
    python: list[str], base_url: str, work: Path, is_0_6: bool, recipe: Recipe
) -> tuple[str, str]:
    """One recipe in the workplace: its outcome, and what it said when it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        args = [f"{recipe.model}={MODEL}", *recipe.args, *(recipe.since_0_6 if is_0_6 else ())]
        args += [f"{recipe.log}={log}"] if recipe.log else []
        args += ["behavior_if_log_dir_exists=delete"] if recipe.asks else []
        try:
            done = subprocess.run(
                [*python, "-m", f"tinker_cookbook.{recipe.module}", *args],
                cwd=work,
                env=_environment(base_url, Path(scratch)),
                input=recipe.stdin,
                capture_output=True,
                text=True,
                timeout=RECIPE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return "failed", f"over {RECIPE_TIMEOUT_S} s"
        said = done.stdout + done.stderr
        if done.returncode or recipe.says not in said:
            return "failed", said[-3000:]
        if recipe.log is None:
            return "ok", ""
        return _judged(log / "metrics.jsonl", said)


def run_framework(name: str) -> Report:
    """The program of a framework, in the workplace, over a server of its own."""
    python = framework_python(name)
    program = HERE / "programs" / PROGRAMS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_workplace(folder / "work", default_model.folder(), *NAMES)
        with _server(folder / "server") as server:
            environment = _environment(server.base_url, folder) | {
                "FRAMEWORK_MODEL": MODEL,
                "MINT_BASE_URL": server.base_url,
                "MINT_API_KEY": API_KEY,
            }
            return run_program(
                [str(python), str(program)],
                name,
                "",
                environment,
                server.log,
                timeout_s=PROGRAM_TIMEOUT_S,
                folder=folder / "work",
            )


def run_our_client(name: str) -> Report:
    """Our client against the server of another hand."""
    program = str(HERE / "programs" / "our_client.py")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with SERVERS[name](framework_python(name), folder) as server:
            environment = _environment(server.base_url, folder)
            return run_program(
                [sys.executable, program],
                name,
                "",
                environment,
                server.log,
                timeout_s=PROGRAM_TIMEOUT_S,
            )


def _server(folder: Path) -> AbstractContextManager[Running]:
    aliases = (
        flag for name in (MODEL, ANSWERER) for flag in ("--alias", f"{name}={DEFAULT_MODEL}")
    )
    return serving(folder, "--engine", "toy", *aliases, "--api-key", f"{API_KEY}=peer")


def _judged(file: Path, said: str) -> tuple[str, str]:
    """A recipe that trained has written a row for each step."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return ("ok", f"{len(rows)} rows") if rows else ("failed", f"no metrics\n{said[-3000:]}")


def _environment(base_url: str, home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(SOURCE),
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": API_KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "hub"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"Of {', '.join([*PROGRAMS, *COOKBOOKS, *SERVERS])}."
    )
    parser.add_argument("--only", default="", help="Recipes whose name has this.")
    parser.add_argument("--write", action="store_true", help=f"Rewrite docs/{DOCUMENT.name}.")
    options = parser.parse_args()
    runs: dict[str, Callable[[str], Report]] = dict.fromkeys(PROGRAMS, run_framework)
    runs |= {name: partial(run_cookbook, only=options.only) for name in COOKBOOKS}
    runs |= dict.fromkeys(SERVERS, run_our_client)
    reports = [_told(runs[name](name)) for name in options.names or runs]
    if not options.only:
        for report in reports:
            _keep(report)
    print(_tables({report.version: report for report in reports}))
    if options.write:
        rewrite(DOCUMENT, "frameworks", "make test-frameworks", _tables(_kept()))
    return 0 if all(report.ok for report in reports) else 1


def _keep(report: Report) -> None:
    """For `--write`, which tells the last run of each: all of them together take an hour."""
    KEPT.mkdir(parents=True, exist_ok=True)
    outcomes = {name: [outcome, ""] for name, (outcome, _) in report.steps.items()}
    kept = {"version": report.version, "seconds": report.seconds, "steps": outcomes}
    (KEPT / f"{report.version}.json").write_text(json.dumps(kept))


def _kept() -> dict[str, Report]:
    files = sorted(KEPT.glob("*.json"))
    return {file.stem: Report(engine="", **json.loads(file.read_text())) for file in files}


def _tables(reports: dict[str, Report]) -> str:
    parts = []
    for title, names in (("Frameworks", PROGRAMS), ("Our client, their server", SERVERS)):
        if chosen := [reports[name] for name in names if name in reports]:
            parts.append(f"### {title}\n\n{_steps_table(chosen)}")
    if chosen := [reports[name] for name in COOKBOOKS if name in reports]:
        parts.append(f"### tinker-cookbook\n\n{table(chosen, 'recipe')}")
    return "\n\n".join(parts)


def _told(report: Report) -> Report:
    print(report.version, "ok" if report.ok else f"FAILED\n{report.failures}", flush=True)
    return report


def _steps_table(reports: list[Report]) -> str:
    """A row for each framework, since no two have the same steps."""
    rows = []
    for report in reports:
        steps = (f"{name.replace('_', ' ')}: {o}" for name, (o, _) in report.steps.items())
        rows.append([report.version, ", ".join(steps), f"{report.seconds:.0f}"])
    return markdown(["program", "steps", "seconds"], rows)


if __name__ == "__main__":
    sys.exit(main())
