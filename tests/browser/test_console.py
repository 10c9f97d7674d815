"""The console in a real browser: Debian's Chromium, driven by Playwright.

With TINKEX_SCREENSHOTS=1 the pictures of docs/console.md are made again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from venvs import sdk_python

CHROMIUM = shutil.which("chromium")
ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
AXE = find_spec("axe_playwright_python")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WAIT_MS = 100_000
"""How long a page may take on a busy machine; Playwright would give it 30 s."""
HOSTILE = "<img src=x onerror=window.hacked=1>"
MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
QUESTIONS = ("What is the capital of France?", "Name a large animal.")
# Only whole tests are left out: one that ended half-way would leave its state to the next.
needs_axe = pytest.mark.skipif(
    AXE is None, reason="no axe-core: pip install -c constraints.txt axe-playwright-python"
)
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium: `make test-browser SYSTEM=1` as root installs Debian's",
    ),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def world(
    start_server, default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A real model, two trained runs of ann's, who is an administrator, and a client of hers."""
    import tinkex

    folder = tmp_path_factory.mktemp("browser")
    key = _admin_key(folder, "ann")
    _admin_key(folder, "bob")
    with start_server(folder, "--keep-rollouts") as base_url:
        made = SimpleNamespace(base_url=base_url, key=key, runs=[], services=[])
        for rank, rate in ((8, 3e-3), (16, 5e-4)):
            name = f"foxes, rank {rank}"
            service = tinkex.ServiceClient(base_url=base_url, api_key=key, display_name=name)
            made.services.append(service)
            made.runs.append(_trained(service, rank, rate))
        yield made
        for service in made.services:
            service.close()


def _admin_key(folder: Path, user: str) -> str:
    command = [sys.executable, "-m", "tinkex.cli", "keys", "add", "--user", user, "--admin"]
    told = subprocess.run(
        [*command, "--data-dir", str(folder), "--json"], check=True, capture_output=True
    )
    return str(json.loads(told.stdout)["key"])


def _trained(service: Any, rank: int, rate: float) -> Any:
    training = service.create_lora_training_client(base_model=MODEL, rank=rank).result()
    _train(training, rate, 6)
    training.save_weights_for_sampler("final").result()
    return training


def _train(training: Any, rate: float, num_steps: int) -> None:
    import tinkex

    tokens = training.get_tokenizer().encode("The quick brown fox jumps over the lazy dog. " * 2)
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [1 / (len(tokens) - 1)] * (len(tokens) - 1),
        },
    )
    for step in range(num_steps):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinkex.AdamParams(learning_rate=rate * (1 - step / 12))).result()


