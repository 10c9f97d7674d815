"""Reinforcement learning with groups: sample several answers, reward them, learn the better ones.

Copy this file and change it. An answer's advantage is its reward minus the mean reward of the
answers to the same prompt, so no value model is needed (GRPO). What is rewarded is a function or an
environment of several turns; `episodes.py` has both, and how they are sampled.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from tinkex import (
    Datum,
    ModelInput,
    SamplingClient,
    ServiceClient,
    TrainingClient,
)
from tinkex.client.validation import has_signal
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.routing import NOT_RECORDED
from tinkex.errors import ConfigError
from tinkex.recipes.batches import Rows, batch_at, parts_of
from tinkex.recipes.data import Prompt, load_prompts
from tinkex.recipes.episodes import (
    Episode,
    Player,
    Question,
    Task,
    as_task,
    first_messages,
)
from tinkex.recipes.hooks import Hooks, OnEval, OnNote, OnSave, OnStep, print_step
from tinkex.recipes.learning_rate import Schedule
from tinkex.recipes.loop import Result, Run, begin, grad_norm, sampler_of
from tinkex.recipes.options import RunOptions, check_not_negative, check_positive, fixed_length
from tinkex.recipes.policy_shift import Shift
from tinkex.recipes.render import Renderer
from tinkex.recipes.rewards import Rewards
from tinkex.recipes.rollouts import Rollout, RolloutLog
from tinkex.runs.plots import Panel
from tinkex.types import LossFnOutput

PANELS = (
    Panel(
        metrics={"reward": "sampled answers", "held_out_reward": "held-out prompts, greedy"},
        label="mean reward",
    ),
    Panel(metrics={"kl": "KL to the reference"}, label="nats per token"),
    Panel(metrics={"entropy": "entropy"}, label="nats per token"),
)
PICTURE = (PANELS, "RL", "reward.png")


@dataclass(frozen=True, kw_only=True, slots=True)
class RlConfig(RunOptions):
    learning_rate: float | Literal["auto"] = 2e-4
    schedule: Schedule = "constant"
    steps: int = 60
    prompts_per_step: int = 8
    group_size: int = 8
    """Answers sampled per prompt."""
    max_tokens: int = 64
    """Of one answer; of each turn, with an environment."""
    max_turns: int = 16
    """Most answers of one episode, with an environment."""
    temperature: float = 1.0
    """Of the samples, above 0; 1 is the model's own distribution."""
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    updates_per_step: int = 1
    """Optimizer steps per batch of samples; each takes its part of the prompts."""
    max_policy_kl: float = 0.0
    """The rest of a batch is left out once the policy is this far (nats per token) from the one
    that sampled it; 0 is off. Only `updates_per_step` above 1 makes it move."""
    router_replay: bool = False
    """Train a mixture of experts on the experts that its samples passed."""
    kl_to: str = ""
    """`base`, or the path of a checkpoint: report how far the policy has moved from it."""
    kl_coef: float = 0.0
    """Penalty on that distance, taken off the advantage of each token."""
    reward_by: str = ""
    """A field of the rows: the mean reward of each of its values is reported, too."""
    keep_best: bool = False
    """Keep a checkpoint of the best held-out reward."""
    patience: int = 0
    """Stop after this many evaluations without a better held-out reward; 0 is never."""
    stop_at_reward: float | None = None
    """Stop when the held-out reward reaches this."""
    save_every: int = 20

    AUTO_SHARE: ClassVar[float] = 0.2

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_positive(self, "steps", "prompts_per_step", "max_tokens", "max_turns")
        check_positive(self, "temperature", "updates_per_step")
        if self.group_size < 2:
            raise ConfigError(
                f"group_size must be at least 2, got {self.group_size}: "
                "an answer is judged against the others of its group."
            )
        check_not_negative(self, "kl_coef", "max_policy_kl")
        stops_at = self.stop_at_reward is not None
        if not self.is_evaluated and (self.patience or self.keep_best or stops_at):
            raise ConfigError(
                "patience, keep_best and stop_at_reward look at held-out prompts: "
                "eval_share must be above 0, or eval_data name a file."
            )


