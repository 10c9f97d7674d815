"""The folder of a training run: its log, its name on this machine, its curves."""
