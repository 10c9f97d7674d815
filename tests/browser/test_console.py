"""The console in a real browser, over a real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chromium import (
    HOSTILE,
    SCHEMES,
    WAIT_MS,
    agree,
    check_access,
    expect,
    log_in,
    needs_axe,
    needs_chromium,
    open_page,
    refuse,
    until,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
from venvs import sdk_python

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
QUESTIONS = ("What is the capital of France?", "Name a large animal.")
pytestmark = needs_chromium


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


@pytest.fixture(params=SCHEMES)
def page(request: pytest.FixtureRequest, world: SimpleNamespace) -> Iterator[Any]:
    with open_page(world.base_url, request.param) as page:
        log_in(page, world.base_url, world.key)
        yield page


def test_the_list_shows_both_runs(page, world):
    assert page.locator("tbody tr").count() >= 2
    page.select_option("select[name=sort]", "oldest")
    page.wait_for_url("**sort=oldest**")
    assert page.locator("tbody a").first.text_content() == "foxes, rank 8"
    page.fill("input[name=q]", "no such run")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=no*")
    assert "No run matches" in page.content()


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
    count = "board.cards.get('loss_per_token')?.chart?.series[0].steps.length ?? 0"
    until(page, f"({count}) >= 1")
    before = page.evaluate(count)
    for more in (1, 2, 3):
        official.step()
        until(page, f"({count}) >= {before + more}")
    page.goto(f"{world.base_url}/console")
    row = page.locator("tbody tr", has=page.locator(f"a[href*='{official.run_id}']"))
    assert row.count() == 1


def test_a_run_shows_its_curves_by_step_and_by_tokens(page, world):
    run = world.runs[0]
    page.goto(f"{world.base_url}/console/runs/{run.model_id}")
    page.wait_for_selector(".chart")
    count = "board.cards.get('loss_per_token').chart.series[0].steps.length"
    until(page, f"{count} >= 1")
    before = page.evaluate(count)
    _train(run, 1e-3, 2)
    until(page, f"{count} >= {before + 2}")
    page.wait_for_selector("#split svg")
    page.select_option("#axis", "tokens")
    axis = "board.cards.get('loss_per_token').chart.lines()[0][1][0]"
    assert page.evaluate(axis) > 2, "tokens, not steps"
    page.reload()
    page.wait_for_selector(".chart")
    expect(page.locator("#axis")).to_have_value("tokens")  # the address has it
    page.select_option("#axis", "step")
    page.wait_for_url(lambda url: "#" not in url)


def test_a_chart_is_smoothed_zoomed_and_read_by_pointing_at_it(page, world):
    page.goto(f"{world.base_url}/console/runs/{world.runs[1].model_id}")
    chart = page.locator(".chart canvas[aria-label^=loss_per_token]")
    chart.wait_for()

    def drawn() -> str:
        return str(chart.evaluate("canvas => canvas.toDataURL()"))

    def redrawn(is_plain: bool) -> None:
        for _ in range(1000):
            if (drawn() == plain) == is_plain:
                return
            page.wait_for_timeout(100)
        raise AssertionError("the chart is drawn as before" if not is_plain else "it stays changed")

    until(page, "board.cards.get('loss_per_token').chart.series[0].steps.length >= 6")
    plain = ""
    while plain != drawn():  # until all points are there
        plain = drawn()
        page.wait_for_timeout(1500)
    page.locator("#smooth").fill("0.9")
    redrawn(False)
    page.locator("#smooth").fill("0")
    redrawn(True)
    page.locator("#log").check()
    redrawn(False)
    page.locator("#log").uncheck()
    redrawn(True)
    box = chart.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)  # a line and the value under it
    redrawn(False)
    page.mouse.move(0, 0)
    redrawn(True)
    page.mouse.move(box["x"] + 60, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.up()
    page.mouse.move(0, 0)
    redrawn(False)  # a part of it is shown
    chart.dblclick()
    page.mouse.move(0, 0)
    redrawn(True)


def test_two_runs_are_compared_with_a_baseline(page, world):
    for row in page.locator("tbody tr", has_text="foxes").all():
        row.locator("input[type=checkbox]").check()
    page.click("#compare")
    page.wait_for_selector(".chart")
    expect(page.locator(".legend .run")).to_have_count(2)
    assert "lora.rank" in page.content()
    page.locator(".legend li").nth(1).get_by_text("set as baseline").click()
    page.wait_for_url("**baseline=**")
    page.wait_for_selector(".chart")
    expect(page.locator(".legend li").first.get_by_text("baseline", exact=True)).to_have_count(1)
    page.get_by_label("Remove foxes, rank 8").click()
    expect(page.locator(".legend .run")).to_have_count(1)


@pytest.fixture
def kept(page, world) -> Iterator[Any]:
    """The page of a run whose answers are kept; however the test ends, none is afterwards."""
    run = world.runs[0]
    address = f"{world.base_url}/console/runs/{run.model_id}/rollouts"
    page.goto(address)
    page.get_by_role("button", name="Keep my answers").click()
    page.get_by_role("button", name="Stop and discard").wait_for()
    _sample_and_learn(run)
    page.reload()
    yield page
    page.goto(address)
    stop = page.get_by_role("button", name="Stop and discard")
    if stop.count():
        stop.click()
        page.get_by_role("button", name="Keep my answers").wait_for()


def test_rollouts_are_kept_after_the_agreement(kept):
    page = kept
    expect(page.locator("article.said")).to_have_count(8)
    page.select_option("select[name=color]", "advantage")
    page.wait_for_selector("article .up3")
    page.wait_for_selector("article .down3")
    page.select_option("select[name=color]", "logprob")
    page.wait_for_selector("article span[title^=logprob][class^=l]")
    page.get_by_role("button", name="Stop and discard").click()
    page.get_by_role("button", name="Keep my answers").wait_for()
    expect(page.locator("article.said")).to_have_count(0)


@needs_axe
def test_everybody_can_use_rollouts(kept):
    assert kept.locator("article.said").count() == 8
    check_access(kept)


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
    until(page, "document.getElementById('count').textContent.includes('tokens')")
    page.fill("#max", "12")
    page.fill("#temperature", "0")
    page.select_option("#right", index=2)
    page.click("#send")
    until(page, "document.querySelectorAll('.meta').length === 2")
    assert "Paris" in page.locator("#talk-left .model").text_content()
    page.locator("#talk-left .token").nth(2).hover()
    page.wait_for_selector("#others .chosen")
    expect(page.locator("#others tr")).to_have_count(5)
    page.click("#as-code summary")
    expect(page.locator("#code")).to_contain_text("client.chat.completions.create(")
    page.select_option("#language", "curl")
    expect(page.locator("#code")).to_have_text(re.compile(r"^curl http://127\.0\.0\.1"))


def test_a_completion_goes_on_from_a_text(page, world):
    page.goto(f"{world.base_url}/console/playground")
    page.select_option("#mode", "completion")
    page.fill("#text", "The quick brown fox")
    page.fill("#max", "4")
    page.click("#send")
    until(page, "document.querySelectorAll('.meta').length === 1")
    expect(page.locator("#talk-left .token")).to_have_count(4)


def test_a_checkpoint_is_published_and_deleted(page, world):
    run = world.runs[1]
    run.save_state(f"gone-{page.scheme}").result()
    page.goto(f"{world.base_url}/console/runs/{run.model_id}")
    row = page.locator("tr", has_text=f"gone-{page.scheme}")
    row.get_by_role("button", name="Publish").click()
    agree(page, "Publish")
    expect(row).to_contain_text("every user")
    row.get_by_role("button", name="Delete").click()
    refuse(page)
    page.reload()
    expect(row).to_have_count(1)
    row.get_by_label("Expiry of").select_option("in 7 days")
    expect(row.get_by_label("Expiry of").locator("option").first).to_have_text("in 6 days")
    row.get_by_role("button", name="Delete").click()
    agree(page, "Delete checkpoint")
    expect(row).to_have_count(0)


def test_runs_are_chosen_and_deleted(page, world):
    import tinkex

    names = [f"gone {number} {page.scheme}" for number in range(3)]
    for name in names:
        with tinkex.ServiceClient(base_url=world.base_url, api_key=world.key) as service:
            service.create_lora_training_client(base_model=MODEL, rank=4, name=name).result()
    page.goto(f"{world.base_url}/console")
    chosen = page.locator("#num-chosen")
    for name in names[:2]:
        page.get_by_label(f"Select {name}").check()
    expect(chosen).to_have_text("2 selected")
    page.get_by_role("button", name="Delete", exact=True).click()
    refuse(page)
    expect(chosen).to_have_text("2 selected")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".asker p")).to_contain_text(", ".join(sorted(names[:2], reverse=True)))
    agree(page, "Delete 2 runs")
    for name in names[:2]:
        expect(page.get_by_role("link", name=name)).to_have_count(0)
    page.get_by_role("link", name=names[2]).click()
    page.get_by_role("button", name="Delete", exact=True).click()
    agree(page, "Delete run")
    page.wait_for_url("**/console")
    expect(page.get_by_role("link", name=names[2])).to_have_count(0)


def test_a_run_that_trains_is_not_deleted_and_the_page_says_why(page, world):
    page.goto(f"{world.base_url}/console/runs/{world.runs[0].model_id}")
    _train(world.runs[0], 1e-3, 1)  # its program is alive
    page.locator(".tab-row").get_by_role("button", name="Delete").click()
    page.expected.append("status of 400")
    agree(page, "Delete run")
    expect(page.get_by_role("alert")).to_contain_text("Stop it first")
    page.get_by_role("link", name="Back").click()
    page.wait_for_selector("#charts")


def test_a_key_is_added_and_revoked(page, world):
    page.get_by_role("link", name="Server").click()
    user = f"eve-{page.scheme}"
    until(page, "/^[0-9]/.test(document.querySelector('[data-rate]').textContent)")
    page.get_by_label("User", exact=True).fill(user)
    page.get_by_role("button", name="Add a key").click()
    key = page.locator("#new-key").text_content()
    assert key.startswith("tml-")
    row = page.locator("section:has(h2:text('Keys')) tr", has_text=user)
    row.get_by_role("button", name="Revoke").click()
    agree(page, "Revoke")
    expect(row).to_have_count(0)
    other = page.context.browser.new_page()
    other.set_default_timeout(WAIT_MS)
    other.goto(f"{world.base_url}/console/login")
    other.fill("#key", key)
    other.click("main button")
    expect(other.locator("[role=alert]")).to_contain_text("unknown here or was revoked")


def test_nothing_of_a_hostile_run_is_executed(page, world):
    import tinkex

    with tinkex.ServiceClient(
        base_url=world.base_url, api_key=world.key, display_name=HOSTILE
    ) as service:
        training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
        training.log_metrics({HOSTILE: 1.0, "reward": 2.0}, step=1).result()
        page.goto(f"{world.base_url}/console/runs/{training.model_id}")
        page.locator(".edit summary").click()
        page.fill("#tags", HOSTILE)
        page.fill("#note", HOSTILE)
        with page.expect_navigation():
            page.locator("form.describe button").click()
        expect(page.locator(".note")).to_have_text(HOSTILE)
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
        until(page, "document.querySelectorAll('.meta').length === 1")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img").count() == 0


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
        until(page, "board.cards.size === 5")
        page.locator(".chart[data-metric=far]").scroll_into_view_if_needed()
        until(page, "Boolean(board.cards.get('far').chart)")
        xs = "board.cards.get('far').chart.lines()[0].map((point) => point[0])"
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
        expect(said).to_have_text(re.compile(f" at {step}$"))


@needs_axe
def test_everybody_can_use_the_pages(page, world):
    run = world.runs[0].model_id
    compared = ",".join(one.model_id for one in world.runs)
    for path in ("", f"/runs/{run}", f"/compare?runs={compared}", "/playground", "/server"):
        page.goto(f"{world.base_url}/console{path}")
        if path.startswith(("/runs", "/compare")):
            page.wait_for_selector(".chart")
        check_access(page)
    stranger = page.context.browser.new_page()
    stranger.set_default_timeout(WAIT_MS)
    stranger.scheme = page.scheme
    stranger.goto(f"{world.base_url}/console/login")
    stranger.fill("#key", "tml-wrong")
    stranger.click("main button")
    stranger.wait_for_selector("[role=alert]")
    check_access(stranger)


def test_a_phone_can_read_it(page, world):
    page.set_viewport_size({"width": 390, "height": 800})
    run = f"/console/runs/{world.runs[0].model_id}"
    for path in ("/console", run, f"{run}/rollouts", "/console/playground", "/console/server"):
        page.goto(f"{world.base_url}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        menu = "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)"
        assert page.evaluate(f"{menu}(document.querySelector('header nav'))"), path
