"""What a user of the official SDK does in an afternoon, checked step by step.

Runs under the interpreter of an official SDK (any version of `venvs.py`) against the server in
`TINKER_BASE_URL`, and prints one JSON line per step: `{"step", "outcome", "detail"}` with an
outcome of `ok`, `n/a` (this version has no such call) or `failed`. It imports nothing of ours.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tinker
from steps import NotInThisVersion, check, main_of, near
from tinker import types

TIMEOUT_S = 120
PROMPT = [11, 23, 35, 47, 59]
SEQUENCES = [[11, 23, 35, 47, 59, 71], [12, 24, 36, 48], [13, 25, 37, 49, 61]]
LR = float(os.environ.get("PEER_LR", "0.02"))


STEPS = (
    "session",
    "model",
    "train",
    "forward_only",
    "importance_sampling",
    "custom_loss",
    "traced_custom_loss",
    "save_and_load",
    "load_with_optimizer",
    "training_client_from_state",
    "training_client_from_state_with_optimizer",
    "sample",
    "sample_unnamed",
    "sample_base_model",
    "prompt_logprobs",
    "many_samples",
    "runs",
    "checkpoints",
    "sessions",
    "archive",
    "external_weights",
    "copy_weights",
    "admin",
    "whoami",
    "command_line",
    "close",
)


def done(future: object) -> object:
    """The result of a future, whichever of the SDK's kinds it is; other values pass through."""
    return future.result(timeout=TIMEOUT_S) if hasattr(future, "result") else future


def need(owner: object, name: str) -> object:
    found = getattr(owner, name, None)
    if found is None:
        raise NotInThisVersion(f"no {type(owner).__name__}.{name}")
    return found


def datum(tokens: list[int], **extra: list[float]) -> types.Datum:
    """Predict each next token of a sequence, with weight one."""
    targets = tokens[1:]
    inputs = {
        "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
    }
    values = extra or {"weights": [1.0] * len(targets)}
    for name, data in values.items():
        inputs[name] = types.TensorData(data=data, dtype="float32", shape=[len(data)])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs_of(output: object) -> list[list[float]]:
    return [list(map(float, record["logprobs"].data)) for record in output.loss_fn_outputs]


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def retrain_loss(client: object, data: list[types.Datum]) -> float:
    """One more step, then the loss: tells an optimizer that was restored from a fresh one."""
    client.forward_backward(data, "cross_entropy")
    done(client.optim_step(types.AdamParams(learning_rate=LR)))
    return loss_of(client, data)


def loss_of(client: object, data: list[types.Datum]) -> float:
    return done(client.forward(data, "cross_entropy")).metrics["loss:sum"]


