"""The bodies of kvferry's processes. launch.py makes Ray actors of them; they know nothing of Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config import ClusterConfig, RouterReplica
from cluster.logs import write_all_output_to
from cluster.state import StateFolder
from router.config import JobsConfig
from router.roles import Member
from workers.allocator import keep_freed_memory
from workers.config import Role, WorkerConfig
from workers.errors import AbortedError, KVFerryError
from workers.garbage import spare_what_is_loaded
from workers.rpc import close_quietly
from workers.startup import Phases, StartUp, process_began_unix_s
from workers.telemetry_config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from cluster.worker_port import MetricsPort
    from router.server import Serving
    from workers.tokenizer import Tokenizer
    from workers.worker import Worker

logger = logging.getLogger(__name__)

_POLL_S = 0.05
# On every address of its node: what others reach is the node's own.
_EVERYWHERE = ("0.0.0.0", "[::]")
# Between two looks of the cluster's process at every one of its own.
BEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Described:
    """What a process tells a controller that did not start it."""

    # As which it runs.
    config: WorkerConfig | RouterReplica
    # A worker's address, or a router's endpoints; None: it does not serve yet.
    where: Any
    # Of the controller that it heard last: its number, and how long ago that was.
    controller: int
    silence_s: float


class Process(ABC):
    """What every one does: log to its own file, and end itself when its cluster's process is heard of no more."""

    def __init__(self, name: str, telemetry: TelemetryConfig, log: Path, orphan_s: float | None) -> None:
        self._log = log
        # None: somebody else ends orphans.
        self._orphan_s = orphan_s
        self._end: asyncio.TimerHandle | None = None
        # Controllers are numbered: a later one has taken over from all before.
        self._controller, self._heard_s = 0, time.monotonic()
        self._startup = StartUp(process_began_unix_s())
        self._startup.end("process")
        write_all_output_to(log, name, telemetry.log_format)

    async def beat(self, controller: int) -> int:
        """The cluster's process is there. How many requests this one has. Raises AbortedError when that is not its
        process any more."""
        if controller < self._controller:
            raise AbortedError("another `kvferry up` has taken over this cluster")
        self._controller, self._heard_s = controller, time.monotonic()
        if self._end:
            self._end.cancel()
        if self._orphan_s is not None:
            self._end = asyncio.get_running_loop().call_later(self._orphan_s, self._end_orphaned)
        return self._num_requests()

    async def describe(self) -> Described:
        config, where = self._as_it_is()
        return Described(config, where, self._controller, time.monotonic() - self._heard_s)

    @abstractmethod
    def _num_requests(self) -> int: ...

    @abstractmethod
    def _as_it_is(self) -> tuple[WorkerConfig | RouterReplica, Any]: ...

    def _end_orphaned(self) -> None:
        logger.error("nothing heard of the cluster's process for %s s: ending", self._orphan_s)
        os._exit(1)


class WorkerProcess(Process):
    """One worker, kept on its cores."""

    def __init__(
        self, config: WorkerConfig, log: Path, orphan_s: float | None, node_address: Callable[[], str] | None = None
    ) -> None:
        """`node_address`: where other nodes reach this one, asked here; None: nobody else's node is concerned."""
        super().__init__(config.name, config.telemetry, log, orphan_s)
        self._config = config.model_copy(update={"host": node_address()}) if node_address else config
        self._worker: Worker | None = None
        self._gpu_watch: asyncio.Task[None] | None = None
        self._metrics: MetricsPort | None = None
        _keep_to_cores(config)
        keep_freed_memory()

    async def start(self) -> str:
        """Load the model; the address of the worker's gRPC server. Raises KVFerryError."""
        with _one_line_errors(self._config.name, self._log):
            import workers.engine.model_runner  # noqa: F401  (loads torch)
            from workers.worker import Worker

            self._startup.end("imports")
            worker = Worker(self._config, startup=self._startup)
            address = await worker.start()
            self._worker = worker  # Before that there is nothing to stop.
            self._observe(worker)
            spare_what_is_loaded()
            return address

    async def set_role(self, role: Role) -> None:
        assert self._worker is not None, "start comes first"
        self._worker.set_role(role)

    async def stop(self) -> None:
        await close_quietly(self._gpu_watch)
        if self._metrics:
            await self._metrics.close()
        if self._worker:
            await self._worker.stop()

    def _num_requests(self) -> int:
        return self._worker.num_requests if self._worker else 0

    def _as_it_is(self) -> tuple[WorkerConfig, str | None]:
        return (self._worker.config, self._worker.address) if self._worker else (self._config, None)

    def _observe(self, worker: Worker) -> None:
        if self._config.device == "cuda":
            from cluster.gpu_watch import watch_gpus

            self._gpu_watch = asyncio.create_task(watch_gpus(worker))
        if self._config.telemetry.metrics_port is not None:
            from cluster.worker_port import MetricsPort

            self._metrics = MetricsPort(worker, self._config.telemetry.metrics_port)


