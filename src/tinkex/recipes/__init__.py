"""SFT, DPO, RL and distillation as plain loops: `tinkex train` runs them; copy and change them."""
