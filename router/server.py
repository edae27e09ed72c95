"""RouterServer: one router's HTTP and gRPC ports."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc.aio
import uvicorn
from starlette.types import ASGIApp

from protos import router_pb2, router_pb2_grpc
from router.config import JobsConfig, RouterConfig
from router.grpc_keys import KeyInterceptor
from router.grpc_service import RouterService
from router.http.patience import PatientProtocol
from router.http.tls import rotating_context
from router.jobs.desk import JobDesk
from router.openai.app import build_app
from router.pool import WorkerPool
from router.roles import Member
from router.router import Router
from router.tenants import KeyRing
from router.text import TextService
from router.ui.routes import add_ui_routes
from workers.config import ModelConfig
from workers.errors import ConfigError, UnavailableError
from workers.models.architecture import ArchitectureConfig, read_architecture
from workers.models.resolve import default_served_name, resolve_model
from workers.rpc import GrpcNetwork, Network
from workers.startup import Phases, phases_to_proto
from workers.tls import Membership
from workers.tokenizer import Tokenizer

# What running answers get to end by themselves when the server stops.
_GRACE_S = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What a router is called, its cluster, and how it shows that it is of it."""

    name: str = "router-0"
    cluster_name: str = "kvferry"
    tls: Membership | None = None


_UNNAMED = Identity()


async def serve(
    identity: Identity,
    config: RouterConfig,
    model: ModelConfig,
    tokenizer: Tokenizer,
    workers: Sequence[str] | Mapping[str, Member],
    jobs: JobsConfig | None = None,
) -> Serving:
    """A router over the workers at these addresses, both ports answering; with `jobs`, which names a url, durable jobs
    too. Raises ConfigError."""
    network = GrpcNetwork(identity.tls)
    incarnation = uuid.uuid4().hex
    pool = WorkerPool(workers, incarnation, config, network)
    router = Router(pool, config, incarnation)
    server = RouterServer(router, pool, tokenizer, model, config, identity=identity, jobs=jobs)
    await pool.start()
    try:
        await server.start()
    except BaseException:
        await pool.stop()
        raise
    return Serving(server, router, pool)


@dataclass(frozen=True, slots=True)
class Serving:
    """A router at work, from its ports down to its pool."""

    server: RouterServer
    router: Router
    pool: WorkerPool

    def status(self) -> router_pb2.GetStatusResponse:
        return self.server.status()

    def unheard(self) -> list[str]:
        """Addresses of workers that are not there."""
        return [worker.address for worker in self.pool.workers if not worker.reachable]

    def require_pair(self) -> None:
        """Raises LayoutMismatchError when no two of the workers that answer can exchange KV."""
        with contextlib.suppress(UnavailableError):
            self.pool.whole_role()

    async def stop(self) -> None:
        """Answers that are not over end with an error event, after which they may be asked for again."""
        self.pool.refuse()
        await self.server.stop()
        await self.router.stop()
        await self.pool.stop()


class Pool(Protocol):
    def ready(self) -> tuple[bool, str]: ...

    def status(self) -> Sequence[router_pb2.WorkerStatus]: ...

    @property
    def num_indexed_blocks(self) -> int: ...


