"""Run the server as a process: settings in, a listening socket out.

The first line on stdout is JSON, `{"port": N, "base_url": ...}`, printed once requests are
answered; a terminal gets a few lines for a person instead, unless `--json` is given. Everything
else goes to stderr. SIGTERM and SIGINT end it gracefully: waiting polls are answered at once,
running requests get a few seconds, state is in the journal anyway.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import uvicorn
from fastapi import FastAPI

from tinkex.engine.model.base_model import require
from tinkex.engine.registry.engines import ENGINES
from tinkex.errors import ConfigError, ModelNotFoundError
from tinkex.server.app import create_app
from tinkex.server.files.private import close_to_others, make_private
from tinkex.server.greeting import greeting
from tinkex.server.guard.auth import is_configured
from tinkex.server.guard.connections import (
    SPARE_FILES,
    ConnectionLimits,
    guarded,
    raise_file_limit,
)
from tinkex.server.guard.quotas import read_quotas
from tinkex.server.http.dependencies import AppDependencies
from tinkex.server.process import disk, logs
from tinkex.server.process.beacon import Beacon
from tinkex.server.process.config import ServerConfig, load_config
from tinkex.server.tls import check_tls
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.pool import Pool
from tinkex.server.workers.process_worker import ProcessWorker
from tinkex.server.workers.watchdog import Budget
from tinkex.store import Store
from tinkex.store.binding import refuse_lost_database
from tinkex.store.claim import InUseError
from tinkex.store.database import sqlite_file
from tinkex.wire.local_servers import state_folder

logger = logging.getLogger("tinkex.server")
CLAIM_QUICK_S = 1.0
CLAIM_S = 10.0
"""How long to wait for a server that is just ending to let go of its data."""
SWITCH_S = 0.001
"""How long a store or decoding thread may hold up the event loop (Python's default is 5 ms)."""


class _Server(uvicorn.Server):
    """Announces itself once it answers, and wakes waiting polls when told to stop."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, announce: str) -> None:
        super().__init__(config)
        self._app = app
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.set_threshold(10_000)  # a burst of requests holds more than Python's 700 objects
        gc.freeze()  # what start-up made stays; walking it again and again would cost pauses
        if self.started:
            # Not sys.stdout: ray prints what its nodes say, and a cluster sends that to stderr.
            print(self._announce, file=sys.__stdout__, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our own handlers: uvicorn would raise the signal again before the store is closed."""
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGINT: self.stop, signal.SIGTERM: self.stop}
        if self.config.ssl_certfile:
            handlers[signal.SIGHUP] = self.reload_tls
        for sig, handler in handlers.items():
            loop.add_signal_handler(sig, handler)
        try:
            yield
        finally:
            for sig in handlers:
                loop.remove_signal_handler(sig)

    def reload_tls(self) -> None:
        """Use the certificate as it is now, from the next connection on (SIGHUP)."""
        cert, key = str(self.config.ssl_certfile), str(self.config.ssl_keyfile)
        try:
            check_tls(cert, key)
            assert self.config.ssl is not None
            self.config.ssl.load_cert_chain(cert, key)
        except ConfigError as exc:
            logger.error("the old certificate stays in use: %s", exc)
        else:
            logger.info("the certificate was read again")

    def stop(self) -> None:
        """Answer waiting polls and end. A second call does not wait for running requests."""
        logger.info("stopping now" if self.should_exit else "stopping; what was accepted is kept")
        self.force_exit = self.should_exit
        if self.force_exit:  # uvicorn would show where its own tasks are cut off
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self.should_exit = True
        self._app.state.dependencies.service.begin_stop()


