"""The compute: decoder, LoRA, losses, optimizers, trainer, sampler, checkpoints.

Needs torch, numpy, safetensors and, for loading models, transformers; never pydantic, HTTP or a
database. `jobs` and `toy` need only numpy. Import the submodule you want; nothing loads here.
"""