@pytest.fixture(params=["light", "dark"] if os.environ.get("TINKEX_SCREENSHOTS") else ["light"])
def page(request: pytest.FixtureRequest, world: SimpleNamespace) -> Iterator[Any]:
    """A logged-in page that has no error and asks no other host."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=WAIT_MS)
        context = browser.new_context(
            color_scheme=request.param, viewport={"width": 1200, "height": 800}
        )
        context.set_default_timeout(WAIT_MS)  # of clicks, selectors, navigation and all else
        page = context.new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        context.on("request", lambda sent: asked.append(sent.url))
        page.goto(f"{world.base_url}/console")
        page.fill("#key", world.key)
        with page.expect_navigation():
            page.click("main button")
        page.wait_for_selector("tbody")
        page.scheme = request.param
        yield page
        assert errors == []
        assert asked
        assert [url for url in asked if not url.startswith(world.base_url)] == []
        browser.close()


def _until(page: Any, condition: str, timeout_s: float = WAIT_MS / 1000) -> None:
    """Ask again and again: the page's own policy forbids Playwright's way of waiting.

    While a page is on its way, what the condition names may not be there: that is "not yet".
    """
    from playwright.sync_api import Error

    last: object = False
    for _ in range(int(timeout_s / 0.2)):
        try:
            last = page.evaluate(condition)
        except Error as fault:
            last = fault
        if last is True:
            return
        page.wait_for_timeout(200)
    raise AssertionError(f"not within {timeout_s:g} s: {condition}: {last}")


def _expect(locator: Any) -> Any:
    """Assertions that ask until they hold: what a click leads to comes a moment later."""
    from playwright.sync_api import expect

    expect.set_options(timeout=WAIT_MS)
    return expect(locator)


def _picture(page: Any, name: str) -> None:
    if os.environ.get("TINKEX_SCREENSHOTS"):
        page.screenshot(path=FIGURES / f"console-{name}-{page.scheme}.png")


def _check_access(page: Any) -> None:
    """No serious fault for people with a keyboard or a screen reader, by axe-core."""
    assert AXE is not None
    assert AXE.origin is not None
    page.evaluate(Path(AXE.origin).with_name("axe.min.js").read_text())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        told = page.evaluate("axe.run(document)")
        assert len(told["passes"]) > 10
        faults = [
            (one["id"], one["help"], [node["target"] for node in one["nodes"]][:3])
            for one in told["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert faults == [], (page.url, scheme)
    page.emulate_media(color_scheme=page.scheme)


def test_the_list_shows_both_runs(page, world):
    assert page.locator("tbody tr").count() >= 2
    page.select_option("select[name=sort]", "oldest")
    page.wait_for_url("**sort=oldest**")
    assert page.locator("tbody a").first.text_content() == "foxes, rank 8"
    _picture(page, "runs")
    page.fill("input[name=q]", "no such run")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=no*")
    assert "No run fits" in page.content()


@pytest.fixture(scope="module")
def official(world: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """A run of the official SDK that takes a step when told to."""
    script = Path(__file__).parent / "official_training.py"
    command = [str(sdk_python("0.36.0")), str(script), world.base_url, world.key, MODEL]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin = child.stdin
        run_id = child.stdout.readline().strip()
        assert run_id, "the official SDK did not start"
        yield SimpleNamespace(run_id=run_id, step=lambda: stdin.write("step\n"))
        stdin.close()
        assert child.wait(timeout=120) == 0


@pytest.mark.peers
@pytest.mark.timeout(1200)
def test_a_curve_grows_while_the_official_sdk_trains(page, world, official):
    official.step()
    page.goto(f"{world.base_url}/console/runs/{official.run_id}")
    count = "charts.get('loss_per_token')?.series[0].steps.length ?? 0"
    _until(page, f"({count}) >= 1")
    before = page.evaluate(count)
    for more in (1, 2, 3):
        official.step()
        _until(page, f"({count}) >= {before + more}")
    page.goto(f"{world.base_url}/console")
    row = page.locator("tbody tr", has=page.locator(f"a[href*='{official.run_id}']"))
    assert row.count() == 1


def test_a_run_shows_its_curves_by_step_and_by_tokens(page, world):
    run = world.runs[0]
    page.goto(f"{world.base_url}/console/runs/{run.model_id}")
    page.wait_for_selector(".chart")
    count = "charts.get('loss_per_token').series[0].steps.length"
    _until(page, f"{count} >= 1")
    before = page.evaluate(count)
    _train(run, 1e-3, 2)
    _until(page, f"{count} >= {before + 2}")
    page.wait_for_selector("#split svg")
    page.select_option("#axis", "tokens")
    axis = "charts.get('loss_per_token').points(charts.get('loss_per_token').series[0])[1][0]"
    assert page.evaluate(axis) > 2, "tokens, not steps"
    page.reload()
    page.wait_for_selector(".chart")
    _expect(page.locator("#axis")).to_have_value("tokens")  # the address has it
    page.select_option("#axis", "step")
    page.wait_for_url(lambda url: "#" not in url)
    _picture(page, "run")


def test_a_chart_is_smoothed_zoomed_and_read_by_pointing_at_it(page, world):
    page.goto(f"{world.base_url}/console/runs/{world.runs[1].model_id}")
    chart = page.locator(".chart canvas[aria-label^=loss_per_token]")
    chart.wait_for()

    def drawn() -> str:
        return str(chart.evaluate("canvas => canvas.toDataURL()"))

    def until(is_plain: bool) -> None:
        for _ in range(1000):
            if (drawn() == plain) == is_plain:
                return
            page.wait_for_timeout(100)
        raise AssertionError("the chart is drawn as before" if not is_plain else "it stays changed")

    _until(page, "charts.get('loss_per_token').series[0].steps.length >= 6")
    plain = ""
    while plain != drawn():  # until all points are there
        plain = drawn()
        page.wait_for_timeout(1500)
    page.locator("#smooth").fill("0.9")
    until(False)
    page.locator("#smooth").fill("0")
    until(True)
    page.locator("#log").check()
    until(False)
    page.locator("#log").uncheck()
    until(True)
    box = chart.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)  # a line and the value under it
    until(False)
    page.mouse.move(0, 0)
    until(True)
    page.mouse.move(box["x"] + 60, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.up()
    page.mouse.move(0, 0)
    until(False)  # a part of it is shown
    chart.dblclick()
    page.mouse.move(0, 0)
    until(True)


def test_two_runs_are_compared_with_a_baseline(page, world):
    for row in page.locator("tbody tr", has_text="foxes").all():
        row.locator("input[type=checkbox]").check()
    page.click("#compare")
    page.wait_for_selector(".chart")
    _expect(page.locator(".legend li")).to_have_count(2)
    assert "lora.rank" in page.content()
    page.locator(".legend li").nth(1).get_by_text("pin", exact=True).click()
    page.wait_for_url("**baseline=**")
    page.wait_for_selector(".chart")
    _expect(page.locator(".legend li").first.get_by_text("baseline")).to_have_count(1)
    _picture(page, "compare")


@pytest.fixture
def kept(page, world) -> Iterator[Any]:
    """The page of a run whose answers are kept; however the test ends, none is afterwards."""
    run = world.runs[0]
    address = f"{world.base_url}/console/runs/{run.model_id}/rollouts"
    page.goto(address)
    page.get_by_role("button", name="Keep mine").click()
    page.get_by_role("button", name="Stop, and drop them").wait_for()
    _sample_and_learn(run)
    page.reload()
    yield page
    page.goto(address)
    stop = page.get_by_role("button", name="Stop, and drop them")
    if stop.count():
        stop.click()
        page.get_by_role("button", name="Keep mine").wait_for()


def test_rollouts_are_kept_after_the_agreement(kept):
    page = kept
    _expect(page.locator("article.said")).to_have_count(8)
    page.select_option("select[name=color]", "advantage")
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector("article .up3")
    page.wait_for_selector("article .down3")
    page.select_option("select[name=color]", "logprob")
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector("article span[title^=logprob][class^=l]")
    _picture(page, "rollouts")
    page.get_by_role("button", name="Stop, and drop them").click()
    page.get_by_role("button", name="Keep mine").wait_for()
    _expect(page.locator("article.said")).to_have_count(0)


@needs_axe
def test_everybody_can_use_rollouts(kept):
    assert kept.locator("article.said").count() == 8
    _check_access(kept)


def _sample_and_learn(training: Any) -> None:
    """Four answers to each question; the shorter ones are called better."""
    import tinkex

    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client()
    params = tinkex.SamplingParams(max_tokens=24, seed=3, temperature=1.0)
    data = []
    for question in QUESTIONS:
        prompt = tokenizer.encode(f"Question: {question}\nAnswer:")
        answers = sampler.sample(tinkex.ModelInput.from_ints(prompt), 4, params).result().sequences
        for index, answer in enumerate(answers):
            tokens, before = prompt + list(answer.tokens), [0.0] * (len(prompt) - 1)
            data.append(
                tinkex.Datum(
                    model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": before + list(answer.logprobs),
                        "advantages": before + [index - 1.5] * len(answer.tokens),
                    },
                )
            )
    training.forward_backward(data, "importance_sampling").result()


def test_a_chat_streams_beside_the_base_model(page, world):
    page.goto(f"{world.base_url}/console/playground")
    page.fill("#text", "What is the capital of France?")
    _until(page, "document.getElementById('count').textContent.includes('tokens')")
    page.fill("#max", "12")
    page.fill("#temperature", "0")
    page.select_option("#right", index=2)
    page.click("#send")
    _until(page, "document.querySelectorAll('.meta').length === 2")
    assert "Paris" in page.locator("#talk-left .model").text_content()
    page.locator("#talk-left .token").nth(2).hover()
    page.wait_for_selector("#others .chosen")
    _expect(page.locator("#others tr")).to_have_count(5)
    _picture(page, "playground")
    page.click("#as-code summary")
    _expect(page.locator("#code")).to_contain_text("client.chat.completions.create(")
    page.select_option("#language", "curl")
    _expect(page.locator("#code")).to_have_text(re.compile(r"^curl http://127\.0\.0\.1"))


def test_a_completion_goes_on_from_a_text(page, world):
    page.goto(f"{world.base_url}/console/playground")
    page.select_option("#mode", "completion")
    page.fill("#text", "The quick brown fox")
    page.fill("#max", "4")
    page.click("#send")
    _until(page, "document.querySelectorAll('.meta').length === 1")
    _expect(page.locator("#talk-left .token")).to_have_count(4)


def test_a_checkpoint_is_published_and_deleted(page, world):
    run = world.runs[1]
    run.save_state(f"gone-{page.scheme}").result()
    page.goto(f"{world.base_url}/console/runs/{run.model_id}")
    row = page.locator("tr", has_text=f"gone-{page.scheme}")
    row.get_by_role("button", name="Publish").click()
    _expect(row).to_contain_text("every user")
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Delete").click()
    _expect(row).to_have_count(0)


def test_a_key_is_added_and_revoked(page, world):
    page.get_by_role("link", name="Server").click()
    user = f"eve-{page.scheme}"
    _until(page, "/^[0-9]/.test(document.querySelector('[data-rate]').textContent)")
    _picture(page, "server")
    page.get_by_label("User", exact=True).fill(user)
    page.get_by_role("button", name="Add a key").click()
    key = page.locator("#new-key").text_content()
    assert key.startswith("tml-")
    page.on("dialog", lambda dialog: dialog.accept())
    row = page.locator("section:has(h2:text('Keys')) tr", has_text=user)
    row.get_by_role("button", name="Revoke").click()
    _expect(row).to_have_count(0)
    other = page.context.browser.new_page()
    other.set_default_timeout(WAIT_MS)
    other.goto(f"{world.base_url}/console/login")
    other.fill("#key", key)
    other.click("main button")
    _expect(other.locator("[role=alert]")).to_contain_text("unknown here or was revoked")


def test_nothing_of_a_hostile_run_is_executed(page, world):
    import tinkex

    with tinkex.ServiceClient(
        base_url=world.base_url, api_key=world.key, display_name=HOSTILE
    ) as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
        training.log_metrics({HOSTILE: 1.0, "reward": 2.0}, step=1).result()
        page.goto(f"{world.base_url}/console/runs/{training.model_id}")
        page.fill("#tags", HOSTILE)
        with page.expect_navigation():
            page.locator("form.tags button").click()
        page.wait_for_selector(".chart")
        for path in ("", "/compare?runs=" + training.model_id, "/server"):
            page.goto(f"{world.base_url}/console{path}")
            page.wait_for_load_state()
            assert page.evaluate("window.hacked") is None
        page.goto(f"{world.base_url}/console/playground")
        page.fill("#system", HOSTILE)
        page.fill("#text", HOSTILE)
        page.fill("#max", "4")
        page.click("#send")
        _until(page, "document.querySelectorAll('.meta').length === 1")
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0


def test_hostile_names_and_numbers_break_no_page(page, world):
    """A neighbour's run is looked at by administrators: no hang, no error, nothing pushed aside."""
    import tinkex

    name = "\u202e" + "W" * 900
    far = {"far": 1e16, "huge": -1e300, "__proto__": 1.0, "constructor": 2.0, "tiny": 5e-324}
    with tinkex.ServiceClient(
        base_url=world.base_url, api_key=world.key, display_name=name
    ) as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
        run = training.model_id
        for step in (0, 2, 1):
            more = {"far": 1e16 + 2 * step, "huge": 1e300}
            training.log_metrics(far if not step else {**far, **more}, step=step).result()
        page.goto(f"{world.base_url}/console/runs/{run}")
        _until(page, "document.querySelectorAll('.chart').length === 5")
        xs = "charts.get('far').points(charts.get('far').series[0]).map((point) => point[0])"
        assert page.evaluate(xs) == [0, 1, 2], "numbers may arrive in any order"
        assert page.evaluate("labels([171.1, 171.2, 171.3])") == ["171.1", "171.2", "171.3"]
        for path in ("", f"/runs/{run}", f"/compare?runs={run},{world.runs[0].model_id}"):
            page.goto(f"{world.base_url}/console{path}")
            page.wait_for_load_state("load")
            assert page.evaluate("document.documentElement.scrollWidth") <= 1200, path
        page.goto(f"{world.base_url}/console")
        row = page.locator("tbody tr", has_text="WWWW")
        assert row.locator("td").last.bounding_box()["x"] < 1200, "its age is in sight"