def _is_trouble(record: logging.LogRecord) -> bool:
    """A request that is cut off when the server ends is not: nobody wants its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


def run(config: ServerConfig, *, for_person: bool = False) -> None:
    """Serve until a signal, or until the last client is gone when `until_idle_s` is set.

    Args:
        for_person: Say on stdout what a person wants to know, instead of one line of JSON.
    """
    logs.set_up(config.log_level, config.log_format)
    for noisy in ("alembic", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_trouble)
    sys.setswitchinterval(SWITCH_S)
    os.umask(0o077)  # weights, journal and keys are nobody else's
    _check_models(config)
    config.require_key(is_any_stored=not config.is_loopback and _has_stored_key(config))
    if config.tls_cert:
        check_tls(config.tls_cert, config.tls_key)
    sock = _bind(config)
    level = logging.DEBUG if for_person else logging.INFO  # the greeting says what was changed
    logger.log(level, "effective config beside the defaults: %s", json.dumps(config.changed()))
    logger.debug("effective config: %s", json.dumps(config.describe()))
    try:
        _run_loop(_serve(config, sock, for_person), debug=config.debug)
    finally:
        sock.close()


def _check_models(config: ServerConfig) -> None:
    """A model that is nowhere is told now, not to whoever first uses it."""
    names = config.models if config.engine_kind.loads_models else ()
    for model in dict.fromkeys((*names, *(config.aliases.values() if names else ()))):
        is_path = model.startswith(("/", "./", "../", "~"))
        if is_path and not Path(model).expanduser().exists():
            raise ConfigError(
                f"there is no model at {model}. --model takes a Hugging Face id, a folder with "
                "safetensors, or a GGUF file."
            )
        try:
            require(model)
        except ModelNotFoundError as exc:
            raise ConfigError(str(exc)) from exc


def _run_loop(main: Any, *, debug: bool) -> None:
    if debug:  # what the guard of the loop wraps is asyncio's
        asyncio.run(main)
        return
    try:
        import uvloop
    except ImportError:  # Windows, or a trimmed install: the standard loop is only slower
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(config: ServerConfig, sock: socket.socket, for_person: bool) -> None:
    store = await asyncio.to_thread(open_store, config)
    store.on_fenced(_end_server)
    try:
        pool = await asyncio.to_thread(make_pool, config)
        app = await asyncio.to_thread(create_app, config, store, pool)
        parts: AppDependencies = app.state.dependencies
        parts.connections = _connection_limits(config)
        needs_key = not parts.auth.is_open
        host, port = sock.getsockname()[:2]
        scheme = "https" if config.tls_cert else "http"
        base_url = f"{scheme}://{_url_host(host)}:{port}"
        announce = json.dumps({"port": port, "base_url": base_url})
        if for_person:
            announce = greeting(config, base_url, needs_key=needs_key)
        options = uvicorn.Config(
            app,
            http=guarded(parts.connections),
            ws="none",
            access_log=False,
            server_header=False,
            log_config=None,
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=math.ceil(config.stop_grace_s),
            ssl_certfile=config.tls_cert or None,
            ssl_keyfile=config.tls_key or None,
        )
        server = _Server(options, app, announce)
        beacon = Beacon(config, base_url, needs_key=needs_key)
        with beacon.lit():
            await _until_deserted(config, app, server, sock)
        if pool.refusal:
            raise ConfigError(pool.refusal)
    finally:
        await asyncio.to_thread(store.close)


def _connection_limits(config: ServerConfig) -> ConnectionLimits:
    """The configured ones, within the files that this process may open."""
    room = max(raise_file_limit() - SPARE_FILES, 64)
    return ConnectionLimits(
        max_connections=room,
        max_per_address=min(config.max_connections_per_address, room * 3 // 4),
        head_timeout_s=config.head_timeout_s,
        body_pause_s=config.body_pause_s,
    )


async def _until_deserted(
    config: ServerConfig, app: FastAPI, server: _Server, sock: socket.socket
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    if config.until_idle_s or config.parent_pid:
        deserted = asyncio.create_task(app.state.dependencies.presence.wait_until_deserted())
        await asyncio.wait({serving, deserted}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            logger.info("the last client is gone; stopping")
            server.stop()
        deserted.cancel()
    await serving


def _has_stored_key(config: ServerConfig) -> bool:
    """Whether `tinkex keys` made one. Makes no database where there is none."""
    if not config.database and not sqlite_file(config.data_dir).exists():
        return False
    store = connect_store(config)
    try:
        return any(not is_configured(key) for key in store.accounts.active_keys())
    finally:
        store.close()


def connect_store(config: ServerConfig) -> Store:
    """The database a config names, shared with others; SQLite in the data folder by default."""
    how: dict[str, Any] = {
        "full_sync": config.power_safe,
        "result_ttl_s": config.result_ttl_s,
        "row_ttl_s": config.journal_ttl_s,
    }
    if config.database:
        return Store(config.database, **how)
    return Store.in_folder(config.data_dir, **how)


def open_store(config: ServerConfig) -> Store:
    """The database a config names, with its data folder, for this server alone."""
    make_private(config.data_dir)
    if not config.database:
        refuse_lost_database(config.data_dir, sqlite_file(config.data_dir))
    store = connect_store(config)
    try:
        _claim(store, config.data_dir)
        close_to_others(config.data_dir)
    except ConfigError:
        store.close()
        raise
    return store


def _claim(store: Store, data_dir: Path) -> None:
    try:
        store.claim(CLAIM_QUICK_S, data_dir=data_dir)
    except InUseError as exc:
        logger.warning("%s Waiting %d s for it to end.", exc, CLAIM_S)
        try:
            store.claim(CLAIM_S, data_dir=data_dir)
        except InUseError as still:
            if not data_dir.name.startswith("local"):
                raise
            raise InUseError(
                f"{still} If it is your private server, programs still use it: it ends "
                "seconds after the last of them. Wait for that, or serve another folder: "
                f"`tinkex serve --data-dir {state_folder() / 'server'}`."
            ) from still


def make_pool(config: ServerConfig) -> Pool:
    """All workers of a server, not started yet. Blocks while a cluster is asked for its nodes."""
    if config.ray:
        return _make_cluster_pool(config)
    devices = config.worker_devices
    # Sums may depend on the number of threads: in deterministic mode all have as many as one would.
    num_processes = len(devices) * config.group_size
    shares_cores = num_processes > 1 and not config.deterministic
    threads = max(1, cores() // num_processes) if shares_cores else None
    return Pool(
        [make_worker(config, index, device, threads) for index, device in enumerate(devices)],
        rendezvous=config.data_dir / "rendezvous",
        deterministic=config.deterministic or config.engine_kind.splits_exactly,
        all_reduce_timeout_s=config.all_reduce_timeout_s,
    )


def _make_cluster_pool(config: ServerConfig) -> Pool:
    from tinkex.cluster.connection import Cluster
    from tinkex.server.workers.cluster_pool import ClusterPool, PoolPlan

    device = config.devices[0] if config.group_size == 1 else config.worker_devices[0]
    plan = PoolPlan(
        spec=_spec(config, device, None),
        num_workers=config.num_workers,
        group_size=config.group_size,
        start_timeout_s=config.worker_start_timeout_s,
        budget=Budget(turn_s=config.stuck_after_s),
        rendezvous=config.data_dir / "rendezvous",
        all_reduce_timeout_s=config.all_reduce_timeout_s,
    )
    cluster = Cluster.connect(config.ray)
    try:
        return ClusterPool(cluster, plan)
    except BaseException:
        cluster.close()
        raise


def _spec(config: ServerConfig, device: str, threads: int | None) -> WorkerSpec:
    return WorkerSpec(
        engine=config.engine,
        device=device,
        deterministic=config.deterministic,
        any_base=config.any_base,
        models=() if config.parent_pid else config.models,  # a private one loads any
        log_level=config.log_level,
        threads=threads,
        group_timeout_s=config.group_timeout_s,
    )


def make_worker(
    config: ServerConfig, index: int, device: str, threads: int | None = None
) -> ProcessWorker:
    worker = ProcessWorker(
        _spec(config, device, threads),
        name=f"worker-{index}",
        start_timeout_s=config.worker_start_timeout_s,
        budget=Budget(turn_s=config.stuck_after_s),
    )
    worker.on_refusal = _end_server
    return worker


def cores() -> int:
    """The number of CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _end_server() -> None:
    """A worker cannot run with these settings, and would not at the next attempt either."""
    os.kill(os.getpid(), signal.SIGTERM)


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {exc.strerror}. "
            "Another server may hold the port; --port 0 picks a free one."
        ) from exc
    sock.set_inheritable(False)
    return sock