class RouterProcess(Process):
    """The router and its two APIs."""

    def __init__(
        self, replica: RouterReplica, log: Path, orphan_s: float | None, node_address: Callable[[], str] | None = None
    ) -> None:
        """`node_address`: as a worker's."""
        super().__init__(replica.name, replica.cluster.telemetry, log, orphan_s)
        self._node_address = node_address
        self._serving = asyncio.Event()
        self._name = replica.name
        self._replica = replica
        self._config = replica.cluster
        self._tokenizer: Tokenizer | None = None
        self._server: Serving | None = None
        self._tracing: TracerProvider | None = None

    async def prepare(self) -> None:
        """What needs no worker: imports and the tokenizer. Raises KVFerryError."""
        with _one_line_errors(self._name, self._log):
            import router.server  # noqa: F401  (slow to load)
            from workers.models.resolve import resolve_model
            from workers.tokenizer import load_tokenizer

            self._startup.end("imports")
            self._tokenizer = load_tokenizer(resolve_model(self._config.model))
            self._startup.end("tokenizer")

    async def start(self, workers: dict[str, Member], cluster_phases: Phases) -> tuple[str, str]:
        """The HTTP and the gRPC endpoint, both answering. `workers`: by their addresses; `cluster_phases`: how the
        cluster started, if it has. Raises KVFerryError."""
        if self._tokenizer is None:
            await self.prepare()
        assert self._tokenizer is not None
        self._startup.end("workers")
        with _one_line_errors(self._name, self._log):
            from router.server import Identity, serve
            from workers.tls import membership

            config = self._config
            identity = Identity(self._name, config.name, membership(config.security, config.name))
            jobs = _kept_jobs(config)
            self._server = await serve(identity, config.router, config, self._tokenizer, workers, jobs)
            self._observe(self._server)
            self._startup.end("serve")
            self._server.server.start_phases = self._startup.phases
            self._server.server.cluster_start_phases = cluster_phases
            spare_what_is_loaded()
            self._serving.set()
            return self._endpoints(self._server)

    async def set_workers(self, members: dict[str, Member]) -> None:
        """These are the cluster's, by their addresses, and no others."""
        await self._serving.wait()
        assert self._server is not None
        await self._server.pool.set_workers(members)

    async def ready(self, cluster_phases: Phases) -> None:
        """The whole cluster is, after these. Raises LayoutMismatchError when no two workers can exchange KV."""
        assert self._server is not None, "start comes first"
        self._server.require_pair()
        self._server.server.cluster_start_phases = cluster_phases

    async def unheard(self, within_s: float) -> list[str]:
        """Addresses of workers from which this router has not heard yet, after so long."""
        assert self._server is not None, "start comes first"
        give_up_s = asyncio.get_running_loop().time() + within_s
        while found := self._server.unheard():
            if asyncio.get_running_loop().time() > give_up_s:
                break
            await asyncio.sleep(_POLL_S)
        return found

    async def stop(self) -> None:
        if self._server:
            await self._server.stop()
        if self._tracing:
            await asyncio.to_thread(self._tracing.shutdown)

    def _observe(self, serving: Serving) -> None:
        telemetry, text = self._config.telemetry, serving.server.text
        if telemetry.vllm_metrics:
            text.metrics.add_vllm_names()
        if telemetry.otlp_endpoint:
            from cluster.otlp import tracer_provider
            from router.spans import Spans

            self._tracing = tracer_provider(telemetry.otlp_endpoint, self._name, self._config.name)
            spans = Spans(self._tracing.get_tracer("kvferry"), text.served_model_names[0])
            serving.router.traces.on_end = spans.tell

    def _num_requests(self) -> int:
        return self._server.router.num_running + self._server.router.num_queued if self._server else 0

    def _as_it_is(self) -> tuple[RouterReplica, tuple[str, str] | None]:
        return self._replica, self._endpoints(self._server) if self._server else None

    def _endpoints(self, serving: Serving) -> tuple[str, str]:
        status = serving.status()
        return self._from_afar(status.http_endpoint), self._from_afar(status.grpc_endpoint)

    def _from_afar(self, endpoint: str) -> str:
        """The endpoint as other nodes reach it."""
        if self._node_address:
            for host in _EVERYWHERE:
                endpoint = endpoint.replace(f"{host}:", f"{self._node_address()}:")
        return endpoint


def _kept_jobs(config: ClusterConfig) -> JobsConfig:
    """Where nothing is said, in the cluster's folder, which outlives the cluster."""
    if config.jobs.url is not None:
        return config.jobs
    path = StateFolder(config.name).path / "jobs.sqlite"
    return config.jobs.model_copy(update={"url": f"sqlite:///{path}"})


def _keep_to_cores(config: WorkerConfig) -> None:
    """Pin every thread there is; those to come inherit it. torch reads the thread counts when it is loaded."""
    if isinstance(config.cpu_affinity, tuple):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), config.cpu_affinity)
    if config.num_threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(config.num_threads)


@contextmanager
def _one_line_errors(name: str, log: Path) -> Iterator[None]:
    try:
        yield
    except KVFerryError:
        raise
    except Exception as exc:
        logger.exception("%s failed", name)
        reason = " ".join(str(exc).split()) or "no reason given"
        raise KVFerryError(f"{name} failed to start: {type(exc).__name__}: {reason[:200]}; see {log}") from None
