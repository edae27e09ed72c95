"""From a ClusterConfig to running processes: with ray_session.py the only module that imports ray.

Ray starts the processes, tells when one died, and ends them. It never carries a token or a KV byte.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from cluster.actors import BEAT_S, RouterProcess, WorkerProcess
from cluster.config import ClusterConfig, router_replicas, worker_configs
from cluster.controller import Controller, Health
from cluster.endpoints import Endpoints
from cluster.gpus import gpu_share
from cluster.placement import actor_options
from cluster.ray_session import STOPPED, RaySession
from workers.config import PlacementConfig, Role, WorkerConfig
from workers.errors import AbortedError, KVFerryError
from workers.startup import StartUp, process_began_unix_s

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_TIMEOUT_S = 5.0
# For a router to hear from workers that answered already.
_UNHEARD_S = 30.0
# One that does not answer delays the look at the others by this much; asked it has been, and is heard at a later look.
_BEAT_TIMEOUT_S = 0.1
# The longest start of one process: so many times what all took at first, when nothing was in the page cache.
_SLOW_START, _LEAST_START_S = 4, 60.0
# In a Ray that is not ours, nobody else ends the actors of a cluster whose process was killed.
_ORPHAN_S = 60.0


class Cluster:
    """The actors of one cluster, and the private Ray under them unless the config names one to join."""

    def __init__(self, config: ClusterConfig, logs: Path, stopped: Callable[[], bool] = lambda: False) -> None:
        self._config = config
        self._workers = worker_configs(config)
        self._routers = {replica.name: replica for replica in router_replicas(config)}
        self._logs = logs
        # Asked while waiting: true makes start() raise AbortedError and wait() return.
        self._stopped = stopped
        self._actors: dict[str, Any] = {}
        # Calls of those that are being started anew.
        self._starting: dict[str, Any] = {}
        # By worker, once it has told.
        self._addresses: dict[str, str] = {}
        # Calls that have not been answered yet.
        self._beats: dict[str, Any] = {}
        # What starting all at once took.
        self._start_s = 0.0
        self._startup = StartUp(process_began_unix_s())
        self._num_begun: Counter[str] = Counter()
        self._ray = RaySession(config.name, config.address, stopped)

    def start_ray(self, say: Callable[[str], None]) -> None:
        """The ground to stand on. Raises KVFerryError. Ray's own signal handlers may be in place afterwards."""
        self._startup.end("config")
        self._ray.start(say)
        self._startup.end("ray")

    def start(self, say: Callable[[str], None]) -> Endpoints:
        """Ready to answer when it returns. Raises KVFerryError; stop() then ends what is half-started."""
        if self._stopped():
            raise AbortedError(STOPPED)
        began_s = time.monotonic()
        self._start_actors()
        say(f"loading {', '.join(worker.name for worker in self._workers)}")
        endpoints = self._wire()
        self._start_s = time.monotonic() - began_s
        return endpoints

    def wait(self, say: Callable[[str], None]) -> None:
        """Until stopped, replacing what dies."""
        controller = Controller(self, say, max(_LEAST_START_S, _SLOW_START * self._start_s))
        while not self._stopped():
            with self._ray.required():
                controller.look()
            self._pause(BEAT_S)

    # controller.Processes: health, begin, end, log.

    def health(self) -> Mapping[str, Health]:
        for name, actor in self._actors.items():
            if name not in self._beats:
                self._beats[name] = actor.beat.remote()
        if self._beats:
            ray.wait(list(self._beats.values()), num_returns=len(self._beats), timeout=_BEAT_TIMEOUT_S)
        return {name: self._judge(name) for name in self._actors}

    def begin(self, name: str) -> None:
        self._num_begun[name] += 1
        try:
            self._actors[name], self._starting[name] = self._started_anew(name)
        except (ValueError, ray.exceptions.RayError) as exc:
            raise KVFerryError(f"Ray starts no {name}: {exc}") from exc

    def end(self, name: str) -> None:
        self._starting.pop(name, None)
        self._beats.pop(name, None)
        if actor := self._actors.pop(name, None):
            ray.kill(actor)

    def stop(self) -> None:
        """End every process; harmless when done already."""
        try:
            if self._actors and self._ray.there:
                self._stop_actors()
        finally:
            self._actors.clear()
            self._ray.stop()

    def _stop_actors(self) -> None:
        stops = [actor.stop.remote() for actor in self._actors.values()]
        ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
        for actor in self._actors.values():
            ray.kill(actor)

    def _pause(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s and not self._stopped():
            time.sleep(_POLL_S)

    def _start_actors(self) -> None:
        for worker in self._workers:
            self._actors[worker.name] = self._worker_actor(worker)
        for name in self._routers:
            self._actors[name] = self._router_actor(name)

    def _started_anew(self, name: str) -> tuple[Any, Any]:
        """The actor, and the call that starts it: at its former address, unless it may be on another node now."""
        if name in self._routers:
            actor = self._router_actor(name)
            return actor, actor.start.remote(self._roles(), self._startup.phases)
        worker = next(worker for worker in self._workers if worker.name == name)
        port = int(self._addresses[name].rpartition(":")[2]) if self._config.address is None else 0
        actor = self._worker_actor(worker.model_copy(update={"port": port}))
        return actor, actor.start.remote()

    def _worker_actor(self, worker: WorkerConfig) -> Any:
        placement = self._config.role(worker.role)
        num_gpus = 0.0
        if worker.device == "cuda" and "GPU" not in placement.resources:
            found = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
            num_gpus = gpu_share(worker, self._workers, found)
        return self._actor(WorkerProcess, worker.name, worker, actor_options(placement, num_gpus))

    def _router_actor(self, name: str) -> Any:
        placement: PlacementConfig = self._config.router
        return self._actor(RouterProcess, name, self._routers[name], actor_options(placement, 0))

    def _actor(self, process: type, name: str, config: object, options: dict[str, Any]) -> Any:
        actor: Any = ray.remote(process).options(
            name=f"{self._config.name}/{name}", lifetime="detached", max_restarts=0, **options
        )
        joined = self._config.address is not None
        orphan_s, node_address = (_ORPHAN_S, _node_address) if joined else (None, None)
        return actor.remote(config, self.log(name), orphan_s, node_address)

    def _wire(self) -> Endpoints:
        """Load everything at once, then tell the routers where their workers are."""
        loading = {worker.name: self._actors[worker.name].start.remote() for worker in self._workers}
        loaded = self._all(loading | {name: self._actors[name].prepare.remote() for name in self._routers})
        self._startup.end("load")
        self._addresses = {name: loaded[name] for name in loading}
        roles = self._roles()
        endpoints = self._all({name: self._actors[name].start.remote(roles, {}) for name in self._routers})
        # Ready is who can answer.
        hearing = self._all({name: self._actors[name].unheard.remote(_UNHEARD_S) for name in self._routers})
        for router, unheard in hearing.items():
            if silent := ", ".join(name for name, address in self._addresses.items() if address in unheard):
                raise KVFerryError(f"{router} cannot reach {silent} within {_UNHEARD_S:g} s; see {self.log(router)}")
        self._startup.end("serve")
        self._all({name: self._actors[name].ready.remote(self._startup.phases) for name in self._routers})
        # Where it is now, another can take its place.
        for name, urls in endpoints.items():
            self._routers[name] = self._routers[name].at_ports(*(int(url.rpartition(":")[2]) for url in urls))
        return Endpoints.of([endpoints[name] for name in self._routers])

    def _roles(self) -> dict[str, Role]:
        """Of the workers, by their addresses."""
        return {self._addresses[worker.name]: worker.role for worker in self._workers}

    def _all(self, calls: dict[str, Any]) -> dict[str, Any]:
        """The results by name, or the first error as soon as it is known; one of its own after start_timeout_s."""
        pending = {call: name for name, call in calls.items()}
        limit_s = self._config.start_timeout_s
        give_up_s = time.monotonic() + limit_s
        results: dict[str, Any] = {}
        while pending:
            if self._stopped():
                raise AbortedError(STOPPED)
            if time.monotonic() > give_up_s:
                names, log = ", ".join(pending.values()), self.log(next(iter(pending.values())))
                raise KVFerryError(
                    f"{names}: not started within start_timeout_s, {limit_s:g} s; raise it, or see {log}"
                )
            for call in ray.wait(list(pending), timeout=_POLL_S)[0]:
                name = pending.pop(call)
                results[name] = self._result(name, call)
        return results

    def _result(self, name: str, call: Any) -> Any:
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as exc:
            cause = exc.cause
            raise cause if isinstance(cause, KVFerryError) else KVFerryError(f"{name} failed: {cause}") from None
        except ray.exceptions.RayError:
            raise KVFerryError(f"{name} died while it started; see {self.log(name)}") from None

    def _judge(self, name: str) -> Health:
        if name in self._starting:
            return self._judge_start(name)
        try:
            ray.get(self._beats[name], timeout=0)
        except ray.exceptions.GetTimeoutError:
            return Health.SILENT
        except ray.exceptions.ActorDiedError:
            return Health.DEAD
        except ray.exceptions.RayError as exc:
            # Whatever it is, it is this one's trouble: asked again, and ended if it stays silent.
            logger.warning("%s: no beat: %s", name, exc)
            del self._beats[name]
            return Health.SILENT
        del self._beats[name]
        return Health.ANSWERS

    def _judge_start(self, name: str) -> Health:
        if not ray.wait([self._starting[name]], timeout=0)[0]:
            return Health.STARTING
        try:
            told = self._result(name, self._starting.pop(name))
        except KVFerryError as error:
            logger.warning("%s", error.message)
            return Health.DEAD
        if name in self._addresses:
            self._move(name, told)
        self._ray.watch_descendants()
        return Health.ANSWERS

    def _move(self, name: str, address: str) -> None:
        """One that starts now takes it up when it serves; one that dies is told all addresses when it starts anew."""
        former, self._addresses[name] = self._addresses[name], address
        if former != address:
            for router in self._routers.keys() & self._actors.keys():
                self._actors[router].move.remote(former, address)

    def log(self, name: str) -> Path:
        """Each process has its own: what one said before it died is not overwritten."""
        again = self._num_begun[name]
        return self._logs / (f"{name}.{again}.log" if again else f"{name}.log")


def _node_address() -> str:
    """Of the node on which this is called."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
