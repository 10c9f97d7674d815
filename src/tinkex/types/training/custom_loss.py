"""Losses traced from user code into plain data that a server can rebuild."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from tinkex.types.fields.bounds import Id, Name, Number, Plain, PlainList, listing
from tinkex.types.fields.message import Request, Response

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]


class CustomLossInput(Request):
    """A parameter of a traced loss."""

    name: Name
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """A step of a traced loss, in execution order."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: Name
    target: Name
    args: PlainList = []
    kwargs: Plain = {}


class CustomLossGraph(Request):
    """A loss traced from user code into plain data."""

    format: Literal[1] = 1
    nodes: Annotated[list[CustomLossNode], *listing(10_000)]


class CreateCustomLossRequest(Request):
    """Upload a traced loss, to be named later by `loss_fn="custom"`."""

    session_id: Id
    custom_loss_seq_id: Number
    name: Name
    inputs: Annotated[list[CustomLossInput], *listing(256)]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Response):
    """The id to give as `loss_fn_config={"loss_id": ...}`."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
