"""SFT, DPO, RL and distillation as plain loops: `tinkex train` runs them; copy and change them."""

from tinkex.recipes.learning_rate import get_lr

__all__ = ["get_lr"]