def test_a_curve_is_read_with_the_arrow_keys(page, world):
    page.goto(f"{world.base_url}/console/runs/{world.runs[0].model_id}")
    chart = page.locator("canvas[aria-label^=learning_rate]")
    chart.wait_for()
    assert "last" in chart.get_attribute("aria-label")
    chart.focus()
    said = page.locator(".chart", has=chart).locator("[role=status]")
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        _expect(said).to_have_text(re.compile(f" at {step}$"))


@needs_axe
def test_everybody_can_use_the_pages(page, world):
    run = world.runs[0].model_id
    compared = ",".join(one.model_id for one in world.runs)
    for path in ("", f"/runs/{run}", f"/compare?runs={compared}", "/playground", "/server"):
        page.goto(f"{world.base_url}/console{path}")
        if path.startswith(("/runs", "/compare")):
            page.wait_for_selector(".chart")
        _check_access(page)
    stranger = page.context.browser.new_page()
    stranger.set_default_timeout(WAIT_MS)
    stranger.scheme = page.scheme
    stranger.goto(f"{world.base_url}/console/login")
    stranger.fill("#key", "tml-wrong")
    stranger.click("main button")
    stranger.wait_for_selector("[role=alert]")
    _check_access(stranger)


def test_a_phone_can_read_it(page, world):
    page.set_viewport_size({"width": 390, "height": 800})
    run = f"/console/runs/{world.runs[0].model_id}"
    for path in ("/console", run, f"{run}/rollouts", "/console/playground", "/console/server"):
        page.goto(f"{world.base_url}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
