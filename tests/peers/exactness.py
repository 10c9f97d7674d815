"""What users must be able to rely on to the bit, checked with the newest official SDK.

Same manner as `scenario.py`: one JSON line per step. The server runs with `--deterministic` and two
keys; `PEER_EXACT=0` (a server without it) allows rounding of 1e-5 where tenants share a pass.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time

import tinker
from scenario import PROMPT, SEQUENCES, datum, done, fetch, logprobs_of, loss_of, main_of, near
from scenario import check as expect
from tinker import types

LR = float(os.environ.get("PEER_LR", "0.02"))
EXACT = os.environ.get("PEER_EXACT", "1") == "1"


class Exactness:
    def __init__(self) -> None:
        self.service = tinker.ServiceClient()
        self.other = tinker.ServiceClient(api_key=os.environ["PEER_OTHER_KEY"])
        self.base_model = (
            done(self.service.get_server_capabilities()).supported_models[0].model_name
        )
        self.data = [datum(tokens) for tokens in SEQUENCES]
        self.count = 0

    # ------------------------------------------------------------------------------ helpers

    def client(self, service: object | None = None) -> object:
        service = service or self.service
        return service.create_lora_training_client(base_model=self.base_model, rank=4, seed=5)

    def step(self, client: object, data: list | None = None, **params: float) -> dict:
        client.forward_backward(data or self.data, "cross_entropy")
        params = {"learning_rate": LR, **params}
        return done(client.optim_step(types.AdamParams(**params))).metrics

    def fingerprint(self, client: object, service: object | None = None) -> str:
        """A digest of the adapter's weights, as anyone would download them."""
        self.count += 1
        path = done(client.save_weights_external(f"print-{self.count}", ttl_seconds=3600)).path
        rest = (service or self.service).create_rest_client()
        urls = done(rest.get_external_weights_urls(path)).urls
        digest = hashlib.sha256()
        for name in sorted(name for name in urls if not name.endswith(".json")):
            digest.update(fetch(urls[name]))
        return digest.hexdigest()

    def trajectory(self, client: object, between: object = None) -> tuple[list, str]:
        """Four steps; every logprob on the way, and the weights at the end."""
        seen = []
        for _ in range(4):
            seen.append(logprobs_of(done(client.forward(self.data, "cross_entropy"))))
            if between is not None:
                between()
            self.step(client, weight_decay=0.01)
        return seen, self.fingerprint(client)

    # -------------------------------------------------------------------------------- steps

    def snapshot_is_immutable(self) -> str:
        """A sampler keeps its logprobs while its model trains on."""
        client = self.client()
        self.step(client)
        sampler = client.save_weights_and_get_sampling_client()
        named = done(client.save_weights_for_sampler("kept")).path
        prompt = types.ModelInput.from_ints(SEQUENCES[0])
        before = list(done(sampler.compute_logprobs(prompt)))
        for _ in range(3):
            self.step(client)
        after = list(done(sampler.compute_logprobs(prompt)))
        expect(before[1:] == after[1:], f"{before} became {after}")
        again = list(done(self.service.create_sampling_client(named).compute_logprobs(prompt)))
        expect(before[1:] == again[1:], f"the named snapshot gives {again}, not {before}")
        current = client.save_weights_and_get_sampling_client()
        moved = list(done(current.compute_logprobs(prompt)))
        expect(moved[1:] != before[1:], "three steps changed nothing")
        return f"{len(before) - 1} logprobs"

    def sampling_never_changes_training(self) -> str:
        """Old and new snapshots and the base model are sampled between the steps of a run."""
        quiet = self.trajectory(self.client())
        client = self.client()
        old = client.save_weights_and_get_sampling_client()
        base = self.service.create_sampling_client(base_model=self.base_model)
        prompt = types.ModelInput.from_ints(PROMPT)
        params = types.SamplingParams(max_tokens=6, temperature=0.9)

        def sample() -> None:
            new = client.save_weights_and_get_sampling_client()
            futures = [s.sample(prompt, 2, params) for s in (old, base, new)]
            [done(future) for future in futures]

        busy = self.trajectory(client, sample)
        expect(quiet == busy, "sampling moved the run")
        return busy[1][:12]

    def loss_scales_with_weights(self) -> str:
        client = self.client()
        self.step(client)

        def outcome(scale: float) -> tuple[float, float]:
            data = [datum(t, weights=[scale] * (len(t) - 1)) for t in SEQUENCES]
            loss = done(client.forward_backward(data, "cross_entropy")).metrics["loss:sum"]
            # A step of size zero reads the gradient norm and clears the gradient.
            metrics = done(client.optim_step(types.AdamParams(learning_rate=0.0))).metrics
            return loss, metrics["grad_norm:mean"]

        loss, norm = outcome(1.0)
        expect(norm > 0, "no gradient")
        for scale in (2.0, 0.5, -1.0, -3.0, 0.0):
            scaled_loss, scaled_norm = outcome(scale)
            near(scaled_loss, scale * loss, 1e-5 * abs(loss), f"loss at {scale}")
            near(scaled_norm, abs(scale) * norm, 1e-4 * norm, f"gradient norm at {scale}")
        return f"loss {loss:.4f}, norm {norm:.4f}"

    def opposite_weights_cancel(self) -> str:
        """Weights w and -w in two calls add up to no gradient: plain sums, no normalisation."""
        client = self.client()
        self.step(client)
        for scale in (1.0, -1.0):
            data = [datum(t, weights=[scale] * (len(t) - 1)) for t in SEQUENCES]
            done(client.forward_backward(data, "cross_entropy"))
        norm = done(client.optim_step(types.AdamParams(learning_rate=0.0))).metrics[
            "grad_norm:mean"
        ]
        near(norm, 0.0, 1e-5, "gradient norm of w and -w together")
        return f"norm {norm:.2e}"

    def tenants_never_touch_each_other(self) -> str:
        """A trains wildly, with refused and diverging input, while B repeats a quiet run."""
        quiet = self.trajectory(self.client())
        stop = threading.Event()
        trouble = threading.Thread(target=self._trouble, args=(stop,), daemon=True)
        trouble.start()
        time.sleep(0.3)
        try:
            busy = self.trajectory(self.client())
        finally:
            stop.set()
            trouble.join(60)
        expect(self.refused > 0, "A's bad input was never refused")
        expect(self.rounds > 0, "A never ran")
        if EXACT:
            expect(quiet == busy, "B's run moved")
            return f"{self.rounds} rounds of A, {self.refused} refused; B is the same to the bit"
        flat = [
            abs(a - b)
            for one, two in zip(quiet[0], busy[0], strict=True)
            for row, other in zip(one, two, strict=True)
            for a, b in zip(row, other, strict=True)
        ]
        expect(max(flat) <= 1e-5, f"B moved by {max(flat)}")
        return f"{self.rounds} rounds of A; B moved by {max(flat):.1e}"

    def _trouble(self, stop: threading.Event) -> None:
        self.rounds = self.refused = 0
        client = self.client(self.other)
        bad = [
            [datum([10**9, 5, 6])],
            [datum(SEQUENCES[0], weights=[float("nan")] * 5)],
            [datum(SEQUENCES[0], weights=[1.0] * 3)],
        ]
        while not stop.is_set() and self.rounds < 500:
            try:
                self.step(client, learning_rate=10.0, weight_decay=0.5)
            except tinker.RequestFailedError:
                client = self.client(self.other)  # It diverged until the server gave up on it.
            try:
                done(client.forward_backward(bad[self.rounds % 3], "cross_entropy"))
            except (tinker.BadRequestError, tinker.RequestFailedError):
                self.refused += 1
            self.rounds += 1

    def tenants_never_see_each_other(self) -> str:
        """Paths, runs, samplers and sessions of one key do not exist for another."""
        client = self.client()
        path = done(client.save_state("private")).path
        rest = self.other.create_rest_client()
        attempts = {
            "run": lambda: rest.get_training_run(path.split("/")[2]),
            "checkpoint": lambda: rest.get_weights_info_by_tinker_path(path),
            "delete": lambda: rest.delete_checkpoint_from_tinker_path(path),
            "load": lambda: self.other.create_training_client_from_state(path),
            "sample": lambda: done(
                self.other.create_sampling_client(path).sample(
                    types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=1)
                )
            ),
        }
        for name, attempt in attempts.items():
            try:
                done(attempt())
            except (tinker.APIStatusError, tinker.RequestFailedError):
                continue
            raise AssertionError(f"{name} of a foreign checkpoint worked")
        done(self.service.create_rest_client().publish_checkpoint_from_tinker_path(path))
        near(
            loss_of(self.other.create_training_client_from_state(path), self.data),
            loss_of(client, self.data),
            1e-6,
            "a public checkpoint loads for everyone",
        )
        return f"{len(attempts)} attempts refused"

    def resume_is_exact(self) -> str:
        """save -> load_with_optimizer -> step equals the uninterrupted step, bit for bit."""
        client = self.client()
        for _ in range(3):
            self.step(client)
        path = done(client.save_state("resume")).path
        self.step(client)
        straight = self.fingerprint(client)
        resumed = self.service.create_training_client_from_state_with_optimizer(path)
        self.step(resumed)
        expect(self.fingerprint(resumed) == straight, "the resumed step differs")
        done(client.load_state_with_optimizer(path))
        self.step(client)
        expect(self.fingerprint(client) == straight, "the step after load_state differs")
        return straight[:12]

    def weights_only_load_resets_the_optimizer(self) -> str:
        """A weights-only load steps like a client that never had moments."""
        client = self.client()
        for _ in range(3):
            self.step(client)
        path = done(client.save_state("weights-only")).path
        done(client.load_state(path))
        self.step(client)
        reset = self.fingerprint(client)
        fresh = self.service.create_training_client_from_state(path)
        self.step(fresh)
        expect(self.fingerprint(fresh) == reset, "two weights-only loads differ")
        with_moments = self.service.create_training_client_from_state_with_optimizer(path)
        self.step(with_moments)
        expect(self.fingerprint(with_moments) != reset, "the optimizer was kept")
        return reset[:12]

    def gathered_gradients_are_dropped_by_a_load(self) -> str:
        client = self.client()
        path = done(client.save_state("clean")).path
        done(client.forward_backward(self.data, "cross_entropy"))
        done(client.load_state(path))
        norm = done(client.optim_step(types.AdamParams(learning_rate=LR))).metrics["grad_norm:mean"]
        near(norm, 0.0, 0.0, "gradient norm after a load")
        return "none left"

    def equal_seeds_give_equal_models(self) -> str:
        one, two = self.trajectory(self.client()), self.trajectory(self.client())
        expect(one == two, "the same seed and the same data gave two results")
        if os.environ.get("PEER_ENGINE") == "toy":  # Its tables start at zero whatever the seed.
            return one[1][:12]
        third = self.service.create_lora_training_client(base_model=self.base_model, rank=4, seed=6)
        expect(self.trajectory(third)[1] != one[1], "another seed gave the same weights")
        return one[1][:12]


STEPS = tuple(
    name
    for name, value in vars(Exactness).items()
    if callable(value)
    and not name.startswith("_")
    and name not in ("client", "step", "fingerprint", "trajectory")
)

if __name__ == "__main__":
    sys.exit(main_of(Exactness(), STEPS))