class Peer:
    def __init__(self) -> None:
        self.data = [datum(tokens) for tokens in SEQUENCES]

    # ---------------------------------------------------------------------------- training

    def session(self) -> str:
        self.service = tinker.ServiceClient(user_metadata={"peer": tinker.__version__})
        models = done(self.service.get_server_capabilities()).supported_models
        check(bool(models), "no supported models")
        self.base_model = os.environ.get("PEER_MODEL") or models[0].model_name
        return self.base_model

    def model(self) -> str:
        self.client = self.service.create_lora_training_client(
            base_model=self.base_model, rank=8, seed=7
        )
        info = done(self.client.get_info())
        check(info.model_data.model_name == self.base_model, f"name {info.model_data.model_name}")
        check(info.lora_rank == 8, f"rank {info.lora_rank}")
        return info.model_id

    def train(self) -> str:
        losses = []
        for _ in range(5):
            # Pipelined, as the documentation recommends: the step is queued before the loss is in.
            loss = self.client.forward_backward(self.data, "cross_entropy")
            step = self.client.optim_step(types.AdamParams(learning_rate=LR))
            output = done(loss)
            done(step)
            check(len(output.loss_fn_outputs) == len(self.data), "one output per datum")
            losses.append(output.metrics["loss:sum"])
        total = -sum(sum(row) for row in logprobs_of(output))
        near(total, losses[-1], 1e-3 * max(1, abs(total)), "loss and the sum of its logprobs")
        check(
            all(a > b for a, b in zip(losses, losses[1:], strict=False)),
            f"losses do not fall: {losses}",
        )
        return " -> ".join(f"{loss:.3f}" for loss in (losses[0], losses[-1]))

    def forward_only(self) -> str:
        first = done(self.client.forward(self.data, "cross_entropy"))
        second = done(self.client.forward(self.data, "cross_entropy"))
        check(logprobs_of(first) == logprobs_of(second), "two forwards differ")
        return f"{first.metrics['loss:sum']:.4f}"

    def importance_sampling(self) -> str:
        old = logprobs_of(done(self.client.forward(self.data, "cross_entropy")))
        data = [
            datum(tokens, logprobs=row, advantages=[1.0] * len(row))
            for tokens, row in zip(SEQUENCES, old, strict=True)
        ]
        output = done(self.client.forward_backward(data, "importance_sampling"))
        count = sum(len(row) for row in old)
        # All ratios are one before any step, so the loss is minus the number of tokens.
        near(output.metrics["loss:sum"], -count, 1e-3, "importance-sampling loss at ratio one")
        done(self.client.optim_step(types.AdamParams(learning_rate=1e-6)))
        return f"{output.metrics['loss:sum']:.4f}"

    def custom_loss(self) -> str:
        call = need(self.client, "forward_backward_custom")

        def squared(data: list, logprobs: list) -> tuple:
            loss = sum((row**2).sum() for row in logprobs)
            return loss, {"squared": float(loss.detach())}

        before = logprobs_of(done(self.client.forward(self.data, "cross_entropy")))
        expected = sum(value**2 for row in before for value in row)
        output = done(call(self.data, squared))
        near(output.metrics["squared"], expected, 1e-3 * expected, "custom metric")
        done(self.client.optim_step(types.AdamParams(learning_rate=LR)))
        after = logprobs_of(done(self.client.forward(self.data, "cross_entropy")))
        now = sum(value**2 for row in after for value in row)
        check(now < expected, f"custom loss did not fall: {expected} -> {now}")
        return f"{expected:.3f} -> {now:.3f}"

    def traced_custom_loss(self) -> str:
        create = need(self.service, "create_custom_loss")

        def neg_ll(logprobs, weights):
            loss = -(logprobs * weights).sum()
            return loss, {"custom/neg_ll:sum": loss}

        handle = done(create(neg_ll, {"logprobs": 1, "weights": 1}))
        expected = loss_of(self.client, self.data)
        output = done(self.client.forward_backward_custom(self.data, handle))
        near(output.metrics["loss:sum"], expected, 1e-3, "traced loss and cross entropy")
        near(output.metrics["custom/neg_ll:sum"], expected, 1e-3, "metric of the traced loss")
        done(self.client.optim_step(types.AdamParams(learning_rate=1e-6)))
        return f"{expected:.4f}, loss_id {handle.loss_id}"

    # ------------------------------------------------------------------------------ states

    def save_and_load(self) -> str:
        saved_loss = loss_of(self.client, self.data)
        self.state = done(self.client.save_state("step-a")).path
        check(self.state.startswith("tinker://"), self.state)
        self.next_loss = retrain_loss(self.client, self.data)
        check(self.next_loss != saved_loss, "a step changed nothing")
        done(self.client.load_state(self.state))
        near(loss_of(self.client, self.data), saved_loss, 1e-6, "loss after load_state")
        self.saved_loss = saved_loss
        return self.state

    def load_with_optimizer(self) -> str:
        load = need(self.client, "load_state_with_optimizer")
        fresh = retrain_loss(self.client, self.data)
        done(load(self.state))
        near(loss_of(self.client, self.data), self.saved_loss, 1e-6, "loss after the load")
        exact = retrain_loss(self.client, self.data)
        near(exact, self.next_loss, 1e-6, "the same step after the load")
        check(abs(fresh - self.next_loss) > 1e-9, "a weights-only load kept the optimizer")
        return f"{exact!r} = {self.next_loss!r}; with a fresh optimizer {fresh!r}"

    def training_client_from_state(self) -> str:
        other = self.service.create_training_client_from_state(self.state)
        near(loss_of(other, self.data), self.saved_loss, 1e-6, "loss of the new client")
        return done(other.get_info()).model_id

    def training_client_from_state_with_optimizer(self) -> str:
        create = need(self.service, "create_training_client_from_state_with_optimizer")
        other = create(self.state)
        near(retrain_loss(other, self.data), self.next_loss, 1e-6, "the next step")
        return done(other.get_info()).model_id

    # ---------------------------------------------------------------------------- sampling

    def sample(self) -> str:
        self.sampler_path = done(self.client.save_weights_for_sampler("sampler-a")).path
        self.sampler = self.service.create_sampling_client(model_path=self.sampler_path)
        return self._sample_twice(self.sampler)

    def _sample_twice(self, sampler: object) -> str:
        params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=3)
        prompt = types.ModelInput.from_ints(PROMPT)
        first, second = (
            done(sampler.sample(prompt=prompt, num_samples=2, sampling_params=params))
            for _ in range(2)
        )
        check(len(first.sequences) == 2, "two samples")
        for a, b in zip(first.sequences, second.sequences, strict=True):
            check(list(a.tokens) == list(b.tokens), "a seed gives one answer")
            check(0 < len(a.tokens) <= 8, f"{len(a.tokens)} tokens")
            check(len(a.logprobs) == len(a.tokens), "one logprob per token")
            check(all(value <= 0 for value in a.logprobs), "logprobs are not positive")
            check(a.stop_reason in ("length", "stop"), a.stop_reason)
        return str(list(first.sequences[0].tokens))

    def sample_unnamed(self) -> str:
        sampler = self.client.save_weights_and_get_sampling_client(name="sampler-b")
        return self._sample_twice(sampler)

    def sample_base_model(self) -> str:
        return self._sample_twice(self.service.create_sampling_client(base_model=self.base_model))

    def prompt_logprobs(self) -> str:
        """The sampler scores a prompt as the trainer does."""
        tokens = SEQUENCES[0]
        prompt = types.ModelInput.from_ints(tokens)
        params = types.SamplingParams(max_tokens=1)
        answer = done(
            self.sampler.sample(
                prompt=prompt, num_samples=1, sampling_params=params, include_prompt_logprobs=True
            )
        )
        scored = list(answer.prompt_logprobs)
        check(len(scored) == len(tokens), f"{len(scored)} for {len(tokens)} tokens")
        check(scored[0] is None or math.isnan(scored[0]), f"first is {scored[0]}")
        alone = list(done(self.sampler.compute_logprobs(prompt)))
        check(scored[1:] == alone[1:], "compute_logprobs differs")
        trained = logprobs_of(done(self.client.forward(self.data, "cross_entropy")))[0]
        gap = max(abs(a - b) for a, b in zip(scored[1:], trained, strict=True))
        check(gap < 1e-4, f"trainer and sampler differ by {gap}")
        return f"largest gap to the trainer {gap:.1e}"

    def many_samples(self) -> str:
        params = types.SamplingParams(max_tokens=4)
        prompts = [types.ModelInput.from_ints([n % 90 + 1, 5, 9]) for n in range(100)]
        started = time.time()
        futures = [
            self.sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)
            for prompt in prompts
        ]
        answers = [done(future) for future in futures]
        check(all(len(answer.sequences) == 1 for answer in answers), "one sample each")
        return f"100 in {time.time() - started:.1f} s"

    # -------------------------------------------------------------------------------- REST

    def runs(self) -> str:
        self.rest = self.service.create_rest_client()
        run_id = self.state.split("/")[2]
        listed = done(self.rest.list_training_runs(limit=50))
        check(run_id in [run.training_run_id for run in listed.training_runs], "run not listed")
        run = done(self.rest.get_training_run(run_id))
        check((run.base_model, run.lora_rank) == (self.base_model, 8), f"{run}")
        by_path = done(self.rest.get_training_run_by_tinker_path(self.state))
        check(by_path.training_run_id == run_id, "run by path")
        check(run.last_checkpoint.tinker_path == self.state, f"{run.last_checkpoint}")
        return run_id

    def checkpoints(self) -> str:
        run_id = self.state.split("/")[2]
        listed = done(self.rest.list_checkpoints(run_id)).checkpoints
        paths = [checkpoint.tinker_path for checkpoint in listed]
        check(self.state in paths, f"{self.state} not in {paths}")
        check(self.sampler_path in paths, f"{self.sampler_path} not in {paths}")
        check(all(checkpoint.size_bytes > 0 for checkpoint in listed), "sizes")
        mine = done(self.rest.list_user_checkpoints(limit=100)).checkpoints
        check(self.state in [checkpoint.tinker_path for checkpoint in mine], "user listing")
        done(self.rest.publish_checkpoint_from_tinker_path(self.state))
        done(self.rest.unpublish_checkpoint_from_tinker_path(self.state))
        if hasattr(self.rest, "set_checkpoint_ttl_from_tinker_path"):
            done(self.rest.set_checkpoint_ttl_from_tinker_path(self.state, 7200))
            done(self.rest.set_checkpoint_ttl_from_tinker_path(self.state, None))
        if hasattr(self.rest, "get_weights_info_by_tinker_path"):
            info = done(self.rest.get_weights_info_by_tinker_path(self.state))
            check((info.base_model, info.lora_rank) == (self.base_model, 8), f"{info}")
        extra = done(self.client.save_state("to-delete")).path
        done(self.rest.delete_checkpoint_from_tinker_path(extra))
        left = done(self.rest.list_checkpoints(run_id)).checkpoints
        check(extra not in [checkpoint.tinker_path for checkpoint in left], "deleted but listed")
        return f"{len(paths)} listed"

    def sessions(self) -> str:
        need(self.rest, "list_sessions")
        session_id = self.state.split("/")[2].split(":")[0]
        listed = done(self.rest.list_sessions(limit=50)).sessions
        check(session_id in listed, "session not listed")
        session = done(self.rest.get_session(session_id))
        check(len(session.training_run_ids) >= 2, f"{session}")
        check(len(session.sampler_ids) >= 2, f"{session}")
        sampler = done(self.rest.get_sampler(session.sampler_ids[0]))
        check(sampler.base_model == self.base_model, f"{sampler}")
        if hasattr(self.rest, "search_sessions"):
            request = types.SessionSearchRequest(user_metadata={"peer": tinker.__version__})
            found = done(self.rest.search_sessions(request)).sessions
            check(session_id in [summary.session_id for summary in found], "search")
        if hasattr(self.rest, "export_session_trace"):
            trace = fetch(done(self.rest.export_session_trace(session_id)))
            check(b"optim_step" in trace, f"trace of {len(trace)} bytes")
        return session_id

    def archive(self) -> str:
        call = need(self.rest, "get_checkpoint_archive_url_from_tinker_path")
        answer = done(call(self.sampler_path))
        with tarfile.open(fileobj=io.BytesIO(fetch(answer.url))) as tar:
            names = tar.getnames()
        check("adapter_model.safetensors" in names or "manifest.json" in names, f"{names}")
        expires = answer.expires  # Naive in the oldest versions, and UTC all the same.
        expires = expires if expires.tzinfo else expires.replace(tzinfo=UTC)
        check(expires > datetime.now(UTC) + timedelta(minutes=5), f"expires {expires}")
        return f"{len(names)} files"

    def external_weights(self) -> str:
        save = need(self.client, "save_weights_external")
        path = done(save("outside", ttl_seconds=3600)).path
        urls = done(self.rest.get_external_weights_urls(path)).urls
        sizes = {name: len(fetch(url)) for name, url in urls.items()}
        check(bool(sizes) and all(sizes.values()), f"{sizes}")
        done(self.rest.delete_checkpoint_from_tinker_path(path))
        return f"{sorted(sizes)}"

    def copy_weights(self) -> str:
        copy = need(self.rest, "copy_weights")
        path = done(copy(self.state, "project-x"))
        check(path != self.state, "the copy has a path of its own")
        other = self.service.create_training_client_from_state(path)
        near(loss_of(other, self.data), self.saved_loss, 1e-6, "loss of the copy")
        return path

    def admin(self) -> str:
        need(self.rest, "get_audit_log")
        entries = done(self.rest.get_audit_log()).entries
        check(bool(entries), "empty audit log")
        if not hasattr(self.rest, "get_billing_usage"):
            return f"{len(entries)} audit entries"
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        start, end = hour - timedelta(hours=1), hour + timedelta(hours=1)
        usage = done(self.rest.get_billing_usage(start, end))
        kinds = {event.event_info.type for event in usage.data}
        wanted = {"training", "sampling_prefill", "sampling_sample", "checkpoint"}
        check(wanted <= kinds, f"usage has {kinds}")
        if hasattr(self.rest, "get_current_checkpoint_storage_usage"):
            rows = done(self.rest.get_current_checkpoint_storage_usage()).data
            check(sum(row.size_bytes for row in rows) > 0, "storage usage")
        return f"{len(entries)} audit entries; usage {sorted(kinds)}"

    def whoami(self) -> str:
        call = need(self.rest, "whoami")
        return done(call()).user_urn

    def command_line(self) -> str:
        """The SDK's own command, as its users type it. Slow to start, so only when asked for."""
        command = Path(sys.executable).with_name("tinker")
        if not command.exists() or os.environ.get("PEER_CLI") != "1":
            raise NotInThisVersion("no tinker command, or not asked for")

        def run(*arguments: str) -> str:
            result = subprocess.run(
                [str(command), "-f", "json", *arguments], capture_output=True, text=True, timeout=90
            )
            check(result.returncode == 0, f"{arguments}: {result.stderr[-300:]}")
            return result.stdout

        listed = json.loads(run("run", "list"))["runs"]
        check(self.state.split("/")[2] in [run["training_run_id"] for run in listed], "run list")
        info = json.loads(run("checkpoint", "info", self.state))
        check(info["tinker_path"] == self.state, f"{info}")
        if "download" not in run("checkpoint", "--help"):
            return f"{len(listed)} runs; this version has no download"
        # Newer versions export a training checkpoint, older ones fetch the archive.
        path = self.state if hasattr(self.client, "save_weights_external") else self.sampler_path
        with tempfile.TemporaryDirectory() as folder:
            run("checkpoint", "download", path, "-o", folder)
            files = [file for file in Path(folder).rglob("*") if file.is_file()]
            check(any(file.stat().st_size > 100 for file in files), f"downloaded {files}")
        return f"downloaded {len(files)} files"

    def close(self) -> str:
        done(need(self.service, "close")("success"))
        return "finished"


if __name__ == "__main__":
    sys.exit(main_of(Peer(), STEPS))
