"""Jobs of an engine, the events that it answers with, and the `Engine` itself.

Frozen dataclasses over numpy and nothing else: they are pickled between our own processes. The
server has validated a request against the wire contract before it makes a job of it. An engine may
be used without a server, so it checks data again as it reads them: names, shapes, finite numbers,
vocabulary and context length (`train.data.read_datum`, `sample.checks`). A user's mistake ends in
`Failed(category="user")` and changes no state.

`Engine` is the synchronous heart of one worker process. Order: jobs of one `adapter_id` run in the
order they were submitted. Training jobs of different adapters that wait together may share one
packed pass. Samples never wait for a whole training queue: the engine interleaves decode steps with
training passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.optimizers import OptimizerParams
from tinkex.contract.routing import ExpertCounts
from tinkex.contract.sampling import DrawSettings, SampleOptions
from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.metrics import Tally

Array = NDArray[Any]
LOOPBACK = "127.0.0.1"
"""Where ranks of a process group reach one that has no address, because it is on their machine."""


@dataclass(frozen=True, kw_only=True)
class CsrArray:
    """A 2-D array of which only some cells are stored (compressed sparse rows)."""

    values: Array
    crow_indices: NDArray[np.int64]
    col_indices: NDArray[np.int64]
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something an engine is to do, under an id that its events carry."""

    job_id: str


# ------------------------------------------------------------------------------------ adapters


@dataclass(frozen=True, kw_only=True)
class AdapterJob(Job):
    """A job that runs in its turn among those of one adapter."""

    adapter_id: str


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float = 32.0
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, kw_only=True)
class CreateAdapterJob(AdapterJob):
    """Make a fresh adapter. Loads the base model first when it is not resident."""

    base_model: str
    lora: LoraSpec
    optimizer: str = "adamw"
    """A name of `contract.optimizers`."""
    base_fingerprint: str = ""
    """The base weights it was made on before, in a replay: on others it is refused."""


@dataclass(frozen=True, kw_only=True)
class LoadAdapterJob(AdapterJob):
    """Put a checkpoint folder's weights into `adapter_id`, creating the adapter when it is absent.

    Without `with_optimizer` the optimizer starts afresh; gradients gathered so far are dropped
    either way, unless the folder is a recovery snapshot that holds gradients.
    """

    base_model: str
    folder: str
    with_optimizer: bool
    mixture: tuple[tuple[str, float], ...] = ()
    """Folders, the first of them `folder`, and a coefficient for each: the matrices A and B become
    the sums of theirs, each times its coefficient. Empty: those of `folder` as they are."""


@dataclass(frozen=True, kw_only=True)
class SaveAdapterJob(AdapterJob):
    """Write a checkpoint folder: aside, fsync, rename. The folder must not exist yet.

    It holds the state as of the job's turn; later jobs of the adapter may run before it is `Done`,
    which is when the folder is on disk.

    `for_sampling` also keeps an in-memory copy under the folder's name, so that a `SampleJob`
    naming the folder needs no disk. `with_gradients` makes a recovery snapshot: everything that a
    bit-exact continuation needs, gathered gradients included.

    An `ephemeral` folder has no name that anyone was given. It is `Done` as soon as it outlives the
    engine's process; that it outlives the machine follows by itself. A sampler that computes with
    rounded weights may keep them so.
    """

    folder: str
    with_optimizer: bool = False
    with_gradients: bool = False
    for_sampling: bool = False
    ephemeral: bool = False


@dataclass(frozen=True, kw_only=True)
class DropAdapterJob(AdapterJob):
    """Free an adapter's memory. Dropping an absent adapter is not an error."""


@dataclass(frozen=True, kw_only=True)
class AdapterResult:
    """Answer of every adapter job: a save sets the size, a creation the fingerprint, a load the
    digest of the config and weights that it read."""

    size_bytes: int = 0
    base_fingerprint: str = ""
    content: str = ""


# ------------------------------------------------------------------------------------ training


