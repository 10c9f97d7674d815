"""Uniform numbers of a (seed, sample, position), computed, never drawn from a stream.

A stream would make a sample depend on what else was drawn before it; a counter does not, so a
seeded sample is the same alone, in a batch, after preemption and on every device. Knows integers
only. `uniforms` is the oracle of `uniform_table`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# Domain tags keep the draws of one job apart: token draws and alternative prompt draws.
TOKEN = 0
PROMPT_ALT = 1
LEVELS = 3
"""Numbers that one draw from a vocabulary takes; see `sampling_math`."""


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection with full avalanche."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample_key(seed: int, sample_index: int, domain: int = TOKEN) -> int:
    """The key of one sample of a job; combine it with a position by `uniform`."""
    return _mix(_mix(_mix(seed & _MASK) ^ sample_index) ^ domain)


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return float(_mix(key ^ _mix(position)) >> 11) * 2.0**-53


def uniforms(key: int, position: int) -> tuple[float, ...]:
    """`LEVELS` such numbers, of which `uniform` is the first."""
    state, numbers = _mix(key ^ _mix(position)), []
    for _ in range(LEVELS):
        numbers.append(float(state >> 11) * 2.0**-53)
        state = _mix(state)
    return tuple(numbers)


def uniform_table(keys: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """`uniforms` of many at once, [N, LEVELS]; the same numbers."""
    state = _mix_all(np.asarray(keys, np.uint64) ^ _mix_all(np.asarray(positions, np.uint64)))
    table = np.empty((len(state), LEVELS))
    for level in range(LEVELS):
        table[:, level] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
        state = _mix_all(state)
    return table


def _mix_all(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fresh_seed() -> int:
    """A seed for a job that gave none."""
    return secrets.randbits(63)
