"""The parts of a server that only the endpoints of other APIs, and the console, need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tinkex.server.compat.chat_formats import ChatFormats
from tinkex.server.compat.model_names import ModelNames
from tinkex.server.compat.trajectories import TrajectoryRecorder


@dataclass(frozen=True, slots=True)
class CompatDependencies:
    names: ModelNames
    chat_formats: ChatFormats
    trajectories: TrajectoryRecorder


def compat_of(request: Request) -> CompatDependencies:
    compat: CompatDependencies = request.scope["app"].state.compat
    return compat


def _names(request: Request) -> ModelNames:
    return compat_of(request).names


def _trajectories(request: Request) -> TrajectoryRecorder:
    return compat_of(request).trajectories


Names = Annotated[ModelNames, Depends(_names)]
Trajectories = Annotated[TrajectoryRecorder, Depends(_trajectories)]
"""Types of a route's parameters that want these parts."""
