"""The recipes of tinker-cookbook as commands: what each is given, and where it leaves its figures.

Unmodified recipes, run as their READMEs say, with small sizes. This module does not run them.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name whose renderer the cookbook knows; the server lends it to the default model."""
ANSWERER = "Qwen/Qwen3.5-9B"
"""The second player of twenty questions, which no argument changes; lent likewise."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    module: str
    args: tuple[str, ...] = ()
    model: str = "model_name"
    """The argument that names the model."""
    log: str | None = "log_path"
    """The argument that names the folder of `metrics.jsonl`; None: the recipe has none."""
    asks: bool = False
    """Whether the recipe takes `behavior_if_log_dir_exists`."""
    since_0_6: tuple[str, ...] = ()
    """More arguments for versions from 0.6 on, whose default loss has no public definition."""
    stdin: str = ""
    says: str = ""
    """What it must have printed."""


_SL = ("batch_size=4", "max_length=256", "max_steps=2")
_RL = ("group_size=2", "groups_per_batch=2", "max_tokens=16", "max_steps=2")
_LOSS = ("loss_fn=importance_sampling",)
_RENDERER = "renderer_name=qwen3_instruct"
_TEACHERS = ("deepmath_teacher_model", "tulu3_teacher_model")

RECIPES: dict[str, Recipe] = {
    "sl_basic": Recipe(
        module="recipes.sl_basic",
        args=("max_steps=1", "lora_rank=8"),
    ),
    "sl_loop": Recipe(module="recipes.sl_loop", args=(*_SL, "lora_rank=8")),
    "rl_basic": Recipe(
        module="recipes.rl_basic",
        args=("max_tokens=4", "max_steps=1", "lora_rank=8"),
    ),
    "rl_loop": Recipe(
        module="recipes.rl_loop",
        args=("batch_size=2", "group_size=2", "max_tokens=16", "max_steps=2", "lora_rank=8"),
        since_0_6=_LOSS,
    ),
    **{
        f"chat_sl, {dataset}": Recipe(
            module="recipes.chat_sl.train",
            args=(f"dataset={dataset}", *_SL, "lora_rank=8", "eval_every=0"),
            asks=True,
        )
        for dataset in ("no_robots", "tulu3")
    },
    **{
        f"math_rl, {env}": Recipe(
            module="recipes.math_rl.train",
            args=(f"env={env}", *_RL, "eval_every=0"),
            asks=True,
            since_0_6=_LOSS,
        )
        for env in ("arithmetic", "gsm8k", "math", "polaris", "deepmath")
    },
    "preference, dpo": Recipe(module="recipes.preference.dpo.train", args=_SL, asks=True),
    "preference, shorter": Recipe(
        module="recipes.preference.shorter.train",
        args=(
            *(_RENDERER, "batch_size=2", "group_size=2", "max_tokens=8", "max_steps=2"),
            "eval_every=0",
        ),
        asks=True,
    ),
    "preference, rlhf": Recipe(
        module="recipes.preference.rlhf.rlhf_pipeline",
        model="base_model",
        args=(
            *("short_name=small", "batch_size=4", "max_length=256", "rl_max_tokens=8"),
            *("rl_group_size=2", "max_steps=1", "lora_rank=8", "eval_every=0"),
        ),
        log=None,
    ),
    "distillation, on policy": Recipe(
        module="recipes.distillation.on_policy_distillation",
        args=(*_RL, f"teacher_model={MODEL}", "eval_every=0", "lora_rank=8"),
        asks=True,
    ),
    "distillation, two teachers": Recipe(
        module="recipes.distillation.on_policy_multi_teacher",
        args=(
            *("group_size=2", "deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2"),
            *(f"{teacher}={MODEL}" for teacher in _TEACHERS),
            *("max_tokens=16", "max_steps=2", "eval_every=0", "lora_rank=8"),
        ),
        asks=True,
    ),
    "distillation, off policy": Recipe(
        module="recipes.distillation.off_policy_reasoning",
        args=(
            *(_RENDERER, "batch_size=4", "max_length=256", "max_prompts=8", "buffer_size=8"),
            *("eval_every=0", "lora_rank=8"),
        ),
        asks=True,
    ),
    "sdft, sciknoweval": Recipe(
        module="recipes.sdft.train", args=(*_RL, "eval_every=0", "lora_rank=8"), asks=True
    ),
    "sdft, toolalpaca": Recipe(
        module="recipes.sdft.train",
        args=("dataset=toolalpaca", *_RL, "eval_every=0", "lora_rank=8"),
        asks=True,
    ),
    "multiplayer, guess the number": Recipe(
        module="recipes.multiplayer_rl.guess_number.train",
        args=(
            *(_RENDERER, "batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1"),
            "eval_every=0",
        ),
        asks=True,
    ),
    "multiplayer, twenty questions": Recipe(
        module="recipes.multiplayer_rl.twenty_questions.train",
        args=(
            *(_RENDERER, "batch_size=1", "group_size=2", "max_tokens=8", "max_steps=1"),
            *("num_epochs=1", "eval_every=0"),
        ),
        asks=True,
    ),
    "prompt_distillation": Recipe(
        module="recipes.prompt_distillation.train",
        args=(*_SL, "file_path=conversations.jsonl", "lora_rank=8", "eval_every=0"),
        asks=True,
    ),
    "rubric": Recipe(
        module="recipes.rubric.train",
        args=(
            *("train_jsonl_path=rubric.jsonl", "test_jsonl_path=rubric.jsonl", "max_steps=2"),
            *(f"grader_llm_name={MODEL}", "grader_renderer_name=qwen3_instruct", _RENDERER),
            *("train_group_size=2", "groups_per_batch=2", "max_tokens=8", "eval_every=0"),
        ),
        asks=True,
        since_0_6=_LOSS,
    ),
    "rl_numerics_check": Recipe(
        module="recipes.rl_numerics_check.train",
        args=(
            *(*_RL, "max_trajectory_tokens=2048", "lora_rank=8"),
            *("task.page_chars=200", "task.num_pages_min=2", "task.num_pages_max=3"),
        ),
        asks=True,
    ),
    "chat_app": Recipe(
        module="chat_app.tinker_chat_cli",
        model="base_model",
        args=("max_tokens=8",),
        log=None,
        stdin="Hello.\nquit\n",
        says="Assistant",
    ),
}
