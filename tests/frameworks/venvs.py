"""Environments that hold one framework each (`tests/harness/cached_venv.py` says where).

This module does not know what the frameworks do; `python venvs.py NAME ...` builds ahead.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
from cached_venv import cached_python

# One `pip install` in each tuple. torch is lent; a framework that pins another one is installed
# without its extra, and what the extra names is written out.
FRAMEWORKS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tinker-cookbook-0.5.8": (
        ("torch", "tinker==0.36.0", "tinker-cookbook==0.5.8", "math-verify", "pylatexenc", "sympy"),
    ),
    "tinker-cookbook-0.6.1": (
        (
            *(
                "torch",
                "tinker==0.38.0",
                "math-verify",
                "pylatexenc",
                "sympy",
                "aiohttp",
                "blobfile",
            ),
            *("chz", "cloudpickle", "datasets", "pillow", "pyrage", "termcolor", "tiktoken"),
            *("tml-renderers", "transformers>=4.57.6,!=5.3.0,!=5.4.*,!=5.5.0,!=5.6.*"),
        ),
        ("--no-deps", "tinker-cookbook==0.6.1"),
    ),
    "mindlab-toolkit-0.2.0": (("torch", "mindlab-toolkit==0.2.0"),),
    "llmcomp-1.6.0": (("torch", "tinker==0.36.0", "tinker-cookbook==0.5.8", "llmcomp==1.6.0"),),
    "openpipe-art-0.5.18": (
        (
            *("torch", "openpipe-art==0.5.18", "tinker==0.18.2", "tinker-cookbook>=0.3,<0.4"),
            *(
                "openai==2.14.0",
                "datrie",
                "fastapi",
                "numpy<2",
                "pillow",
                "pyarrow",
                "transformers==5.2.0",
            ),
            *("uvicorn", "pydantic>=2.12.5"),
        ),
    ),
    "trinity-rft-0.5.2": (("torch", "trinity-rft[tinker]==0.5.2", "pyarrow<21", "greenlet"),),
    "axolotl-0.19.0": (("torch", "axolotl==0.19.0", "tinker"),),
    # A server of another hand, for our client: `skyrl_tx.py` runs it.
    "skyrl-tx-0.3.0": (
        (
            *("torch", "skyrl-tx[tinker]==0.3.0", "jax<1", "flax>=0.12.2", "optax>=0.2.5"),
            *("greenlet", "transformers<5"),
        ),
    ),
}


def framework_python(name: str) -> Path:
    """The interpreter of the venv that holds the framework `name`; builds it when absent."""
    return cached_python(name, *FRAMEWORKS[name])


if __name__ == "__main__":
    for wanted in sys.argv[1:] or FRAMEWORKS:
        print(wanted, framework_python(wanted), flush=True)