class RouterServer:
    def __init__(
        self,
        router: Router,
        pool: Pool,
        tokenizer: Tokenizer,
        model: ModelConfig,
        config: RouterConfig,
        *,
        identity: Identity = _UNNAMED,
        network: Network | None = None,
        jobs: JobsConfig | None = None,
    ) -> None:
        self._router = router
        self._pool = pool
        self._config = config
        self._identity = identity
        self._network = network or GrpcNetwork(identity.tls)
        self.text = _text_service(router, tokenizer, model)
        self._keys = KeyRing(config.api_keys) if config.api_keys else None
        self.text.metrics.watch(router, pool.status)
        self._jobs = JobDesk(jobs, self.text, router.incarnation, self._keys) if jobs else None
        # Of this process and of its cluster, for status; whoever starts them tells.
        self.start_phases: Phases = {}
        self.cluster_start_phases: Phases = {}
        # The bound ports, after start.
        self.http_port = config.http_port
        self.grpc_port = config.grpc_port
        self._http: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._grpc: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Bind both ports. ConfigError naming the key when one is in use."""
        await self._start_grpc()
        try:
            await self._start_http()
        except BaseException:
            await self.stop()
            raise
        if self._jobs:
            self._jobs.start()

    async def stop(self) -> None:
        """Close both ports; requests still running after a short grace are aborted, jobs left to other routers."""
        if self._jobs:
            await self._jobs.stop()
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._grpc is not None:
            await self._grpc.stop(_GRACE_S)
        if self._jobs:
            await self._jobs.close()
        self._http = self._serving = self._grpc = None

    def status(self) -> router_pb2.GetStatusResponse:
        ready, reason = self._pool.ready()
        scheme = "https" if self._identity.tls else "http"
        load = router_pb2.RouterStatus(
            name=self._identity.name,
            incarnation=self._router.incarnation,
            pid=os.getpid(),
            num_queued=self._router.num_queued,
            num_running=self._router.num_running,
            policy=self._config.policy,
            num_indexed_blocks=self._pool.num_indexed_blocks,
            start_phases=phases_to_proto(self.start_phases),
        )
        return router_pb2.GetStatusResponse(
            name=self._identity.cluster_name,
            ready=ready,
            http_endpoint=f"{scheme}://{_address(self._config.host, self.http_port)}",
            grpc_endpoint=_address(self._config.host, self.grpc_port),
            served_model_names=self.text.served_model_names,
            routers=[load],
            workers=self._pool.status(),
            start_phases=phases_to_proto(self.cluster_start_phases),
            reason=reason,
        )

    async def _start_grpc(self) -> None:
        interceptors = [KeyInterceptor(self._keys)] if self._keys else ()
        server = self._network.server(interceptors, self._config.max_body_bytes, for_clients=True)
        service = RouterService(self.text, self.status, self._router.audit, self._router.traces)
        router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
        if self._jobs:
            self._jobs.open_to_grpc(server)
        host, port = self._config.host, self._config.grpc_port
        try:
            address = await self._network.listen(server, f"[{host}]" if ":" in host else host, port)
        except ConfigError as error:
            raise _in_use("grpc_port", host, port, "in use, or no address of this machine") from error
        self._grpc = server
        self.grpc_port = int(address.rpartition(":")[2])

    async def _start_http(self) -> None:
        listener = listen(self._config.host, self._config.http_port)
        self.http_port = listener.getsockname()[1]
        app = build_app(self.text, self._pool, self._config, self._keys)
        add_ui_routes(app, self.status, self._router.traces)
        if self._jobs:
            self._jobs.open_to_http(app)
        self._http = server_of(app, self._config.body_timeout_s, self._identity.tls)
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        answering = asyncio.create_task(self._http.answering.wait())
        await asyncio.wait({self._serving, answering}, return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        if self._serving.done():
            self._serving.result()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that embeds the server."""
        yield


def server_of(app: ASGIApp, timeout_s: float, tls: Membership | None = None) -> _Server:
    """`timeout_s`: what a client gets to send the head of a request, and to read on."""
    return _Server(
        uvicorn.Config(
            app,
            ssl_context_factory=(lambda *_: rotating_context(tls.files)) if tls else None,
            http=cast(Any, functools.partial(PatientProtocol, timeout_s=timeout_s)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            # Nobody here asks for the client's address.
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


def _text_service(router: Router, tokenizer: Tokenizer, model: ModelConfig) -> TextService:
    path = resolve_model(model.model)
    architecture = read_architecture(path)
    names = model.served_model_name or (default_served_name(model.model, path),)
    return TextService(router, tokenizer, names, _max_model_len(model, architecture), architecture.vocab_size)


def _max_model_len(model: ModelConfig, architecture: ArchitectureConfig) -> int:
    limit = architecture.max_position_embeddings
    if model.max_model_len is not None and model.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {model.max_model_len}; the model knows {limit} positions: lower it to {limit}",
            param="max_model_len",
        )
    return model.max_model_len or limit


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise _in_use("http_port", host, port, os.strerror(error.errno or 0)) from error


def _in_use(key: str, host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        f"router.{key}: cannot listen on {_address(host, port)} ({reason}); free it, choose another, or 0 for any",
        param=f"router.{key}",
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
