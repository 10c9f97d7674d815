"""Adapters for other programs: merged into the base model, as a GGUF file, with stacked experts."""
