"""What runs only on CUDA: Triton kernels and the passes built from them."""

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
"""Whether the kernels of this folder can be imported: Triton exists for Linux only."""
