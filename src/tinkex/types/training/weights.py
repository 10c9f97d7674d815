"""Saving, loading, exporting and copying weights."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from tinkex.contract.bounds import Between
from tinkex.contract.cost import NOTHING
from tinkex.types.account.checkpoints import ParsedCheckpointTinkerPath
from tinkex.types.account.console_urls import checkpoint_url, playground_url
from tinkex.types.fields.bounds import (
    Count,
    Id,
    Metadata,
    Name,
    Number,
    Path,
    PlainMetadata,
    Secret,
    SeqId,
    TtlSeconds,
    listing,
)
from tinkex.types.fields.identifiers import ModelID
from tinkex.types.fields.message import Listing, Request, Response, Texts
from tinkex.types.training.optimizer import AdamOptimizerConfig, OptimizerConfig

MAX_SOURCES = 16
"""Checkpoints that one may be interpolated of."""
Coefficient: TypeAlias = Annotated[float, Between(-1000.0, 1000.0, becomes=NOTHING)]

SamplingClientKind: TypeAlias = Literal["snapshot", "inflight"]
"""Which weights a sampling client uses: those of its save for good, or the newest of its run.

All `inflight` clients of a run follow its last `inflight` save: a sample that begins after the save
uses those weights, one that runs already ends on its own.
"""


class SaveWeightsRequest(Request):
    """Save weights and optimizer state under a name, for training to resume from."""

    model_id: Id
    path: Path | None = None
    seq_id: SeqId | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Response):
    """`path` is the full `tinker://` path."""

    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        return _console_url(self.path)


class SaveWeightsForSamplerRequest(Request):
    """Save weights for sampling: named (`path`), or unnamed with a sampling session number."""

    model_id: Id
    path: Path | None = None
    sampling_session_seq_id: Number | None = None
    kind: SamplingClientKind | None = None
    """`snapshot` or `inflight`, for weights without a name; None is `snapshot`."""
    seq_id: SeqId | None = None
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Metadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(Response):
    """`path` is the full `tinker://` path to sample from."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        return playground_url(self.path)


class SaveWeightsForSamplerResponseInternal(Response):
    """The answer itself: `path` for a named save, `sampling_session_id` for an unnamed one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalRequest(Request):
    """Export weights for download, encrypted to up to ten age recipients when given."""

    model_id: Id
    path: Path
    seq_id: SeqId | None = None
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[list[Name], *listing(10)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Response):
    """`path` is the full `tinker://` path of the export."""

    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(Response):
    """The answer itself, with the size of the export when the server says it."""

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Request):
    """Load a checkpoint into a model (`model_id`, `seq_id`), or into a new one (`session_id` ...).

    Without `optimizer` only the weights are loaded and the optimizer starts afresh.
    """

    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Count | None = None
    base_model: Name | None = None
    user_metadata: PlainMetadata | None = None
    path: Path
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Secret | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Response):
    """The checkpoint that was loaded, and into which model when a new one was made."""

    path: str | None = None
    model_id: ModelID | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Request):
    """Ask what a checkpoint was trained from, before loading it."""

    tinker_path: Path


class WeightsInfoResponse(Response):
    """The base that a checkpoint was trained from, and which layers it holds."""

    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CopyWeightsRequest(Request):
    """Copy a checkpoint into a project."""

    session_id: Id | None = None
    model_seq_id: Count | None = None
    destination_project_id: Name | None = None
    source_path: Path
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: Secret | None = None


class CopyWeightsResponse(Response):
    """Where the copy lies."""

    tinker_path: str


class InterpolateCheckpointsRequest(Request):
    """Make a checkpoint for sampling of others: the sum of their matrices, by MinT's call.

    A and B of the new adapter are each the sum of the sources' times their coefficients. What they
    change of the weights, B times A, is between the sources' changes exactly only where these share
    an A or a B and the coefficients add up to 1; close by, for checkpoints of one run.
    """

    source_paths: Annotated[list[Path], *listing(MAX_SOURCES, 2)]
    """2 to 16 checkpoints of one base model and one form."""
    coefficients: Annotated[list[Coefficient], *listing(MAX_SOURCES, 2)]
    """One for each source, in their order. They need not add up to 1."""
    output_path: Name | None = None
    """The name of the new checkpoint, in the run of the first source; made up where left out."""
    output_checkpoint_type: Literal["sampler"] = "sampler"
    """The only kind that it makes."""
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"


class InterpolateCheckpointsResponse(Response):
    """The new checkpoint, and what it was made of."""

    path: str
    """Where the new checkpoint lies."""
    checkpoint_type: Literal["sampler"] = "sampler"
    source_paths: Listing[str]
    """What it was made of."""
    coefficients: Listing[float]
    """How much each of them counts."""
    has_rank_shards: bool = False
    """Whether a server of MinT wrote files by rank beside it; ours writes one form."""
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"


class ExternalWeightsUrlsResponse(Response):
    """Signed addresses by file name, good until `expires`."""

    urls: Texts
    expires: datetime


def _console_url(tinker_path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return checkpoint_url(parsed.training_run_id, parsed.checkpoint_id)
