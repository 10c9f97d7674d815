"""Losses traced from user code into plain data that a server can rebuild."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from tinkex.types._models import Listing, Request, Response

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]


class CustomLossInput(Request):
    """One parameter of a traced loss."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One step of a traced loss, in execution order."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: Listing[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(Request):
    """A loss traced from user code into plain data."""

    format: Literal[1] = 1
    nodes: Listing[CustomLossNode]


class CreateCustomLossRequest(Request):
    """Upload a traced loss, to be named later by `loss_fn="custom"`."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: Listing[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Response):
    """The id to give as `loss_fn_config={"loss_id": ...}`."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
