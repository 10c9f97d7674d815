"""What a server is and how it wants to be spoken to: health, models, flags, credentials."""

from __future__ import annotations

from typing import Literal

from tinkex.types.fields.bounds import Name
from tinkex.types.fields.message import Listing, Request, Response


class HealthResponse(Response):
    """The server answers."""

    status: Literal["ok"]


class SupportedModel(Response):
    """A base model of the server. None means that the server does not say."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    note: str | None = None
    """A remark about the weights, for people."""
    stands_in: bool | None = None
    """Whether other weights stand in for those of this name, which could not be fetched."""


class GetServerCapabilitiesResponse(Response):
    """The base models this server has."""

    supported_models: Listing[SupportedModel]


class ClientConfigRequest(Request):
    """Asks for the flags of both configs below."""

    sdk_version: Name


class ClientConfigResponse(Response):
    """Flags fetched once, when a client starts (contract 3.2)."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(Response):
    """Flags fetched again and again while a client lives (contract 3.3)."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(Response):
    """A short-lived token to send in place of the API key."""

    jwt: str


class OrgDetails(Response):
    """The organization of an API key."""

    name: str


class UserDetails(Response):
    """The user of an API key."""

    email: str


class ApiKeyDetails(Response):
    """Organization and user of an API key."""

    org_details: OrgDetails
    user_details: UserDetails


class ApiKeyResponse(Response):
    """Whom an API key belongs to."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class WhoamiResponse(Response):
    """The owner of a credential."""

    user_urn: str
    org_urn: str
    email: str | None = None
