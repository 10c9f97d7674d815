"""The metrics of runs in a browser: sections, search, pins, order, constants, values, files."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from chromium import WAIT_MS, check_access, expect, needs_axe, needs_chromium, open_page, until
from toy_runs import NUM_STEPS, train_runs

from tinkex.server.console.colors import colors_of

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def world(start_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("metrics")
    with start_server(folder, "--engine", "toy") as base_url:
        yield SimpleNamespace(base_url=base_url, runs=train_runs(base_url))


@pytest.fixture
def page(world: SimpleNamespace) -> Iterator[Any]:
    with open_page(world.base_url) as page:
        yield page


def _open_run(page: Any, world: SimpleNamespace, index: int = 0) -> None:
    page.goto(f"{world.base_url}/console/runs/{world.runs[index].run_id}")
    until(page, "board.cards.size > 5 && Boolean(document.querySelector('.chart canvas'))")


def _open_comparison(page: Any, world: SimpleNamespace) -> None:
    ids = ",".join(run.run_id for run in world.runs[:2])
    page.goto(f"{world.base_url}/console/compare?runs={ids}")
    until(page, "board.cards.size > 5 && Boolean(document.querySelector('.chart canvas'))")


def _sections(page: Any) -> dict[str, list[str]]:
    """The metrics of each section, in the order shown."""
    found: dict[str, list[str]] = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.section[data-section]')].map((box) => "
        "[box.dataset.section, [...box.querySelectorAll('.chart')].map((c) => c.dataset.metric)]))"
    )
    return found


def _choose(page: Any, metric: str, act: str) -> None:
    page.locator(f".chart[data-metric='{metric}'] .menu summary").click()
    page.locator(f".chart[data-metric='{metric}']").get_by_role("button", name=act).click()


def test_an_rl_run_leads_with_its_reward_and_metrics_stand_in_sections(page, world):
    _open_run(page, world)
    sections = _sections(page)
    assert list(sections) == ["reward", "train", "eval", "speed"]
    assert sections["reward"] == ["reward", "reward/format"]
    assert sections["train"][0] == "loss_per_token"
    assert "train/clip_fraction" in sections["train"]
    assert sections["eval"] == ["eval/pass@1"]
    of_recipe = page.evaluate("['rewards/short', 'tokens_per_reward'].map(sectionOf)")
    assert of_recipe == ["reward", "reward"]


def test_constant_metrics_are_folded_and_counted(page, world):
    _open_run(page, world)
    constants = page.locator(".constants")
    expect(constants.locator("summary")).to_have_text("Constant 4")  # and tokens, save_time_s
    shown = [name for names in _sections(page).values() for name in names]
    assert "turns" not in shown
    constants.locator("summary").click()
    expect(constants.locator("tr", has_text="turns").locator("td")).to_have_text("1")


def test_metrics_are_searched(page, world):
    _open_run(page, world)
    page.fill("#find-metric", "REWARD form")
    expect(page.locator("#num-metrics")).to_have_text("1 of 18 metrics")
    assert _sections(page) == {"reward": ["reward/format"]}
    page.fill("#find-metric", "no such")
    expect(page.locator("#charts")).to_contain_text("No metric has all of these words")


def test_a_pin_and_an_order_of_ones_own_stay(page, world):
    _open_run(page, world)
    _choose(page, "kl", "Pin")
    _choose(page, "grad_norm", "Move right")
    before = _sections(page)
    assert before["pinned"] == ["kl"]
    assert list(before) == ["pinned", "reward", "train", "eval", "speed"]
    assert before["train"].index("grad_norm") == 2
    _open_run(page, world, 1)  # the same names of another run, after a new load
    assert _sections(page) == before
    _choose(page, "kl", "Unpin")
    assert "pinned" not in _sections(page)


def test_a_chart_is_dragged_to_another_place(page, world):
    _open_run(page, world)
    card = ".chart[data-metric='{}'] h3"
    page.locator(card.format("reward/format")).drag_to(page.locator(card.format("reward")))
    until(page, "document.querySelector('.chart').dataset.metric === 'reward/format'")


def test_a_section_stays_folded(page, world):
    _open_run(page, world)
    page.locator("[data-section=reward] > summary").click()
    until(page, "localStorage.getItem('tinkex.metrics').includes('reward')")
    _open_run(page, world)
    assert page.locator("[data-section=reward]").get_attribute("open") is None


def test_the_values_under_the_pointer_have_name_and_colour(page, world):
    """Each run is one colour in the list, in the legend and in the charts, unless two are alike."""
    page.goto(f"{world.base_url}/console")
    ids = [run.run_id for run in world.runs[:2]]
    listed = page.locator(f"tr:has(a[href$='{ids[0]}']) .dot").get_attribute("class")
    colors = {one: f"dot c{color}" for one, color in zip(ids, colors_of(ids), strict=True)}
    assert listed == colors[ids[0]]
    _open_comparison(page, world)
    chart = page.locator(".chart[data-metric=reward] canvas")
    tip = page.locator(".tip")
    _point_at_the_end(page, chart, f"step {NUM_STEPS - 1}")
    for run in world.runs[:2]:
        row = tip.locator("tr", has_text=run.name)
        assert row.locator(".dot").get_attribute("class") == colors[run.run_id]
        legend = page.locator(".legend li", has_text=run.name)
        assert legend.locator(".dot").get_attribute("class") == colors[run.run_id]
        assert float(row.locator("td").nth(1).text_content()) > 0.3
    drawn = page.evaluate("board.cards.get('reward').chart.series.map((s) => `dot c${s.color}`)")
    assert drawn == list(colors.values())
    page.mouse.move(2, 2)
    expect(tip).to_be_hidden()


def _point_at_the_end(page: Any, chart: Any, told: str) -> None:
    """Point again until the last step is told: charts may move while others are drawn."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while page.locator(".tip strong").all_text_contents() != [told]:
        assert time.monotonic() < deadline, page.locator(".tip").all_text_contents()
        if box := chart.bounding_box():
            page.mouse.move(2, 2)
            page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 60)
        page.wait_for_timeout(200)


