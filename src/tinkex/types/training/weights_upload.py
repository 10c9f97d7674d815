"""Uploading weights in the form that `save_weights_external` writes them (SDK 0.39)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from tinkex.types.fields.bounds import Id, Name
from tinkex.types.fields.message import Request, Response, Texts, all_known
from tinkex.types.fields.plain import PlainRecord
from tinkex.types.training.models import LoraConfig


class ExternalWeightsUploadStartRequest(Request):
    """Ask for an address for each file of an adapter of this base model and shape."""

    base_model: Name
    lora_config: Annotated[LoraConfig, all_known(LoraConfig)]
    destination_project_id: Name | None = None


class ExternalWeightsUploadStartResponse(Response):
    """Signed addresses by file name, each for one PUT until `expires`."""

    upload_id: str
    urls: Texts
    expires: datetime


class ExternalWeightsUploadFinishRequest(Request):
    """Make a checkpoint of the files that were put."""

    upload_id: Id


class ExternalWeightsUploadFinishResponse(Response):
    """The checkpoint that the files became."""

    tinker_path: str


@dataclass(frozen=True, slots=True)
class ExternalWeightsUploadStartResult(PlainRecord):
    """An upload that was started: put every file to its address, then finish it."""

    upload_id: str
    urls: Mapping[str, str]
    expires: datetime


@dataclass(frozen=True, slots=True)
class ExternalWeightsUploadFinishResult(PlainRecord):
    """The checkpoint of a finished upload."""

    tinker_path: str