@dataclass(frozen=True, kw_only=True)
class TrainDatum:
    tokens: NDArray[np.int64]
    """[T] model input."""
    inputs: Mapping[str, Array | CsrArray]
    """Loss inputs by wire name (`target_tokens`, `weights`, `logprobs`, `advantages`, ...)."""
    routed_experts: Array | CsrArray | None = None
    """Which experts its tokens have to pass, as `contract.routing` has it; None: the router's."""


@dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """A traced loss as it arrived on the wire (contract 5.7); the engine rebuilds it."""

    inputs: tuple[tuple[str, int], ...]
    """(name, rank) in parameter order; the first is `logprobs`."""
    graph: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainJob(AdapterJob):
    data: tuple[TrainDatum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    """False: forward only, no gradient is gathered."""
    custom_loss: TracedLoss | None = None
    shards: tuple[int, ...] = ()
    """The virtual shard of each datum (`optim.shards`), of a job that is a part of a larger one;
    empty: the engine deals them itself."""
    is_replay: bool = False
    """It ended well before and runs again for its effect: it has no limit of seconds."""
    alone: bool = False
    """No other job shares its passes, because an engine died with it before."""


class DeviceTurn(NamedTuple):
    """A stretch of time in which the device worked for a job, in seconds of the epoch."""

    name: str
    began_at: float
    ended_at: float
    size: int
    """Tokens of a pass or of a prompt; steps of a decode."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    outputs: tuple[Mapping[str, Array], ...]
    """Per datum, in the order given; `logprobs` has the shape of `target_tokens`."""
    metrics: dict[str, float]
    """`name:reduction` keys, one colon; `loss:sum` always present. Who hands it on may add some."""
    num_tokens: int
    tally: Tally = field(default_factory=Tally)
    """What the metrics are made of, to be joined with those of other parts."""
    turns: tuple[DeviceTurn, ...] = ()
    """Its passes, which it may share with other jobs. Many short ones are told as one."""


@dataclass(frozen=True, kw_only=True)
class OptimJob(AdapterJob):
    params: OptimizerParams


@dataclass(frozen=True, kw_only=True)
class OptimResult:
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ShareGradientJob(AdapterJob):
    """Put the gradients gathered here aside for all who share the adapter; none are left.

    An engine never waits for another one in its own thread. When all have put theirs aside, they
    are added up beside it (`ReduceGradientJob`), and everyone takes the same step.
    """


@dataclass(frozen=True, kw_only=True)
class AddGradientJob(AdapterJob):
    """Gather the gradients that a `ReduceGradientJob` brought, in place of those put aside."""


@dataclass(frozen=True, kw_only=True)
class GradientResult:
    seconds: float
    size_bytes: int


# ------------------------------------------------------------------------------ process groups


@dataclass(frozen=True, kw_only=True)
class GroupJob(Job):
    """A job of a process group with other engines, beside the engine's own thread."""

    group_id: str
    """Known to its ranks and the server alone."""


@dataclass(frozen=True, kw_only=True)
class OpenStoreJob(GroupJob):
    """Hold a store open at which ranks on several machines find each other."""

    host: str
    """This machine's name for the others."""


@dataclass(frozen=True, kw_only=True)
class JoinGroupJob(GroupJob):
    """Form a process group with other engines."""

    rank: int
    size: int
    address: str
    """`file:PATH`, or `tcp:HOST:PORT` of a store."""
    host: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class LeaveGroupJob(GroupJob):
    """Leave a process group, and let go of its store."""


@dataclass(frozen=True, kw_only=True)
class ReduceGradientJob(GroupJob):
    """Bring together what all ranks have put aside. Changes nothing: `AddGradientJob` does.

    Runs beside the engine's own thread, in the order in which jobs of the group were submitted,
    which must be one for all ranks.
    """

    adapter_id: str
    root: int | None = None
    """The rank to bring all shards to, not added up; None: their sum goes to all."""


@dataclass(frozen=True, kw_only=True)
class StoreResult:
    address: str
    """Of a store that was opened."""


# ------------------------------------------------------------------------------------ sampling


@dataclass(frozen=True, kw_only=True)
class SampleJob(Job, SampleOptions, DrawSettings):
    """Sample from a prompt; how, the declarations say that it inherits."""

    base_model: str
    adapter_folder: str | None
    """An immutable checkpoint folder, or None for the base model itself."""
    prompt: NDArray[np.int64]
    stop_tokens: tuple[int, ...] | None = None
    """None and no stop_strings: the model's own end tokens. (): nothing stops but max_tokens."""
    stop_strings: tuple[str, ...] = ()
    target_prompt_logprobs: Array | CsrArray | None = None
    """[T-1, K] token ids to score at prompt positions 1..T-1; -1 skips a cell."""
    stream: bool = False
    """Emit `Tokens` events while generating."""
    tenant: str = ""
    """Whose it is: places are shared between tenants, cached prompts are not."""
    first_sample: int = 0
    """Where its samples start among those of a larger job: sample i draws as number i + this."""
    alone: bool = False
    """No other job shares its passes, because an engine died with it before."""


@dataclass(frozen=True, kw_only=True)
class TopK:
    """[N, K] ids and logprobs; an empty cell is id 0 and `EMPTY_LOGPROB`."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: Literal["length", "stop"]
    topk: TopK | None = None
    routed_experts: NDArray[np.int64] | None = None
    """A row per token, as `contract.routing` has it."""


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    sequences: tuple[SampledTokens, ...]
    prompt_logprobs: NDArray[np.float32] | None = None
    """[T], position 0 (and everything before last_n) is NaN."""
    topk_prompt: TopK | None = None
    target_prompt_logprobs: Array | CsrArray | None = None
    prompt_alt: TopK | None = None
    """[T-1, K] alternative draws at prompt positions 1..T-1."""
    prompt_routed_experts: NDArray[np.int64] | None = None
    """A row per token of the prompt."""
    prompt_cache_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    device_seconds: float = 0.0
    """Its share of the passes it was in."""
    turns: tuple[DeviceTurn, ...] = ()
    """Its prompt, then the tokens that were drawn; both in the company of other samples."""


# ------------------------------------------------------------------------------------ models


@dataclass(frozen=True, kw_only=True)
class DescribeModelJob(Job):
    """Say what a base model is, from its config alone; loads no weights."""

    base_model: str


@dataclass(frozen=True, kw_only=True)
class LoadModelJob(Job):
    """Have a base model in memory before anybody waits for it. The answer is an `AdapterResult`."""

    base_model: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    base_model: str
    arch: str
    vocab_size: int
    max_context_length: int
    tokenizer_id: str
    """A name or local path that a tokenizer loader accepts."""
    eos_token_ids: tuple[int, ...]
    experts: ExpertCounts | None = None
    """None: it has none, or their choice can be neither recorded nor prescribed."""
    note: str = ""
    """What a user should know about these weights."""
    stands_in: bool = False
    """They are other weights than those the name means."""


Result = (
    AdapterResult
    | TrainResult
    | OptimResult
    | GradientResult
    | StoreResult
    | SampleResult
    | ModelInfo
)


# ------------------------------------------------------------------------------------ events


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Why a job is not done yet, in words a user understands: `loading NAME 40 %`."""

    job_id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """New tokens of one sample of a streaming `SampleJob`."""

    job_id: str
    sample_index: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Done:
    job_id: str
    result: Result


@dataclass(frozen=True, kw_only=True)
class Failed:
    """`user`: the caller can fix it. `server`: we failed. A cancelled job ends as `cancelled`."""

    job_id: str
    message: str
    category: Literal["user", "server", "cancelled"]
    code: str = ""
    """`code` of the error, where it has one."""


Event = Progress | Tokens | Done | Failed
Emit = Callable[[Event], None]
"""Takes the events of a job, on a thread of the engine."""


class Engine(Protocol):
    """The synchronous heart of one worker. `submit` and `cancel` return at once, from any thread.

    Every submitted job ends in exactly one `Done` or `Failed`, passed to its `emit` from a thread
    of the engine.
    """

    heartbeat: Heartbeat
    """What the engine's thread is doing."""

    def submit(self, job: Job, emit: Emit) -> None: ...

    def cancel(self, job_id: str) -> None: ...

    def close(self) -> None: ...