def _url_host(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def _pairs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> Any:
    if not values:
        return None
    pairs = [value.partition("=") for value in values]
    if any(not sep or not name or not target for name, sep, target in pairs):
        raise click.BadParameter("expected NAME=MODEL")
    return {name: target for name, _, target in pairs}


@click.command("serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--host", help="Address to listen on (default 127.0.0.1).")
@click.option("--port", type=int, help="Port to listen on (default 8765); 0 picks a free one.")
@click.option("--model", "models", multiple=True, help="Base model to serve: a name or a folder.")
@click.option("--alias", "aliases", multiple=True, callback=_pairs, help="NAME=MODEL, repeatable.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Database, checkpoints, state.")
@click.option("--api-key", "api_keys", multiple=True, help="KEY or KEY=USER, repeatable.")
@click.option("--api-key-file", help="File with KEY or KEY=USER a line, mode 600.")
@click.option(
    "--require-key",
    "key_required",
    is_flag=True,
    default=None,
    help="Ask for a key on this machine too.",
)
@click.option("--public-url", help="Address that clients use; other names are refused.")
@click.option("--tls-cert", help="PEM certificate; with --tls-key, serve HTTPS.")
@click.option("--tls-key", help="PEM private key of the certificate, unencrypted.")
@click.option("--database", help="postgresql://... or sqlite:///...; default SQLite in data-dir.")
@click.option("--storage", help="s3://BUCKET/PREFIX for checkpoints; default in data-dir.")
@click.option(
    "--power-safe/--no-power-safe",
    default=None,
    help="Accepted work survives a power cut (default), or crashes only.",
)
@click.option("--engine", help="; ".join(kind.says for kind in ENGINES.values()) + ".")
@click.option(
    "--any-base",
    is_flag=True,
    default=None,
    help="Use checkpoints on other base weights than their own.",
)
@click.option(
    "--deterministic/--no-deterministic", default=None, help="Same requests, same bits; slower."
)
@click.option("--device", "devices", multiple=True, help="One worker per device: auto, cuda:0, ...")
@click.option("--workers", "num_workers", type=int, help="Worker processes; default one a device.")
@click.option("--group", "group_size", type=int, help="Devices that share a model as one worker.")
@click.option("--ray", help="auto or HOST:PORT: workers on the nodes of a Ray cluster.")
@click.option(
    "--until-idle", "until_idle_s", type=float, help="End after SECONDS without a client."
)
@click.option("--parent-pid", type=int, help="A process that counts as a client while it lives.")
@click.option(
    "--snapshot-every",
    "snapshot_every_ops",
    type=int,
    help="Save a model's state after so many requests.",
)
@click.option(
    "--keep-rollouts",
    is_flag=True,
    default=None,
    help="Let users with keys see their sampled answers by step; without keys that is so anyway.",
)
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    help="NAME=NUMBER a user may have, such as disk_bytes=50G; repeatable.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    help="[MODEL:]KIND=PRICE of a million tokens, such as training=0.4; repeatable.",
)
@click.option("--access-log", is_flag=True, default=None, help="Log requests as lines of JSON.")
@click.option("--log-format", help="text, or json: one object a line.")
@click.option("--log-level", help="debug, info, warning or error.")
@click.option(
    "--debug", is_flag=True, default=None, help="Log what holds the event loop, with its stack."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the address as JSON on a terminal too."
)
@click.pass_context
def serve(
    ctx: click.Context, /, file: Path | None, as_json: bool, quotas: tuple[str, ...], **flags: Any
) -> None:
    """Serve the Tinker API from this machine."""
    as_json = as_json or getattr(ctx.obj, "format", "") == "json"  # `tinkex --json serve`
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    try:
        config = load_config(file=file, flags=given | read_quotas(quotas))
        run(config, for_person=sys.stdout.isatty() and not as_json)
    except ConfigError as exc:
        raise click.ClickException(str(exc)) from exc
    except Exception as exc:
        if (text := disk.trouble(exc)) is None:
            raise
        raise click.ClickException(text) from exc