def train(
    config: RlConfig,
    service: ServiceClient,
    reward: Rewards,
    prompts: str | Iterable[Mapping[str, Any]],
    on_step: OnStep = print_step,
    on_note: OnNote = print,
    on_eval: OnEval | None = None,
    on_save: OnSave | None = None,
) -> Result:
    """Run, or resume, one RL run. Ctrl-C ends it after the current step, with a checkpoint.

    Args:
        reward: A function of an answer, a list of (function, weight), or the class of an
            environment: see `rewards.py` and `episodes.py`.
    """
    rows = Rows.of(config, load_prompts, prompts)
    task = as_task(reward, max_turns=config.max_turns)
    check_columns({name for row in rows.all for name in row.row}, task, config)
    hooks = Hooks.of(on_step, on_note, on_eval, on_save)
    may_change = [] if fixed_length(config) else ["steps"]
    run = begin(service, config, hooks, may_change=may_change, rewards=task.name)
    if isinstance(run, Result):
        return run
    reference = open_reference(service, config)
    teacher = teacher_of(run.training, config)
    player = player_of(config, task, run.renderer)
    rollouts = RolloutLog(config.log_dir, start_step=run.start)
    questions, held_out = run.split(
        rows, lambda row: question_of(row, task, run.renderer), at_most=32
    )

    def evaluate(step: int) -> dict[str, float]:
        return {"held_out_reward": greedy_reward(run.policy(step), held_out, player)}

    watch = run.watch("held_out_reward", "max", config.stop_at_reward)
    with run.steps(config.steps, evaluate if held_out else None, watch) as steps:
        for step in steps:
            size = config.prompts_per_step * config.accumulate
            batch = batch_at(questions, size, step, config.seed)
            seed = sampling_seed(config.seed, step)
            groups = player.play(run.policy(step), batch, copies=config.group_size, seed=seed)
            if reference is not None and not teacher:
                measure_gaps(reference, episodes_of(groups))
            rollouts.write(to_look_at(groups, run.renderer, step))

            metrics = {**reward_metrics(groups, config.reward_by), **run.evaluated}
            if teacher:
                metrics |= update_with(teacher, run, step, groups, config)
            else:
                metrics |= update(run, step, data_of(groups, config), config)
            if reference is not None:
                metrics["kl"] = kl_of(episodes_of(groups))
            run.report(step, metrics, sum(one.num_sampled for one in episodes_of(groups)))
    note_if_nothing_was_learned(run, on_note)
    return run.result(PICTURE)


def check_columns(columns: set[str], task: Task, config: RlConfig) -> None:
    """Refuse what asks for a field that no prompt has."""
    task.check(columns)
    if config.reward_by and config.reward_by not in columns:
        raise ConfigError(
            f"reward_by: no prompt has a field '{config.reward_by}'; they have "
            f"{', '.join(sorted(columns)) or 'none'}."
        )


def player_of(config: RlConfig, task: Task, renderer: Renderer) -> Player:
    return Player(
        task=task,
        renderer=renderer,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        router_replay=config.router_replay,
    )


def note_if_nothing_was_learned(run: Run, on_note: OnNote) -> None:
    if run.is_complete and not any(m.get("groups_with_signal") for m in run.log.read_metrics()):
        on_note(
            "Nothing was learned: in every group all answers got the same reward. Reward partly "
            "right answers, or ask something the model gets right now and then."
        )


def sampling_seed(seed: int, step: int) -> int:
    """A seed for the samples of a step, the same after a resume.

    Far enough from the next step's that every question can add its number.
    """
    return (seed * 1_000_003 + step) * 10_007


def question_of(row: Prompt, task: Task, renderer: Renderer) -> Question:
    """The question of a row: its prompt, or what its environment starts with."""
    bare = Question(tokens=[], row=row.row, line=row.line, messages=row.messages)
    environment = task.begin(bare)
    messages = row.messages if environment is None else first_messages(environment)
    tokens = renderer.prompt(messages)
    return Question(tokens=tokens, row=row.row, line=row.line, messages=tuple(messages))


def greedy_reward(sampler: SamplingClient, questions: Sequence[Question], player: Player) -> float:
    """Mean reward of the greedy answers to questions that are not trained on."""
    greedy = Player(
        task=player.task, renderer=player.renderer, max_tokens=player.max_tokens, temperature=0.0
    )
    groups = greedy.play(sampler, questions, copies=1, seed=0)
    return statistics.fmean(episode.reward for group in groups for episode in group)


def update(
    run: Run, step: int, data: Sequence[Sequence[Datum]], config: RlConfig
) -> dict[str, float]:
    """Learn from the groups, in as many optimizer steps as asked for. Gives the metrics of it."""
    shift = Shift(config.loss_fn)
    gaps: dict[str, float] = {}
    norms: list[float] = []
    num_updates = 0
    for first in range(config.updates_per_step):
        part = [datum for group in data[first :: config.updates_per_step] for datum in group]
        if not part:  # All answers equally good: there is nothing to learn from.
            continue
        slices = parts_of(part, config.accumulate)
        # A pass whose answers are all as good as their group adds nothing to the step.
        slices = [one for one in slices if has_signal(one)] or slices
        passes = [run.training.forward_backward(one, config.loss_fn) for one in slices]
        optim_step = run.training.optim_step(run.optimizer(step))
        results = [one.result() for one in passes]
        norms += grad_norm(optim_step.result()).values()
        num_updates += 1
        for one, result in zip(slices, results, strict=True):
            shift.add(one, result.loss_fn_outputs)
        gaps = sampler_gaps([result.metrics for result in results])
        # The gap was measured before this update; the next part would be further off.
        if 0 < config.max_policy_kl < gaps.get("sampler_gap_k3", 0.0):
            break
    mean_norm = {"grad_norm": statistics.fmean(norms)} if norms else {}
    return {**shift.metrics(), **mean_norm, **gaps, "updates": float(num_updates)}


