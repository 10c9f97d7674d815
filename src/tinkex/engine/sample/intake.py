"""How a job becomes a request: is it right, can it ever fit, and what are its samples?

Knows the model's shape and how many tokens the KV memory holds; nothing is queued here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinkex.engine import jobs
from tinkex.engine.lora.adapter import Adapter
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.sample.checks import check_sample_job
from tinkex.engine.sample.prompt_scores import PromptScores
from tinkex.engine.sample.rng import fresh_seed, sample_key
from tinkex.engine.sample.running_jobs import RunningJob, Sample
from tinkex.engine.sample.stopping import Detokenize, StopWatch
from tinkex.errors import InvalidInputError


class Intake:
    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_tokens: int,
        detokenizer: Callable[[], Detokenize] | None,
    ) -> None:
        """`kv_tokens` is how many the KV memory holds; `detokenizer` is called when needed."""
        self._config, self._kv_tokens = config, kv_tokens
        self._load_detokenizer = detokenizer
        self._detokenize: Detokenize | None = None

    def request(
        self, job: jobs.SampleJob, adapter: Adapter | None, emit: jobs.Emit, version: str
    ) -> RunningJob:
        """The samples of a job, ready to be queued.

        Raises:
            InvalidInputError: The job does not fit the model or the KV memory.
        """
        config = self._config
        check_sample_job(job, config.vocab_size, config.routing)
        max_tokens = self._max_tokens(job)
        stop_ids = job.stop_tokens
        if stop_ids is None:
            stop_ids = () if job.stop_strings else config.eos_token_ids
        seed = fresh_seed() if job.seed is None else job.seed
        scores = PromptScores(job, seed, config.vocab_size) if PromptScores.wanted(job) else None
        request = RunningJob(job, adapter, emit, max_tokens, frozenset(stop_ids), scores)
        prompt = [int(token) for token in job.prompt]
        for index in range(job.num_samples):
            # Rows that are scored must be computed: the prefix cache may serve what is before them.
            scored = scores is not None and index == 0
            request.samples.append(
                Sample(
                    version=version,
                    tokens=list(prompt),
                    num_reusable=scores.first_computed - 1 if scored and scores else len(prompt),
                    tenant=job.tenant,
                    folder=job.adapter_folder or "",
                    trial=job.job_id if job.alone else "",
                    request=request,
                    index=index,
                    key=sample_key(seed, job.first_sample + index),
                    watch=self._stop_watch(job.stop_strings),
                )
            )
        request.num_open = job.num_samples
        return request

    def _max_tokens(self, job: jobs.SampleJob) -> int:
        """Tokens the job may generate; refuses what can never fit."""
        length, context = len(job.prompt), self._config.max_context_length
        # The last token sampled needs no KV of its own.
        room = min(context, self._kv_tokens + 1) - length
        wanted = room if job.max_tokens is None else job.max_tokens
        if wanted > context - length:
            raise InvalidInputError(
                f"the prompt of {length} tokens plus max_tokens {wanted} exceeds the model's "
                f"context of {context}; at most {max(0, context - length)} can be generated",
                path="max_tokens",
            )
        if wanted > room or room < 0:
            raise InvalidInputError(
                f"one sample of this job needs KV memory for {length + max(wanted, 0)} tokens, but "
                f"the cache holds {self._kv_tokens}. Lower max_tokens or start the server with "
                "more KV memory.",
                path="max_tokens",
            )
        return wanted

    def _stop_watch(self, stops: Sequence[str]) -> StopWatch | None:
        if not stops:
            return None
        if self._detokenize is None:
            if self._load_detokenizer is None:
                raise InvalidInputError(
                    "this model has no tokenizer; use token ids", path="sampling_params.stop"
                )
            self._detokenize = self._load_detokenizer()
        return StopWatch(stops, self._detokenize)
