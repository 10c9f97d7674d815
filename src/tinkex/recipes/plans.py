"""The work of a run, counted before it begins: steps, tokens, saves.

Rows are read, rendered, split and dealt out to steps by the code that the recipe runs, so the
tokens of SFT and DPO are those that it will use. What is sampled can only be bounded: every answer
counts as long as it may become. Nothing is trained, sampled or judged here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.contract.run_folder import CHECKPOINTS_FILE
from tinkex.recipes import distill, dpo, rl, sft
from tinkex.recipes.batches import Rows, batch_at
from tinkex.recipes.data import load_conversations, load_preferences, load_prompts
from tinkex.recipes.episodes import Question, as_task
from tinkex.recipes.hooks import OnNote
from tinkex.recipes.loop import split
from tinkex.recipes.options import RunOptions
from tinkex.recipes.render import Rendered, Renderer
from tinkex.recipes.rewards import Rewards
from tinkex.runs import json_lines
from tinkex.types.account.checkpoints import is_tinker_path

if TYPE_CHECKING:
    from tinkex import ServiceClient
    from tinkex.client.futures import APIFuture
    from tinkex.types.account.estimates import Estimate

__all__ = ["Plan", "plan_distill", "plan_dpo", "plan_rl", "plan_sft"]


@dataclass(kw_only=True, slots=True)
class Plan:
    """The work that a run has left. Counts are exact, except those that `at_most` names."""

    base_model: str
    rank: int
    start: int
    """The step that a run goes on from; 0 for a new one."""
    num_steps: int
    """All steps of the run, those before `start` included."""
    updates: int = 0
    """Optimizer steps."""
    training_tokens: int = 0
    """Through forward_backward."""
    forward_tokens: int = 0
    """Through forward: evaluations, and first passes of losses of our own."""
    prefill_tokens: int = 0
    """Prompts of samples and what is scored, as if no prefix were cached."""
    sample_tokens: int = 0
    scored_tokens: Counter[str] = field(default_factory=Counter)
    """Prompts that other base models score, by their name."""
    state_saves: int = 0
    sampler_saves: int = 0
    snapshots: int = 0
    """Weights that are sampled from and not kept."""
    at_most: frozenset[str] = frozenset()

    def estimate(self, service: ServiceClient) -> APIFuture[Estimate]:
        """Estimate the work on a server, by what that has measured."""
        return service.estimate(
            self.base_model,
            rank=self.rank,
            steps=self.updates,
            training_tokens=self.training_tokens,
            forward_tokens=self.forward_tokens,
            prefill_tokens=self.prefill_tokens,
            sample_tokens=self.sample_tokens,
            scored_tokens=self.scored_tokens,
            state_saves=self.state_saves,
            sampler_saves=self.sampler_saves,
            snapshots=self.snapshots,
        )

    def note_saves(self, config: RunOptions, num_evaluations: int) -> None:
        """Count the checkpoints: every so many steps, the last one, the best ones."""
        kept = {step for step in self.steps_done if step % config.save_every == 0}
        self.state_saves, self.sampler_saves = len(kept | {self.num_steps}), 1
        if getattr(config, "keep_best", False) or getattr(config, "patience", 0):
            self.state_saves += num_evaluations
            self.sampler_saves += num_evaluations
            self.at_most |= {"state_saves", "sampler_saves"}

    @property
    def steps_done(self) -> range:
        return range(self.start + 1, self.num_steps + 1)

    def evaluations(self, config: RunOptions, held_out: Sequence[Any]) -> list[int]:
        """The steps before which the run is evaluated, and its end."""
        if not held_out:
            return []
        before = range(self.start, self.num_steps)
        return [step for step in before if step % config.eval_every == 0] + [self.num_steps]


def _begin(config: RunOptions, service: ServiceClient) -> tuple[Plan, Renderer]:
    """The plan of a run without its work, and what renders its rows."""
    saved = list(json_lines.read(Path(config.log_dir) / CHECKPOINTS_FILE))
    origin = saved[-1]["state_path"] if saved else config.model
    base_model, rank = _base_of(service, origin)
    start = int(saved[-1]["step"]) if saved else 0
    plan = Plan(base_model=base_model, rank=rank or config.rank, start=start, num_steps=start)
    sampler = service.create_sampling_client(base_model=base_model)
    return plan, Renderer(sampler.get_tokenizer())


def _base_of(service: ServiceClient, model: str) -> tuple[str, int | None]:
    """The base model of a name or a checkpoint, and the rank of the checkpoint."""
    if not is_tinker_path(model):
        return model, None
    info = service.create_rest_client().get_weights_info_by_tinker_path(model).result()
    return info.base_model, info.lora_rank


def _trained(examples: Iterable[Rendered]) -> int:
    """The tokens that examples have as training data: the last one is only predicted."""
    return sum(len(example.tokens) - 1 for example in examples)


def plan_sft(config: sft.SftConfig, service: ServiceClient, on_note: OnNote = print) -> Plan:
    """Count the work of an SFT run. Answers at evaluations are bounded, all else is exact."""
    rows = Rows.of(config, load_conversations, config.data)
    plan, renderer = _begin(config, service)
    examples, held_out = split(rows, lambda row: sft.render(row, renderer, config), config, on_note)
    groups = sft.groups_of(examples, config)
    plan.num_steps = max(plan.start, sft.num_steps_of(groups, config))
    for step in range(plan.start, plan.num_steps):
        plan.training_tokens += _trained(sft.batch_of(groups, config, step))
        plan.updates += 1
    evaluations = plan.evaluations(config, held_out)
    plan.forward_tokens = len(evaluations) * _trained(held_out)
    to_ask = [example for example in held_out if example.question][: config.samples]
    asked = [step for step in evaluations if step < plan.num_steps] if to_ask else []
    plan.snapshots = len(asked)
    plan.prefill_tokens = len(asked) * sum(len(renderer.prompt(row.question)) for row in to_ask)
    plan.sample_tokens = len(asked) * len(to_ask) * sft.ANSWER_TOKENS
    plan.at_most = frozenset({"prefill_tokens", "sample_tokens"} if asked else ())
    plan.note_saves(config, len(evaluations))
    return plan


def plan_dpo(config: dpo.DpoConfig, service: ServiceClient, on_note: OnNote = print) -> Plan:
    """Count the work of a DPO run, as if the reference scored every answer at every step."""
    rows = Rows.of(config, load_preferences, config.data)
    plan, renderer = _begin(config, service)
    pairs, held_out = split(rows, lambda row: dpo.render(row, renderer, config), config, on_note)
    plan.num_steps = max(plan.start, dpo.num_steps_of(pairs, config))
    scored = dpo.answers_of(held_out)
    for step in range(plan.start, plan.num_steps):
        answers = dpo.answers_of(dpo.batch_of(pairs, config, step))
        # A loss of our own is a forward pass for the logprobs, then one with its gradients.
        plan.forward_tokens += _trained(answers)
        plan.training_tokens += _trained(answers)
        plan.updates += 1
        scored += answers
    plan.prefill_tokens = sum(len(answer.tokens) for answer in scored)
    plan.sample_tokens = len(scored)  # to be scored, a prompt is sampled from once
    evaluations = [step for step in plan.evaluations(config, held_out) if step > 0]
    plan.forward_tokens += len(evaluations) * _trained(dpo.answers_of(held_out))
    plan.at_most = frozenset({"prefill_tokens", "sample_tokens"})
    plan.note_saves(config, len(evaluations))
    return plan


def plan_rl(
    config: rl.RlConfig,
    service: ServiceClient,
    reward: Rewards,
    prompts: str | Iterable[Mapping[str, Any]],
    on_note: OnNote = print,
) -> Plan:
    """Bound the work of an RL run: every answer is as long as it may be, every group is learned.

    What an environment says between the turns is not known and not counted.
    """
    task = as_task(reward, max_turns=config.max_turns)
    plan, questions, held_out = _questions(config, service, prompts, task, on_note)
    plan.num_steps = max(plan.start, config.steps)
    longest = config.max_tokens * task.max_turns
    has_reference = bool(config.kl_to or config.kl_coef)
    for step in range(plan.start, plan.num_steps):
        size = config.prompts_per_step * config.accumulate
        batch = batch_at(questions, size, step, config.seed)
        _sample(plan, batch, config.group_size, longest, task.max_turns)
        whole = _whole(batch, config.group_size, longest)
        plan.training_tokens += whole - len(batch) * config.group_size
        plan.updates += config.updates_per_step
        if has_reference:
            _score(plan, plan.base_model, whole, len(batch) * config.group_size)
    evaluations = plan.evaluations(config, held_out)
    for _ in evaluations:
        _sample(plan, held_out, 1, longest, task.max_turns)
    plan.snapshots = len({*range(plan.start, plan.num_steps), *evaluations})
    plan.note_saves(config, len(evaluations))
    return plan


def plan_distill(
    config: distill.DistillConfig,
    service: ServiceClient,
    prompts: str | Iterable[Mapping[str, Any]],
    on_note: OnNote = print,
) -> Plan:
    """Bound the work of a distillation: every answer is as long as it may be."""
    task = as_task(lambda answer, row: 0.0)
    plan, questions, held_out = _questions(config, service, prompts, task, on_note)
    plan.num_steps = max(plan.start, config.steps)
    teacher, _ = _base_of(service, config.teacher)
    for step in range(plan.start, plan.num_steps):
        size, copies = config.prompts_per_step * config.accumulate, config.samples_per_prompt
        batch = batch_at(questions, size, step, config.seed)
        _sample(plan, batch, copies, config.max_tokens)
        whole = _whole(batch, copies, config.max_tokens)
        plan.training_tokens += whole - len(batch) * copies
        plan.updates += 1
        _score(plan, teacher, whole, len(batch) * copies)
    evaluations = plan.evaluations(config, held_out)
    for _ in evaluations:
        _sample(plan, held_out, 1, config.max_tokens)
        _score(plan, teacher, _whole(held_out, 1, config.max_tokens), len(held_out))
    plan.snapshots = len({*range(plan.start, plan.num_steps), *evaluations})
    plan.note_saves(config, len(evaluations))
    return plan


def _questions(
    config: RunOptions, service: ServiceClient, prompts: Any, task: Any, on_note: OnNote
) -> tuple[Plan, list[Question], list[Question]]:
    rows = Rows.of(config, load_prompts, prompts)
    plan, renderer = _begin(config, service)
    plan.at_most = frozenset(
        {"updates", "training_tokens", "prefill_tokens", "sample_tokens", "scored_tokens"}
    )
    questions, held_out = split(
        rows, lambda row: rl.question_of(row, task, renderer), config, on_note, at_most=32
    )
    return plan, questions, held_out


def _whole(questions: Sequence[Question], copies: int, longest: int) -> int:
    """Tokens of prompts with their answers, all as long as they may be."""
    return sum(copies * (len(question.tokens) + longest) for question in questions)


def _sample(
    plan: Plan, questions: Sequence[Question], copies: int, longest: int, num_turns: int = 1
) -> None:
    """Count sampled answers: a prompt once for its first answers, and whole for each later turn."""
    plan.sample_tokens += len(questions) * copies * longest
    plan.prefill_tokens += sum(len(question.tokens) for question in questions)
    plan.prefill_tokens += (num_turns - 1) * _whole(questions, copies, longest)


def _score(plan: Plan, model: str, num_tokens: int, num_texts: int) -> None:
    if model == plan.base_model:
        plan.prefill_tokens += num_tokens
        plan.sample_tokens += num_texts  # to be scored, a prompt is sampled from once
    else:
        plan.scored_tokens[model] += num_tokens
