"""What a trace shows beyond the journal: passes, samples and refusals, each user's apart."""

from __future__ import annotations

from pathlib import Path

from app_world import open_app
from perfetto_slices import perfetto_slices

from tinkex.server.rest.perfetto import Trace
from tinkex.server.runs.timeline import (
    LIMITS,
    MAX_SPANS,
    MAX_USERS,
    PASSES,
    Timelines,
    TimelineSpan,
)
from tinkex.store.journal import TRACED_CHARACTERS

KEYS = ("tml-ann=ann", "tml-bob=bob")
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "num_samples": 2,
    "sampling_params": {"max_tokens": 4, "seed": 1},
}
DATUM = {
    "model_input": SAMPLE["prompt"],
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]},
    },
}


async def test_a_trace_shows_passes_steps_saves_samples_and_refusals(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS, max_user_models=1) as world:
        model = await world.model(key="tml-ann")
        session = model.split(":")[0]

        async def train(name: str, **body: object) -> dict[str, object]:
            promise = await world.ok(name, {"model_id": model, **body}, key="tml-ann")
            return await world.result(promise, key="tml-ann")

        data = {"data": [DATUM], "loss_fn": "cross_entropy"}
        await train("forward_backward", seq_id=1, forward_backward_input=data)
        await train("optim_step", seq_id=2, adam_params={"learning_rate": 0.1})
        saved = await train("save_weights_for_sampler", seq_id=3, path="one")
        sample = SAMPLE | {"model_path": saved["path"]}
        await world.result(await world.ok("asample", sample, key="tml-ann"), key="tml-ann")
        for _ in range(3):
            more = {"session_id": session, "model_seq_id": 1, "base_model": "toy"}
            answer = await world.post("create_model", more, key="tml-ann")
            assert answer.status_code == 429

        async def slices(path: str):
            link = await world.http.get(f"/api/v1/{path}", headers={"X-API-Key": "tml-ann"})
            return perfetto_slices((await world.http.get(link.json()["url"])).content)

        run = await slices(f"training_runs/{model}/trace_export")
        ran = [one.name for one in run[model, "requests"]]
        assert ran == ["create_model", "forward_backward", "optim_step", "save_weights_for_sampler"]
        [done] = run[model, PASSES]
        [asked] = (one for one in run[model, "requests"] if one.name == "forward_backward")
        assert asked.began_at - 0.1 <= done.began_at <= done.ended_at <= asked.ended_at
        assert done.details["tokens"] == 3
        assert str(done.details["request_id"]).startswith(str(asked.details["request_id"]))
        [sampled] = run[model, "samples"]
        assert sampled.details["sampled_tokens"] == 8
        assert sampled.details["prompt_tokens"] == 3
        [decode] = run[model, "prefill and decode"]
        assert sampled.began_at - 0.1 <= decode.began_at <= decode.ended_at <= sampled.ended_at
        refused = run[(LIMITS,)]  # one of them, unless a second went by between two
        assert {one.name for one in refused} == {"429 /api/v1/create_model"}
        assert sum(int(str(one.details["count"])) for one in refused) == 3
        assert (await slices(f"sessions/{session}/trace_export")).keys() == run.keys()
        named = {"name": "by its name"}
        told = await world.http.put(
            f"/tinkex/v1/runs/{model}", json=named, headers={"X-API-Key": "tml-ann"}
        )
        assert told.status_code == 200, told.text
        by_name = await slices("training_runs/by its name/trace_export")
        assert by_name.keys() == run.keys()


async def test_a_trace_has_the_beginning_of_an_error(tmp_path: Path) -> None:
    """50,000 requests that were refused with 2000 characters each took a gigabyte."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key="tml-ann")
        asked = {"model_id": model, "seq_id": 1, "path": "tinker://" + "a" * 2000}
        refused = await world.post("load_weights", asked, key="tml-ann")
        assert len(refused.json()["detail"]) == 2000
        url = f"/api/v1/training_runs/{model}/trace_export"
        link = (await world.http.get(url, headers={"X-API-Key": "tml-ann"})).json()["url"]
        slices = perfetto_slices((await world.http.get(link)).content)
        [load] = (one for one in slices[model, "requests"] if one.name == "load_weights")
        error = str(load.details["error"])
        assert len(error) == TRACED_CHARACTERS
        assert refused.json()["detail"].startswith(error)


def _span(number: int, track: str = PASSES) -> TimelineSpan:
    return TimelineSpan("s", "r", track, str(number), number, number, {})


def test_a_users_timeline_keeps_the_latest_and_pushes_out_nobody_elses() -> None:
    timelines = Timelines()
    timelines.add("bob", [_span(0)])
    for number in range(MAX_SPANS + 10):
        timelines.add("ann", [_span(number)])
    mine = timelines.of_user("ann")
    assert (len(mine), mine[-1].name) == (MAX_SPANS, str(MAX_SPANS + 9))
    assert len(timelines.of_user("bob")) == 1
    for number in range(MAX_USERS):
        timelines.add(f"user-{number}", [_span(0)])
    assert not timelines.of_user("bob"), "who did nothing for longest is forgotten first"
    assert not timelines.of_user("nobody")


def test_refusals_of_one_moment_are_counted_and_later_ones_told_apart() -> None:
    timelines = Timelines()
    for at in (1.0, 1.5, 2.0, 9.0):
        timelines.refused("ann", "/asample", at)
    timelines.refused("ann", "/create_model", 9.1)
    told = [(one.name, one.details["count"]) for one in timelines.of_user("ann")]
    assert told == [("429 /asample", 3), ("429 /asample", 1), ("429 /create_model", 1)]


def test_slices_that_overlap_go_to_tracks_of_one_name() -> None:
    trace = Trace("n\ud800me")
    for number in range(100):  # each begins before the one before it has ended; added backwards
        began_at = 100.0 - number
        trace.slice(("run", "waits"), f"{number}", began_at, began_at + 1.5, {"number": number})
    trace.slice(("run", "waits"), "none", 200.0, 200.0, {"share": 0.5, "less": -1})
    slices = perfetto_slices(trace.encoded())["run", "waits"]
    assert [one.name for one in slices] == [*(str(99 - n) for n in range(100)), "none"]
    assert all(one.ended_at - one.began_at > 1.4 for one in slices[:-1])
    assert slices[-1].details == {"share": 0.5, "less": -1}
