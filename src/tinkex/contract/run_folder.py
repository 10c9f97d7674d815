"""Names of the files in a training run's folder, which recipes write and the console reads.

Programs of tinker-cookbook write the first two as well.
"""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
"""A line per step; a folder with one is a run."""
CONFIG_FILE = "config.json"
"""The settings of the run."""
CHECKPOINTS_FILE = "checkpoints.jsonl"
"""A line per saved state."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""A line per sampled answer."""
SERVER_FILE = "server.json"
"""Which server has the run."""
COMMAND_FILE = "command.json"
"""The command that `tinkex train resume` runs again."""
FINISHED_FILE = "finished.json"
"""How the run ended."""