def update_with(
    teacher: str, run: Run, step: int, groups: Sequence[Sequence[Episode]], config: RlConfig
) -> dict[str, float]:
    """Learn from the groups in one step, for which the server adds the penalty itself."""
    data = [
        taught_datum(episode, episode.reward - mean)
        for group, mean in ((group, mean_reward(group)) for group in groups)
        for episode in group
        if episode.num_sampled
    ]
    settings: dict[str, float | str] = {"teacher": teacher, "teacher_coef": config.kl_coef}
    done = run.training.forward_backward(data, config.loss_fn, settings)
    optim_step = run.training.optim_step(run.optimizer(step))
    result = done.result()
    read_gaps(episodes_of(groups), result.loss_fn_outputs)
    shift = Shift(config.loss_fn)
    penalized = [one for group in with_penalty(groups, config.kl_coef) for one in group]
    shift.add(penalized, result.loss_fn_outputs)
    norm, gaps = grad_norm(optim_step.result()), sampler_gaps([result.metrics])
    return {**shift.metrics(), **norm, **gaps, "updates": 1.0}


def sampler_gaps(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The gaps between sampler and trainer of an update: means over its passes, or the largest."""
    gaps = {}
    for name in measured[0]:
        if name.startswith("sampler_gap"):
            values = [one[name] for one in measured]
            gaps[name.split(":")[0]] = (
                max(values) if name.endswith(":max") else statistics.fmean(values)
            )
    return gaps


def episodes_of(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    return [episode for group in groups for episode in group]


# ------------------------------------------------------------------------------ advantages


def data_of(groups: Sequence[Sequence[Episode]], config: RlConfig) -> list[list[Datum]]:
    """Training examples by group."""
    if config.kl_coef:
        return with_penalty(groups, config.kl_coef)
    return [list(group_data(group)) for group in groups]


def group_data(group: Sequence[Episode]) -> Iterator[Datum]:
    """Training examples of one group; none when every answer got the same reward."""
    rewards = [episode.reward for episode in group]
    if len(set(rewards)) == 1:
        return
    mean = statistics.fmean(rewards)
    for episode in group:
        if episode.num_sampled:
            yield datum_of(episode, [episode.reward - mean] * len(episode.tokens))


def datum_of(episode: Episode, advantages: Sequence[float]) -> Datum:
    """The training example of an episode; tokens that were only read have no advantage."""
    return _datum(episode, advantages=advantages)


def taught_datum(episode: Episode, advantage: float = 0.0) -> Datum:
    """The training example of an episode whose sampled tokens a teacher scores on the server."""
    everywhere = len(episode.tokens)
    return _datum(episode, advantages=[advantage] * everywhere, weights=[1.0] * everywhere)


def _datum(episode: Episode, **values: Sequence[float]) -> Datum:
    """A training example with values for the tokens that were sampled, 0 for the others."""
    chosen = {
        name: [a if said else 0.0 for a, said in zip(given, episode.is_sampled, strict=True)]
        for name, given in values.items()
    }
    inputs: dict[str, Any] = {
        "target_tokens": episode.tokens[1:],
        "logprobs": episode.logprobs[1:],
        **{name: numbers[1:] for name, numbers in chosen.items()},
    }
    if episode.experts is not None:
        missing = max(len(episode.tokens) - len(episode.experts), 0)
        rows = np.pad(episode.experts, ((0, missing), (0, 0), (0, 0)), constant_values=NOT_RECORDED)
        inputs[ROUTED_EXPERTS] = rows[: len(episode.tokens) - 1]
    return Datum(model_input=ModelInput.from_ints(episode.tokens[:-1]), loss_fn_inputs=inputs)


# ------------------------------------------------------------------------------ the reference


def open_reference(service: ServiceClient, config: RlConfig) -> SamplingClient | None:
    """The model that the KL is measured to: the base, a checkpoint, or None."""
    name = config.kl_to or ("base" if config.kl_coef else "")
    if not name:
        return None
    if name == "base":
        return sampler_of(service, config.model)
    return service.create_sampling_client(model_path=name)


def teacher_of(training: TrainingClient, config: RlConfig) -> str:
    """The reference, where the server adds the penalty itself; empty where that is done here.

    In one pass a step: the mean of the penalty is that of a pass.
    """
    is_one_pass = config.accumulate == config.updates_per_step == 1
    if not (config.kl_coef and is_one_pass and training.has_teachers):
        return ""
    name = config.kl_to or "base"
    return config.model if name == "base" else name


def measure_gaps(reference: SamplingClient, episodes: Sequence[Episode]) -> None:
    """Fill `gaps` of the episodes: the policy's log-probabilities less the reference's."""
    futures = [
        reference.compute_logprobs(ModelInput.from_ints(episode.tokens)) for episode in episodes
    ]
    for episode, future in zip(episodes, futures, strict=True):
        _fill_gaps(episode, future.result())


def read_gaps(episodes: Sequence[Episode], outputs: Sequence[LossFnOutput]) -> None:
    """Fill `gaps` by what a pass with a teacher told of the episodes that have sampled tokens."""
    learned = [episode for episode in episodes if episode.num_sampled]
    for episode, output in zip(learned, outputs, strict=True):
        _fill_gaps(episode, [None, *output["teacher_logprobs"].tolist()])


def _fill_gaps(episode: Episode, reference: Sequence[float | None]) -> None:
    episode.gaps = [
        ours - theirs if said and theirs is not None else 0.0
        for ours, theirs, said in zip(episode.logprobs, reference, episode.is_sampled, strict=True)
    ]


def mean_gap(episodes: Sequence[Episode]) -> float:
    """How much likelier the policy finds its own words than the reference does, per token."""
    sampled = [d for episode in episodes for d in episode.of_sampled(episode.gaps)]
    return statistics.fmean(sampled) if sampled else 0.0


def kl_of(episodes: Sequence[Episode]) -> float:
    """Mean over the sampled tokens of exp(-d) - 1 + d: unbiased and never negative."""
    # The estimator k3 of http://joschu.net/blog/kl-approx.html.
    values = [
        math.exp(-d) - 1 + d for episode in episodes for d in episode.of_sampled(episode.gaps)
    ]
    return statistics.fmean(values) if values else 0.0


def mean_reward(group: Sequence[Episode]) -> float:
    return statistics.fmean(episode.reward for episode in group)


def with_penalty(groups: Sequence[Sequence[Episode]], coef: float) -> list[list[Datum]]:
    """Group advantages less `coef` times how much likelier a token is than for the reference.

    The mean of the penalty over the batch is its baseline, so that it moves tokens against each
    other and not all of them down. Groups without a signal take part: the penalty is one.
    """
    baseline = mean_gap(episodes_of(groups))
    data = []
    for group in groups:
        mean = mean_reward(group)
        data.append(
            [
                datum_of(
                    episode, [episode.reward - mean - coef * (d - baseline) for d in episode.gaps]
                )
                for episode in group
                if episode.num_sampled
            ]
        )
    return data


# ------------------------------------------------------------------------------ reports


def reward_metrics(groups: Sequence[Sequence[Episode]], reward_by: str = "") -> dict[str, float]:
    """Rewards over all answers, by group and by kind of row; lengths, and the policy's entropy."""
    episodes = episodes_of(groups)
    rewards = [episode.reward for episode in episodes]
    means = [statistics.fmean(episode.reward for episode in group) for group in groups]
    sampled = [-value for episode in episodes for value in episode.of_sampled(episode.logprobs)]
    metrics = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_worst_group": min(means),
        "reward_best_group": max(means),
        "groups_with_signal": sum(
            len({episode.reward for episode in group}) > 1 for group in groups
        )
        / len(groups),
        "answer_tokens": len(sampled) / len(episodes),
        "turns": statistics.fmean(len(episode.answers) for episode in episodes),
        "entropy": statistics.fmean(sampled) if sampled else 0.0,
    }
    if sum(rewards) > 0:
        metrics["tokens_per_reward"] = len(sampled) / sum(rewards)
    for name in dict.fromkeys(name for episode in episodes for name in episode.parts):
        applied = [episode.parts[name] for episode in episodes if name in episode.parts]
        metrics[f"rewards/{name}"] = statistics.fmean(applied)
    if reward_by:
        kinds: dict[str, list[float]] = defaultdict(list)
        for episode in episodes:
            kinds[str(episode.question.row.get(reward_by, "none"))].append(episode.reward)
        metrics |= {f"reward/{kind}": statistics.fmean(kinds[kind]) for kind in sorted(kinds)}
    return metrics


def to_look_at(
    groups: Sequence[Sequence[Episode]], renderer: Renderer, step: int
) -> Iterator[Rollout]:
    """The answers of a step as the console and `tinkex run rollouts` show them."""
    for number, group in enumerate(groups):
        mean = statistics.fmean(episode.reward for episode in group)
        for episode in group:
            yield Rollout.of(
                renderer,
                episode.question.tokens,
                episode.said,
                step,
                group=number,
                logprobs=episode.logprobs[len(episode.question.tokens) :],
                reward=episode.reward,
                advantage=episode.reward - mean,
            )
