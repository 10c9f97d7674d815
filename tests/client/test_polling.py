"""Every row of contract 4.2: what the server says, what the client does (R17, R18)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hostile import json_reply
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.futures import Waiting
from tinkex.client.http.call import Call
from tinkex.client.http.http1 import Reply
from tinkex.client.http.limits import ByteSemaphore
from tinkex.client.http.retry import BillingPause
from tinkex.client.session.polling import Expect, Poller, QueueWatch
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    PromiseLostError,
    RequestFailedError,
    RetrieveError,
)

EXPECT = Expect("OptimStep", types.OptimStepResponse)
DONE = json_reply({"metrics": {"a:sum": 1.0}})
PENDING = json_reply({"queue_state": "paused_capacity", "queue_state_reason": "3 ahead"}, 408)


class Polled:
    """Answers in order; remembers what was asked and how long it took."""

    def __init__(self, answers: Sequence[Reply | Exception], **options: Any) -> None:
        self.answers = list(answers)
        self.calls: list[Call] = []
        self.seconds = 0.0
        self.inflight = ByteSemaphore(1000)
        self.waiting = Waiting()
        self.options = options

    async def exchange(self, call: Call) -> Reply:
        self.calls.append(call)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, expect: Any = EXPECT) -> Any:
        async def main() -> Any:
            billing = BillingPause(self.options.get("billing_s", 3600.0))
            poller = Poller(self.exchange, inflight=self.inflight, billing=billing)
            started = asyncio.get_running_loop().time()
            try:
                return await poller.wait(
                    "r1",
                    expect,
                    waiting=self.waiting,
                    watch=self.options.get("watch"),
                    roundtrip_s=0.25,
                )
            finally:
                self.seconds = asyncio.get_running_loop().time() - started

        return run_virtual(main())


def test_a_json_result_is_final() -> None:
    polled = Polled([DONE])
    assert polled.run().metrics == {"a:sum": 1.0}
    assert polled.seconds == 0.0


def test_a_protobuf_result_is_decoded_by_its_expected_type() -> None:
    from tinkex.wire import results

    answer = types.SampleResponse([types.SampledSequence("stop", tokens=[1, 2])])
    body = results.encode(answer, "application/x-protobuf")
    polled = Polled([Reply(200, body.headers | {"content-type": body.content_type}, body.content)])
    expect = Expect("Sample", types.SampleResponse, in_protobuf=True)
    assert polled.run(expect).sequences[0].tokens == [1, 2]
    assert polled.calls[0].headers["Accept"] == "application/x-protobuf"


def test_the_headers_tell_number_type_and_roundtrip_of_a_poll() -> None:
    polled = Polled([PENDING, DONE])
    polled.run()
    first, second = (call.headers for call in polled.calls)
    assert first["X-Tinker-Request-Iteration"] == "0"
    assert first["X-Tinker-Request-Type"] == "OptimStep"
    assert first["X-Tinker-Create-Promise-Roundtrip-Time"] == "0.250000"
    assert second["X-Tinker-Request-Iteration"] == "1"
    assert "X-Tinker-Create-Promise-Roundtrip-Time" not in second


@pytest.mark.parametrize("answer", [PENDING, json_reply({"type": "try_again", "request_id": "x"})])
def test_a_pending_answer_is_polled_again_at_once(answer: Reply) -> None:
    polled = Polled([answer, answer, DONE])
    polled.run()
    assert polled.seconds == 0.0


def test_a_server_that_does_not_hold_its_polls_is_not_hammered() -> None:
    """R17: backoff up to 30 s, only where the server does not long-poll."""
    polled = Polled([PENDING] * 20 + [DONE])
    polled.run()
    assert 150 < polled.seconds < 400


def test_payload_metadata_reserves_bytes_and_asks_for_the_payload() -> None:
    announced = json_reply({"status": "complete_metadata", "response_payload_size": 600})
    polled = Polled([announced, DONE])
    polled.run()
    bodies = [orjson.loads(call.body.content) for call in polled.calls]
    assert [body["allow_metadata_only"] for body in bodies] == [True, False]
    assert polled.inflight.balance == 1000


def test_announcing_a_payload_twice_is_an_error_and_frees_the_bytes() -> None:
    announced = json_reply({"status": "complete_metadata", "response_payload_size": 600})
    polled = Polled([announced, announced])
    with pytest.raises(APIResponseValidationError, match="twice"):
        polled.run()
    assert polled.inflight.balance == 1000


@pytest.mark.parametrize(
    ("sent", "read"), [("user", "user"), ("Server", "server"), ("odd", "unknown")]
)
def test_an_error_in_the_answer_is_final_and_keeps_its_category(sent: str, read: str) -> None:
    polled = Polled([json_reply({"error": "no such token", "category": sent})])
    with pytest.raises(RequestFailedError, match="no such token") as caught:
        polled.run()
    assert (caught.value.category, caught.value.request_id) == (read, "r1")


def test_a_pending_status_is_no_result_and_says_why_it_waits() -> None:
    """Contract 000, 3.4: `optim_step` must not take it for a step without metrics."""
    pending = {"status": "pending", "queue_state": "paused_capacity", "queue_state_reason": "full"}
    polled = Polled([json_reply(pending)] * 12 + [DONE])
    assert polled.run().metrics == {"a:sum": 1.0}
    assert polled.waiting.reason == "full"
    assert polled.seconds > 10, "a server that does not hold polls is asked with growing pauses"


@pytest.mark.parametrize("status", ["completed", "Completed"])
def test_a_completed_status_has_its_result_inside(status: str) -> None:
    inside = {"status": status, "result": {"metrics": {"a:sum": 2.0}}}
    assert Polled([json_reply(inside)]).run().metrics == {"a:sum": 2.0}
    saved = Expect("SaveWeights", types.SaveWeightsResponse)
    result = {"status": status, "result": {"path": "tinker://m/weights/a"}}
    assert Polled([json_reply(result)]).run(saved).path == "tinker://m/weights/a"
    nothing = Polled([json_reply({"status": status})])
    with pytest.raises(APIResponseValidationError):
        nothing.run(saved)


def test_a_completed_result_with_nan_is_read() -> None:
    content = (
        b'{"status": "completed", "result": {"loss_fn_outputs": [], "metrics": {"a:sum": NaN}}}'
    )
    expect = Expect("ForwardBackward", types.ForwardBackwardOutput)
    output = Polled([Reply(200, {"content-type": "application/json"}, content)]).run(expect)
    assert output.metrics["a:sum"] != output.metrics["a:sum"]


@pytest.mark.parametrize(
    ("body", "text", "category"),
    [
        ({"error": {"message": "bad token", "category": "User"}}, "bad token", "user"),
        ({"error": {"message": "out of memory"}, "category": "server"}, "out of memory", "server"),
        ({"error": "flat", "category": "user"}, "flat", "user"),
        ({"error": {"odd": 1}}, '{"odd":1}', "unknown"),
        ({}, "gave no reason", "unknown"),
    ],
)
def test_a_failed_status_keeps_message_and_category(
    body: dict[str, Any], text: str, category: str
) -> None:
    with pytest.raises(RequestFailedError, match=text) as caught:
        Polled([json_reply({"status": "failed", **body})]).run()
    assert caught.value.category == category


@pytest.mark.parametrize("status", ["archived", 7, True, {"state": "done"}, ""])
def test_an_unknown_status_never_reads_as_success(status: Any) -> None:
    answer = json_reply({"status": status, "metrics": {"a:sum": 1.0}})
    with pytest.raises(APIResponseValidationError, match="which this SDK does not know"):
        Polled([answer]).run()


def test_a_null_is_no_status() -> None:
    assert Polled([json_reply({"status": None, "metrics": {"a": 1.0}})]).run().metrics == {"a": 1.0}


def test_a_result_may_stand_beside_its_completed_status() -> None:
    answer = json_reply({"status": "completed", "metrics": {"a:sum": 3.0}})
    assert Polled([answer]).run().metrics == {"a:sum": 3.0}


def test_a_result_of_the_wrong_shape_is_a_validation_error() -> None:
    with pytest.raises(APIResponseValidationError, match="OptimStep result cannot be read"):
        Polled([json_reply({"metrics": "none"})]).run()


def test_410_means_that_the_promise_is_lost() -> None:
    with pytest.raises(PromiseLostError) as caught:
        Polled([json_reply({}, 410)]).run()
    assert caught.value.request_id == "r1"


def test_5xx_is_polled_again_at_once() -> None:
    polled = Polled([json_reply({}, 502), json_reply({}, 500), DONE])
    polled.run()
    assert polled.seconds == 0.0


@pytest.mark.parametrize("status", [429, 503])
def test_a_poll_waits_as_long_as_the_server_asks(status: int) -> None:
    asked = [json_reply({}, status, **{"retry-after": "7"})]
    asked += [json_reply({}, status, **{"retry-after-ms": "500"})]
    polled = Polled([*asked, DONE])
    polled.run()
    assert polled.seconds == 7.5


@pytest.mark.parametrize("status", [429, 402, 400, 500])
def test_a_poll_that_the_server_wants_no_more_of_is_final(status: int) -> None:
    answer = json_reply({"detail": "over"}, status, **{"x-should-retry": "False"})
    with pytest.raises(RetrieveError, match="over") as caught:
        Polled([answer]).run()
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "answer", [json_reply({}, 429), APIConnectionError("reset"), APITimeoutError("slow")]
)
def test_429_and_connection_trouble_back_off_up_to_thirty_seconds(answer: Any) -> None:
    polled = Polled([answer] * 7 + [DONE])
    polled.run()
    assert polled.seconds == 1 + 2 + 4 + 8 + 16 + 30 + 30


def test_another_answer_resets_the_backoff() -> None:
    polled = Polled([json_reply({}, 429), PENDING, json_reply({}, 429), DONE])
    polled.run()
    assert polled.seconds == 2.0


def test_400_is_forgiven_three_times_and_a_queued_408_resets_the_count() -> None:
    bad = json_reply({"detail": "flaky"}, 400)
    polled = Polled([bad, bad, bad, PENDING, bad, bad, bad, DONE])
    polled.run()
    with pytest.raises(RetrieveError, match="flaky"):
        Polled([bad] * 4).run()


def test_402_pauses_until_the_patience_is_over() -> None:
    unpaid = json_reply({"detail": "no credit"}, 402)
    polled = Polled([unpaid, unpaid, DONE])
    polled.run()
    assert polled.seconds == 10.0
    with pytest.raises(RetrieveError, match="no credit"):
        Polled([unpaid] * 50, billing_s=60.0).run()


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422])
def test_any_other_status_is_final_and_also_a_value_error(status: int) -> None:
    with pytest.raises(ValueError, match="refuses to answer") as caught:
        Polled([json_reply({"detail": "no"}, status)]).run()
    assert isinstance(caught.value, RetrieveError)
    assert caught.value.status_code == status
    assert caught.value.__cause__ is not None


def test_a_pending_future_says_why_it_waits() -> None:
    polled = Polled([PENDING, DONE])
    polled.run()
    assert (polled.waiting.reason, polled.waiting.num_polls) == ("3 ahead", 2)
    assert polled.waiting.request_id == "r1"


def test_observers_hear_each_change_once_and_the_log_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R18."""
    heard: list[tuple[Any, str | None]] = []

    class Observer(tinkex.QueueStateObserver):
        def on_queue_state_change(self, state: Any, reason: str | None) -> None:
            heard.append((state, reason))

    now = [0.0]
    watch = QueueWatch("training", Observer(), clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for now[0], state in [
            (0.0, "paused_capacity"),
            (10.0, "paused_capacity"),
            (20.0, "active"),
            (30.0, "paused_rate_limit"),
            (61.0, "paused_rate_limit"),
        ]:
            watch.saw("r", state, None)
    assert [state for state, _ in heard] == [
        types.QueueState.PAUSED_CAPACITY,
        types.QueueState.ACTIVE,
        types.QueueState.PAUSED_RATE_LIMIT,
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "training waits: the server is short on capacity",
        "training waits: the account's rate limit is reached",
    ]


def test_an_observer_that_fails_does_not_break_the_poll(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_queue_state_change(self, state: Any, reason: str | None) -> None:
            raise RuntimeError("mine")

    watch = QueueWatch("sampling", Broken())
    assert Polled([PENDING, DONE], watch=watch).run().metrics == {"a:sum": 1.0}
    assert "A queue observer failed" in caplog.text
