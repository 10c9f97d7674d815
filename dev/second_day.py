"""Walk the second day of a user: forty commands and more, each held to what it must print.

    python dev/second_day.py            # on the default model, about a quarter of an hour
    python dev/second_day.py --toy      # those that the toy engine can run, two minutes
    python dev/second_day.py --until 12 # only the first ones

A private server and `tinkex serve` beside it, runs that are interrupted, killed and resumed, names,
exports, rewards, OpenAI clients, mistakes: as they are typed, in a home of its own. Prints a table
(number, seconds, ok, command) and ends with 1 when any step failed. tests/cli/test_second_day.py
runs the same steps.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from second_day_files import write
from walk import Check, Interrupt, Step, StepError, Walk, walking

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
SFT = "--batch-size 4 --rank 4 --save-every 4 --eval-share 0"
ORDERS = f"tinkex train sft rows.jsonl --name orders --epochs {{epochs}} {SFT}"
READ_PAGE = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
PIPED = r"printf '/help\nWho are you?\n/exit\nnot asked\n'"
SHORT = "--max-tokens 8 --seed 1"
UUID = "[0-9a-f-]{36}"


def steps_once(run: str) -> Check:
    """A check: the run's log has every step, once."""

    def check(walk: Walk, printed: str) -> str:
        lines = (walk.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        return "" if steps == list(range(len(steps))) else f"the log has steps {steps}"

    return check


def one_row(walk: Walk, printed: str) -> str:
    names = [run["name"] for run in json.loads(printed)["runs"]]
    return "" if names.count("orders") == 1 else f"runs are {names}"


def worker_fits(walk: Walk, printed: str) -> str:
    """Hold the memory that `pull` tells to what the worker has taken for the quickstart.

    What is told is enough for rows of 2,048 tokens and 16 samples; the quickstart's rows are short,
    and take at least a quarter of it.
    """
    told = json.loads(printed[printed.index("{") :])["memory_bytes"]
    server = walk.private_server()
    peaks = []
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{child}/status").read_text())
        peaks.append(int(found[1]) << 10 if found else 0)
    peak = max(peaks, default=0)
    return "" if told / 4 < peak < told else f"told {told}, and a worker took {peak}"


def narrow(walk: Walk, printed: str) -> str:
    widest = max(map(len, printed.splitlines()))
    return "" if widest <= 100 else f"is {widest} columns wide"


def next_command(text: str) -> dict[str, str]:
    return {"next": rf"{text} (tinkex [^\n]+)"}


FIRST_DAY = (
    Step(
        command="tinkex quickstart",
        says=("Held-out loss", "Adapter  quickstart/adapter"),
        keeps=next_command("Next:"),
    ),
    Step(command=f'{{next}} --prompt "Who are you?" {SHORT}', never=("Error",)),
    Step(
        command=f"{PIPED} | tinkex chat quickstart {SHORT}",
        says=("/compare NAME",),
        never=("not asked",),
    ),
    Step(command=f"tinkex pull {MODEL} --json", check=worker_fits, toy=False),
    Step(command="tinkex run list", says=("quickstart +finished +22 ",)),
)

INTERRUPTED = (
    Step(
        command=ORDERS,
        code=130,
        says=("Stopping after this step", "Stopped after step"),
        never=("Aborted", "Talk to it"),
        interrupt=Interrupt(run="orders", steps=3),
        keeps={**next_command("Resume with:"), "stopped": r"Stopped after step (\d+)"},
    ),
    Step(command="tinkex run list", says=("orders +stopped ",)),
    Step(
        command="{next}",
        code=137,
        says=("Resuming from step {stopped}",),
        interrupt=Interrupt(run="orders", steps=9, signals=(signal.SIGKILL,)),
    ),
    Step(
        command=ORDERS,
        code=130,
        says=(r"Resuming from step \d+", "Stopped"),
        never=("Aborted", "finished"),
        interrupt=Interrupt(run="orders", steps=15, signals=(signal.SIGINT, signal.SIGINT)),
    ),
    Step(
        command=f"{ORDERS} --rank 2 --lr 1",
        code=1,
        says=("learning_rate=", "rank=4, now 2", "tinkex train resume"),
        keeps={"next": "`(tinkex train resume [^`]+)`"},
    ),
    Step(
        command="{next}",
        says=(r"Resuming from step \d+", "(?i)starting it again"),
        interrupt=Interrupt(run="orders", steps=22, signals=(signal.SIGKILL,), of_server=True),
        check=steps_once("orders"),
        keeps=next_command("Talk to it:"),
    ),
    Step(command=f'{{next}} --prompt "Where is order 7?" {SHORT}'),
    Step(command="tinkex train resume orders", says=("holds a finished run",)),
    Step(command="tinkex run list --json", check=one_row),
    Step(command="tinkex run info orders", says=(r"Resumed +at step \d+, at step \d+", "rank +4")),
)

BASE_URL = r'"base_url": "([^"]+)"'

BESIDE = (
    Step(
        command="tinkex serve --port {port} {engine}",
        keeps={"shared": BASE_URL},
        stays="shared_serve",
    ),
    Step(command="tinkex --base-url {shared} run list", says=("orders", "quickstart")),
    Step(command=f'tinkex chat orders --prompt "Where is order 7?" {SHORT}'),
    Step(command="kill -INT {shared_serve}", ends="shared_serve"),
    Step(
        command="tinkex serve --port 0 --data-dir apart {engine}",
        keeps={"url": BASE_URL},
        stays="serve",
    ),
    Step(command=f'tinkex chat quickstart --prompt "Who are you?" {SHORT}'),
    Step(command=f'tinkex chat orders --prompt "Where is order 7?" {SHORT}'),
    Step(command="tinkex checkpoint info orders", keeps={"orders_path": "(tinker://[^ ]+)"}),
    Step(command=f"tinkex chat {{orders_path}} --prompt Hi {SHORT}"),
    Step(
        command="tinkex train sft rows.jsonl --from orders --name further --epochs 0.1 "
        "--batch-size 4 --eval-share 0",
        says=("Talk to it",),
    ),
    Step(command="tinkex run list --all", says=("server local", "orders", "server {url}")),
    Step(command="tinkex --base-url local run list", says=("orders", "quickstart")),
    Step(command="tinkex --base-url {url} run list", never=("orders",)),
    Step(
        command=f"tinkex train sft rows.jsonl --name served --epochs 1 {SFT} --base-url {{url}}",
        keeps={**next_command("Talk to it:"), "state": "(tinker://[^ ]+/weights/[^ ]+)"},
    ),
    Step(command=f'{{next}} --prompt "Where is order 7?" {SHORT}'),
    Step(
        command=f"tinkex --base-url {{url}} train sft rows.jsonl --name faster --epochs 1 {SFT} "
        "--lr 2e-3",
        keeps={"sampler": "(tinker://[^ ]+/sampler_weights/[^ ]+)"},
    ),
    Step(command="tinkex run rename served caps", says=("Name +caps",)),
    Step(command='tinkex run note caps "the first try"', says=("Note +the first try",)),
    Step(command="tinkex run tag caps a b", says=("Tags +a, b",)),
    Step(
        command="tinkex run info caps --json",
        says=('"note": "the first try"',),
        keeps={"caps_id": r'"training_run_id": "([^"]+)"'},
    ),
    Step(
        command="tinkex run info faster --json",
        keeps={"faster_id": r'"training_run_id": "([^"]+)"'},
    ),
    Step(
        command=f"python -c '{READ_PAGE}' '{{url}}/console/compare?runs={{caps_id}},{{faster_id}}'",
        says=("learning_rate", "0.002"),
        never=("started alike",),
    ),
)

NAMES = (
    Step(command="tinkex checkpoint name {sampler} letters --base-url {url}", says=("letters",)),
    Step(command="python ask.py {url} caps", says=("caps said '",), toy=False),
    Step(command="python ask.py {url} letters", says=("letters said '",), toy=False),
    Step(command=f"tinkex chat caps --prompt Hi {SHORT}"),
    Step(command=f"tinkex chat letters --prompt Hi {SHORT}"),
    Step(command=f"tinkex chat {{sampler}} --prompt Hi {SHORT} --base-url {{url}}"),
    Step(
        command="tinkex --base-url {url} chat lettesr -p Hi", code=1, says=("letters",), toy=False
    ),
    Step(command="tinkex chat ordres -p Hi", code=1, says=("orders",), within_s=60, toy=False),
    Step(command="tinkex chat no-such/model -p Hi", code=1, says=("no-such/model",), toy=False),
)

STOPPED = (
    Step(
        command=f"tinkex train sft rows.jsonl --name long --epochs 400 {SFT}",
        says=("sft 1/",),
        stays="trainer",
    ),
    Step(command="tinkex run stop long --reason enough", says=("Stopped long",)),
    Step(command="sleep 2; tinkex run info long", says=("State +stopped",)),
)

EXPORTS = (
    Step(command="tinkex export orders -o adapter", says=("Destination +adapter",)),
    Step(
        command=f"tinkex model path {MODEL}",
        keeps={"base": r"(?m)^(/[^\n]+)$"},
        toy=False,
    ),
    Step(command="python auto_peft.py adapter {base}", says=("generated 4",), toy=False),
    Step(command="tinkex export orders --to merged -o merged", toy=False),
    Step(command="python merged.py merged", says=("loaded LlamaForCausalLM",), toy=False),
    Step(command="tinkex export orders --to gguf --type q8_0 -o orders.gguf", toy=False),
    Step(
        command="tinkex import adapter --name back",
        says=("Checkpoint",),
        keeps={"back": "(tinker://[^ ]+/back)"},
    ),
    Step(command=f"tinkex chat {{back}} --prompt Hi {SHORT}"),
)

RL = "--prompts prompts.jsonl --steps 2 --prompts-per-step 2 --group-size 4 --max-tokens 8 --rank 4"

RECIPES = (
    Step(
        command=f"tinkex train rl rewards.py:brief {RL} --name trl --updates-per-step 2",
        says=("Reward",),
        keeps=next_command("Talk to it:"),
    ),
    Step(command=f"{{next}} --prompt 'Count to 3.' {SHORT}"),
    Step(
        command=f"tinkex train rl --reward rewards.py:brief=0.5 --reward rewards.py:digits=2 {RL} "
        "--name two",
        says=("Reward",),
    ),
    Step(command="tinkex run info trl", says=("Steps +2 ", "Reward")),
    Step(command="tinkex train dpo pairs.jsonl --name prefers --batch-size 4 --rank 4"),
    Step(
        command="tinkex train distill prompts.jsonl --teacher trl --name pupil --steps 2 "
        "--prompts-per-step 2 --samples-per-prompt 2 --max-tokens 8 --rank 4",
        says=("KL",),
    ),
    Step(command="tinkex run list", says=(r"pupil .* kl \d", r"prefers .*")),
)

MISTAKES = (
    Step(
        command="python connect.py base_ulr {url}",
        code=1,
        says=("Did you mean 'base_url'",),
        traceback=True,
        within_s=30,
    ),
    Step(command="TINKEX_MODLE=x tinkex run list", says=("Did you mean TINKEX_LOCAL_MODEL",)),
    Step(command="tinkex --base-url {dead} run list", code=1, says=("{dead}",), within_s=20),
    Step(
        command="python connect.py base_url {dead}",
        code=1,
        says=("{dead}",),
        traceback=True,
        within_s=30,
    ),
    Step(
        command="tinkex serve --port 0 --data-dir small --quota models=2 {engine}",
        keeps={"small": BASE_URL},
        stays="small_serve",
    ),
    Step(
        command="python many_models.py {small}",
        code=1,
        says=("model 1", "Unload models"),
        never=("model 2", "Slow down"),
        traceback=True,
        within_s=30,
    ),
    Step(command="kill -INT {small_serve}", ends="small_serve"),
    Step(command="tinkex doctor 2>/dev/null", check=narrow),
    Step(command="tinkex disk", says=("orders", "quickstart")),
    Step(command="tinkex gc --dry-run"),
    Step(command="kill -INT {serve}", ends="serve"),
    Step(command="tinkex gc --older-than 1s"),
    Step(command=f"tinkex chat orders --prompt Hi {SHORT}"),
    Step(command="tinkex run delete orders --yes", says=("Deleted the run orders", "stays: ")),
    Step(command=f"tinkex chat orders --prompt Hi {SHORT}", code=1),
    Step(command="tinkex run list", says=("quickstart",), never=(" orders ",)),
)

SHORT_WALK = (*FIRST_DAY, *INTERRUPTED, *BESIDE, *NAMES, *STOPPED)
STEPS = (*SHORT_WALK, *EXPORTS, *RECIPES, *MISTAKES)


def main() -> int:
    parser = argparse.ArgumentParser(description="Walk the second day of a user.")
    parser.add_argument("--toy", action="store_true", help="on the toy engine, what it can run")
    parser.add_argument("--short", action="store_true", help="only runs, names and servers")
    parser.add_argument("--until", type=int, default=len(STEPS), help="the last step")
    args = parser.parse_args()
    steps = (SHORT_WALK if args.short else STEPS)[: args.until]
    failures = 0
    with walking(write, toy=args.toy) as walk:
        for number, step in enumerate(steps, 1):
            if args.toy and not step.toy:
                continue
            began, problem = time.monotonic(), ""
            try:
                walk.run(step)
            except (StepError, KeyError) as exc:  # a KeyError: what an earlier one did not keep
                problem = str(exc)
                failures += 1
            verdict = "FAIL" if problem else "ok"
            shown = " ".join(step.command.split())[:100]
            print(f"{number:3} {time.monotonic() - began:6.1f} s  {verdict:4}  {shown}", flush=True)
            if problem:
                print(f"    {problem}", flush=True)
    print(f"{failures} of {len(steps)} steps failed" if failures else "every step did what it must")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
