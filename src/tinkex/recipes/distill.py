"""On-policy distillation: the student speaks, and the teacher says how well at every token.

Copy this file and change it. The student samples answers; the teacher, a model or a checkpoint of
the same server with the same tokens, scores them. A token's advantage is how much likelier it is
for the teacher than for the student, so the student learns where it goes wrong by itself. The mean
of it is minus the KL from student to teacher, which is what falls. A server that takes a teacher
with a loss scores the answers right before the pass; others are asked in a call of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tinkex import Datum, SamplingClient, ServiceClient, TrainingClient
from tinkex.errors import ConfigError
from tinkex.recipes.batches import Rows, batch_at, parts_of
from tinkex.recipes.data import load_prompts
from tinkex.recipes.episodes import Episode, Player, Question, as_task
from tinkex.recipes.hooks import Hooks, OnEval, OnNote, OnSave, OnStep, print_step
from tinkex.recipes.learning_rate import Schedule
from tinkex.recipes.loop import Result, begin, grad_norm, sampler_of
from tinkex.recipes.options import RunOptions, check_positive, fixed_length
from tinkex.recipes.render import Renderer
from tinkex.recipes.rl import (
    datum_of,
    episodes_of,
    mean_gap,
    measure_gaps,
    question_of,
    read_gaps,
    sampling_seed,
    taught_datum,
    to_look_at,
)
from tinkex.recipes.rollouts import RolloutLog
from tinkex.runs.plots import Panel

PANELS = (
    Panel(
        metrics={"kl": "sampled answers", "held_out_kl": "held-out prompts"},
        label="KL to the teacher (nats per token)",
    ),
)
PICTURE = (PANELS, "Distillation", "kl.png")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig(RunOptions):
    teacher: str
    """Base model, or the `tinker://` path of a checkpoint, on the same server."""
    learning_rate: float | Literal["auto"] = 5e-4
    schedule: Schedule = "constant"
    steps: int = 40
    prompts_per_step: int = 8
    samples_per_prompt: int = 2
    max_tokens: int = 64
    temperature: float = 1.0
    """Of the samples, above 0; 1 is the model's own distribution."""
    eval_every: int = 10
    save_every: int = 20

    AUTO_SHARE: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_positive(self, "steps", "prompts_per_step", "max_tokens")
        check_positive(self, "samples_per_prompt", "temperature")
        if not self.teacher:
            raise ConfigError("A teacher is needed: a base model or a tinker:// path.")


def train(
    config: DistillConfig,
    service: ServiceClient,
    prompts: str | Iterable[Mapping[str, Any]],
    on_step: OnStep = print_step,
    on_note: OnNote = print,
    on_eval: OnEval | None = None,
    on_save: OnSave | None = None,
) -> Result:
    """Run, or resume, one distillation. Ctrl-C ends it after the current step, checkpointed."""
    rows = Rows.of(config, load_prompts, prompts)
    hooks = Hooks.of(on_step, on_note, on_eval, on_save)
    run = begin(service, config, hooks, may_change=[] if fixed_length(config) else ["steps"])
    if isinstance(run, Result):
        return run
    teacher = sampler_of(service, config.teacher)
    check_tokens(run.renderer, teacher)
    player = Player(
        task=as_task(lambda answer, row: 0.0),  # the teacher judges later, token by token
        renderer=run.renderer,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
    )
    questions, held_out = run.split(
        rows, lambda row: question_of(row, player.task, run.renderer), at_most=32
    )
    rollouts = RolloutLog(config.log_dir, start_step=run.start)

    def evaluate(step: int) -> dict[str, float]:
        return {"held_out_kl": held_out_kl(run.policy(step), teacher, held_out, player)}

    with run.steps(config.steps, evaluate if held_out else None) as steps:
        for step in steps:
            size = config.prompts_per_step * config.accumulate
            batch = batch_at(questions, size, step, config.seed)
            copies, seed = config.samples_per_prompt, sampling_seed(config.seed, step)
            groups = player.play(run.policy(step), batch, copies=copies, seed=seed)
            episodes = episodes_of(groups)
            data, settings = lesson(run.training, teacher, episodes, config)
            passes = [
                run.training.forward_backward(part, "importance_sampling", settings)
                for part in parts_of(data, config.accumulate)
            ]
            optim_step = run.training.optim_step(run.optimizer(step))
            outputs = [output for done in passes for output in done.result().loss_fn_outputs]
            if settings is not None:
                read_gaps(episodes, outputs)
            judge(episodes)
            rollouts.write(to_look_at(groups, run.renderer, step))

            num_tokens = sum(episode.num_sampled for episode in episodes)
            metrics = {
                "kl": mean_gap(episodes),
                "answer_tokens": num_tokens / len(episodes),
                **grad_norm(optim_step.result()),
                **run.evaluated,
            }
            run.report(step, metrics, num_tokens)
    return run.result(PICTURE)


def check_tokens(renderer: Renderer, teacher: SamplingClient) -> None:
    """Refuse a teacher of another tokenizer; one mixed text tells most of them apart."""
    text = "Student and teacher: 123 + 456 = 579, \u00e9t\u00e9.\n\tEnd."
    ours = list(renderer.tokenizer.encode(text, add_special_tokens=False))
    theirs = list(teacher.get_tokenizer().encode(text, add_special_tokens=False))
    if ours != theirs:
        raise ConfigError(
            "Student and teacher have different tokenizers, so the teacher cannot score the "
            "student's tokens. Choose a teacher of the same family."
        )


def lesson(
    training: TrainingClient,
    teacher: SamplingClient,
    episodes: Sequence[Episode],
    config: DistillConfig,
) -> tuple[list[Datum], dict[str, str] | None]:
    """The data of a step, and the settings of its loss where the server asks the teacher."""
    if training.has_teachers and config.accumulate == 1:  # in one pass, whose mean is that of all
        data = [taught_datum(episode) for episode in episodes if episode.num_sampled]
        return data, {"teacher": config.teacher}
    measure_gaps(teacher, episodes)
    return list(distill_data(episodes)), None


def judge(episodes: Sequence[Episode]) -> None:
    """The reward of an answer is minus its KL to the teacher, per token."""
    for episode in episodes:
        episode.reward = -mean_gap([episode])


def distill_data(episodes: Sequence[Episode]) -> Iterator[Datum]:
    """The advantage of a sampled token is log p(teacher) - log p(student), above the batch's mean.

    The mean is a baseline: it changes no gradient on average, and takes most of the noise away.
    """
    baseline = mean_gap(episodes)
    for episode in episodes:
        if episode.num_sampled:
            yield datum_of(episode, [baseline - gap for gap in episode.gaps])


def held_out_kl(
    student: SamplingClient,
    teacher: SamplingClient,
    questions: Sequence[Question],
    player: Player,
) -> float:
    """KL to the teacher on prompts that are not trained on; the same seeds each time."""
    episodes = [episode for (episode,) in player.play(student, questions, copies=1, seed=7)]
    measure_gaps(teacher, episodes)
    return mean_gap(episodes)