def _downloaded(page: Any, act: Any) -> Path:
    with page.expect_download() as waiting:
        act()
    return Path(waiting.value.path())


def _download_all(page: Any, kind: str) -> None:
    page.locator("summary:text('Download')").click()
    page.get_by_role("link", name=f"Metrics as {kind}", exact=True).click()


def test_a_chart_is_downloaded_as_picture_and_as_data(page, world):
    _open_comparison(page, world)

    def file(kind: str) -> Path:
        return _downloaded(page, lambda: _choose(page, "reward", f"Download {kind}"))

    picture = ElementTree.fromstring(file("SVG").read_text())
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"reward", *(run.name for run in world.runs[:2])} <= set(texts)
    assert file("PNG").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = list(csv.DictReader(file("CSV").read_text().splitlines()))
    assert len(rows) == 2 * NUM_STEPS
    lines = [json.loads(line) for line in file("JSONL").read_text().splitlines()]
    assert [line["value"] for line in lines] == [float(row["value"]) for row in rows]
    assert {line["run"] for line in lines} == {run.name for run in world.runs[:2]}


def test_all_metrics_of_a_run_are_downloaded(page, world):
    _open_run(page, world)
    rows = list(
        csv.DictReader(
            _downloaded(page, lambda: _download_all(page, "CSV")).read_text().splitlines()
        )
    )
    assert {"step", "time", "reward", "eval/pass@1", "learning_rate"} <= set(rows[0])
    assert len(rows) == NUM_STEPS + 1  # the server counts its own steps from one
    file = _downloaded(page, lambda: _download_all(page, "JSONL"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("reward") for line in lines[:3]] == [float(row["reward"]) for row in rows[:3]]


def test_numbers_of_an_axis_have_one_unit_and_all_their_digits(page, world):
    _open_run(page, world)
    for numbers, told in (
        ([0, 5000, 10000, 15000], ["0", "5k", "10k", "15k"]),
        ([12.5, 12.75, 13], ["12.5", "12.75", "13"]),
        ([1, 1 + 1e-8], ["1", "1.00000001"]),
        ([1e-4, 1.5e-4], ["1e-4", "1.5e-4"]),
        ([0, 2.5e8], ["0", "250M"]),
    ):
        assert page.evaluate(f"labels({numbers})") == told
    assert page.evaluate("[12345678, 0.1234567, 1e-7].map(exact)") == [
        "12,345,678",
        "0.123457",
        "1e-7",
    ]
    assert page.evaluate("ticks(48, 100000, 6, true)") == [20000, 40000, 60000, 80000, 100000]


def test_numbers_that_arrive_in_any_order_are_smoothed_in_theirs(page, world):
    """A late one made a step in the smoothed curve, and the last to arrive was called the last."""
    _open_run(page, world)
    told = {"steps": [0, 2, 3, 1], "values": [4, 2, 1, 3], "at": [0, 2, 3, 1]}
    more = {"steps": [5, 4], "values": [-1, 0], "at": [5, 4], "isMore": True}
    taken = f"for (const one of {json.dumps([told, more])}) grow(k, 'x', one)"
    known = page.evaluate(f"(() => {{ const k = {{}}; {taken}; return k.x; }})()")
    assert known["steps"] == known["at"] == [0, 1, 2, 3, 4, 5]
    assert known["values"] == [4, 3, 2, 1, 0, -1]


def test_the_labels_of_an_axis_are_not_cut(page, world):
    _open_run(page, world)
    for low in (1e8, 1 - 1e-9, -1e300):
        view = "{ smooth: 0, log: false, axis: 'step' }"
        line = f"[[[0, {low}, {low}, {low}], [9, {low} * 1.00000001, {low}, {low}]]]"
        left = "(scene) => Math.max(...scene.says.map(widthOf)) < scene.frame.left"
        assert page.evaluate(f"({left})(sceneOf({line}, 400, 200, {view}))"), low


def test_a_menu_and_its_last_entry_lie_above_the_next_charts(page, world):
    """It was cut by the card below it."""
    _open_run(page, world)
    card = page.locator(".chart[data-metric=loss_per_token]")
    card.locator(".menu summary").click()
    last = card.locator(".menu-items button").last
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    at = f"{box['x'] + 20}, {box['y'] + box['height'] - 4}"
    assert page.evaluate(f"document.elementFromPoint({at}).textContent") == last.text_content()


def test_the_legend_and_the_values_stay_whole_and_in_sight(page, world):
    """The header of the page lay over the legend, and long rows stuck out of their box."""
    _open_comparison(page, world)
    page.locator("#smooth").fill("0.6")
    page.evaluate("scrollTo(0, 900)")
    header, legend = (page.locator(one).bounding_box() for one in ("header", ".legend"))
    assert legend["y"] >= header["y"] + header["height"] - 1
    page.evaluate("scrollTo(0, 0)")
    _point_at_the_end(page, page.locator("canvas[aria-label^='reward:']"), f"step {NUM_STEPS - 1}")
    assert page.evaluate("tip.box.scrollWidth <= tip.box.clientWidth")


def test_a_run_without_metrics_and_a_page_without_its_server_say_so(page, world):
    import tinkex

    with tinkex.ServiceClient(base_url=world.base_url, display_name="new") as service:
        run = service.create_lora_training_client("toy", rank=4).result().model_id
        page.goto(f"{world.base_url}/console/runs/{run}")
        expect(page.locator("#charts")).to_have_text(
            "No metrics yet. They appear with the first step."
        )
        page.goto(f"{world.base_url}/console/compare?runs={run}")
        expect(page.locator("#charts")).to_have_text("None of these runs has metrics yet.")
    page.expected.append("Failed to load")
    for address, told in (("live", "/runs/{}"), ("curves**", "/compare?runs={}")):
        page.route(f"**/{address}", lambda route: route.abort())
        page.goto(f"{world.base_url}/console{told.format(world.runs[0].run_id)}")
        expect(page.locator("#charts")).to_contain_text("could not be loaded")


def test_a_thousand_metrics_are_fluent(page, world):
    """Charts are made when they are seen; the search answers at once."""
    import tinkex

    names = [f"layer{index // 10}/norm{index % 10}" for index in range(1000)]
    with tinkex.ServiceClient(base_url=world.base_url, display_name="wide") as service:
        training = service.create_lora_training_client("toy", rank=4)
        for step in range(120):
            for part in range(0, 1000, 200):  # as many as one call takes
                chosen = names[part : part + 200]
                values = {name: float((step + at) % 17) for at, name in enumerate(chosen, part)}
                told = training.log_metrics(values, step=step)
        told.result()
        began = time.monotonic()
        page.goto(f"{world.base_url}/console/runs/{training.model_id}")
        until(page, "board.cards.size === 1000 && Boolean(document.querySelector('canvas'))")
        print(f"1,000 metrics of 120 points: first charts after {time.monotonic() - began:.1f} s")
    assert page.locator(".chart canvas").count() < 100
    assert page.evaluate("board.series('layer1/norm1')[0].isPart") is True
    until(page, "board.series('layer0/norm2')[0].steps.length === 120")  # of what is seen, all
    taken = page.evaluate(
        "(() => { const began = performance.now(); board.search.value = 'layer42/';"
        " board.arrange(); return performance.now() - began; })()"
    )
    print(f"search among 1,000 metrics: {taken:.0f} ms")
    assert len(_sections(page)["layer42"]) == 10
    assert taken < 2000


@needs_axe
def test_everybody_can_use_the_metrics(page, world):
    _open_run(page, world)
    page.locator(".chart .menu summary").first.click()
    page.locator(".constants summary").click()
    check_access(page)
    _open_comparison(page, world)
    for one in page.locator("#settings details summary").all():
        one.click()
    check_access(page)
