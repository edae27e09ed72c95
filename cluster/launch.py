"""From a ClusterConfig to running processes: with ray_session.py and ray_calls.py all that imports ray.

Ray starts the processes, tells when one died, and ends them. It never carries a token or a KV byte.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from cluster.actors import BEAT_S, RouterProcess, WorkerProcess
from cluster.adoption import Left, left_behind
from cluster.config import ClusterConfig, RouterReplica, router_replicas
from cluster.control import Control, Events, listening
from cluster.controller import Controller, Health
from cluster.directory import Directory
from cluster.endpoints import Endpoints
from cluster.gpus import gpu_share
from cluster.placement import actor_options
from cluster.ray_calls import Calls, has_ended, judge_beat, node_address, wait_for
from cluster.ray_session import STOPPED, RaySession
from cluster.rollout import Rollout
from cluster.roster import Roster
from cluster.worker_configs import worker_configs
from workers.config import PlacementConfig, WorkerConfig
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
_ORPHAN_S = 300.0


class Cluster:
    """The actors of one cluster, and the private Ray under them unless the config names one to join."""

    def __init__(self, config: ClusterConfig, logs: Path, stopped: Callable[[], bool] = lambda: False) -> None:
        self._config = config
        self.roster = Roster(config, worker_configs(config))
        self._routers = {replica.name: replica for replica in router_replicas(config)}
        self._logs = logs
        # Asked while waiting: true makes start() raise AbortedError and wait() return.
        self._stopped = stopped
        self._calls = Calls(stopped, self.log, self._be_heard)
        self._actors: dict[str, Any] = {}
        # Calls of those that are being started.
        self._starting: dict[str, Any] = {}
        self._directory = Directory()
        # Calls that have not been answered yet, and what the last one told.
        self._beats: dict[str, Any] = {}
        self._beat_s = -math.inf
        self._num_requests: dict[str, int] = {}
        # What starting all at once took.
        self._start_s = 0.0
        self._startup = StartUp(process_began_unix_s())
        self._num_begun: Counter[str] = Counter()
        # Of those that this cluster has had.
        self._controller = 1
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
        if self._ray.found and (left := left_behind(self._ray.found, self._config.name)):
            say(f"taking over {', '.join(sorted(left.processes))}")
            return self._adopt(left)
        began_s = time.monotonic()
        for worker in self.roster.workers.values():
            self._actors[worker.name] = self._worker_actor(worker)
        for name in self._routers:
            self._actors[name] = self._router_actor(name)
        say(f"loading {', '.join(self.roster.workers)}")
        endpoints = self._wire()
        self._start_s = time.monotonic() - began_s
        return endpoints

    def _adopt(self, left: Left) -> Endpoints:
        self._controller = left.controller
        for name, (actor, told) in left.processes.items():
            self._actors[name] = actor
            if isinstance(told.config, RouterReplica):
                self._routers[name] = told.config.at_urls(told.where)
            else:
                self._directory.addresses[name], self._directory.configs[name] = told.where, told.config
        wanted = self.roster.replicas()
        self.roster = Roster(self._config, list(self._directory.configs.values()))
        # What died while nobody looked is wanted still; what was scaled since stays.
        self.roster.scale({role: max(count, wanted[role]) for role, count in self.roster.replicas().items()})
        endpoints = left.endpoints()
        return Endpoints.of([endpoints[name] for name in self._routers if name in endpoints])

    def wait(self, say: Callable[[str], None], socket: Path) -> None:
        """Until stopped, replacing what dies and carrying out what is asked for at `socket`."""
        events = Events(say)
        controller = Controller(self, events, max(_LEAST_START_S, _SLOW_START * self._start_s))
        for name in self._routers.keys() - controller.names:
            controller.begin(name)
        rollout = Rollout(controller, self.roster, self, events)
        control = Control(self.roster, rollout, events)
        with listening(control, socket):
            while not self._stopped():
                with self._ray.required():
                    controller.look()
                    rollout.look()
                self._pause(BEAT_S, control.carry_out)

    # controller.Processes: health, begin, end, log.

    def health(self) -> Mapping[str, Health]:
        self._beat()
        wait_for(self._beats, _BEAT_TIMEOUT_S)
        try:
            return {name: self._judge(name) for name in self._actors}
        except AbortedError:
            self._actors.clear()  # They are another's.
            raise

    def begin(self, name: str) -> None:
        self._num_begun[name] += 1
        try:
            self._actors[name], self._starting[name] = self._started(name)
        except (ValueError, ray.exceptions.RayError) as exc:
            raise KVFerryError(f"Ray starts no {name}: {exc}") from exc

    def end(self, name: str) -> None:
        self._starting.pop(name, None)
        self._beats.pop(name, None)
        self._num_requests.pop(name, None)
        self._directory.lose_router(name)
        if name not in self.roster.workers:
            self._directory.forget(name)
        if actor := self._actors.pop(name, None):
            ray.kill(actor)

    def log(self, name: str) -> Path:
        """Each process has its own: what one said before it died is not overwritten."""
        again = self._num_begun[name]
        return self._logs / (f"{name}.{again}.log" if again else f"{name}.log")

    # rollout.Members: config, tell, num_requests, become.

    def config(self, name: str) -> WorkerConfig:
        return self._directory.configs[name]

    def tell(self, draining: Collection[str], without: Collection[str]) -> bool:
        self._directory.mark(draining, without)
        serving = {name: self._actors[name] for name in self._routers if name in self._actors.keys() - self._starting}
        return self._directory.tell(serving)

    def num_requests(self, name: str) -> int:
        return self._num_requests.get(name, 0)

    def become(self, config: WorkerConfig) -> None:
        call = self._actors[config.name].set_role.remote(config.role)
        wait_for({config.name: call}, _STOP_TIMEOUT_S)
        if not has_ended(call):
            raise KVFerryError(f"no answer within {_STOP_TIMEOUT_S:g} s")
        self._calls.result(config.name, call)
        self._directory.configs[config.name] = config

    def stop(self) -> None:
        """End every process; harmless when done already."""
        try:
            if self._actors and self._ray.there:
                self._stop_actors()
        finally:
            self._actors.clear()
            self._ray.stop()

    def _stop_actors(self) -> None:
        wait_for({name: actor.stop.remote() for name, actor in self._actors.items()}, _STOP_TIMEOUT_S)
        for actor in self._actors.values():
            ray.kill(actor)

    def _pause(self, duration_s: float, meanwhile: Callable[[], None]) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s and not self._stopped():
            meanwhile()
            time.sleep(_POLL_S)

    def _started(self, name: str) -> tuple[Any, Any]:
        """The actor, and the call that starts it: at its former address, unless it may be on another node now."""
        if name in self._routers:
            actor = self._router_actor(name)
            return actor, actor.start.remote(self._directory.members(), self._startup.phases)
        worker = self.roster.workers[name]
        former = self._directory.addresses.get(name)
        port = int(former.rpartition(":")[2]) if former and self._config.address is None else 0
        actor = self._worker_actor(worker, port)
        return actor, actor.start.remote()

    def _worker_actor(self, worker: WorkerConfig, port: int = 0) -> Any:
        self._directory.configs[worker.name] = worker
        placement = self._config.role(worker.role)
        num_gpus = 0.0
        if worker.device == "cuda" and "GPU" not in placement.resources:
            found = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
            num_gpus = gpu_share(worker, list(self.roster.workers.values()), found)
        config = worker.model_copy(update={"port": port})
        return self._actor(WorkerProcess, worker.name, config, actor_options(placement, num_gpus))

    def _router_actor(self, name: str) -> Any:
        placement: PlacementConfig = self._config.router
        return self._actor(RouterProcess, name, self._routers[name], actor_options(placement, 0))

    def _actor(self, process: type, name: str, config: object, options: dict[str, Any]) -> Any:
        actor: Any = ray.remote(process).options(
            name=f"{self._config.name}/{name}", lifetime="detached", max_restarts=0, **options
        )
        joined = self._config.address is not None
        orphan_s, address_of = (_ORPHAN_S, node_address) if joined else (None, None)
        return actor.remote(config, self.log(name), orphan_s, address_of)

    def _wire(self) -> Endpoints:
        """Load everything at once, then tell the routers where their workers are."""
        loading = {name: self._actors[name].start.remote() for name in self.roster.workers}
        loaded = self._all(loading | {name: self._actors[name].prepare.remote() for name in self._routers})
        self._startup.end("load")
        self._directory.addresses = {name: loaded[name] for name in loading}
        members = self._directory.members()
        endpoints = self._all({name: self._actors[name].start.remote(members, {}) for name in self._routers})
        # Ready is who can answer.
        hearing = self._all({name: self._actors[name].unheard.remote(_UNHEARD_S) for name in self._routers})
        for router, unheard in hearing.items():
            if silent := ", ".join(name for name, at in self._directory.addresses.items() if at in unheard):
                raise KVFerryError(f"{router} cannot reach {silent} within {_UNHEARD_S:g} s; see {self.log(router)}")
        self._startup.end("serve")
        self._all({name: self._actors[name].ready.remote(self._startup.phases) for name in self._routers})
        # Where it is now, another can take its place.
        for name, urls in endpoints.items():
            self._routers[name] = self._routers[name].at_urls(urls)
        return Endpoints.of([endpoints[name] for name in self._routers])

    def _all(self, calls: dict[str, Any]) -> dict[str, Any]:
        return self._calls.all(calls, self._config.start_timeout_s)

    def _beat(self) -> None:
        for name in self._actors.keys() - self._beats.keys():
            self._beats[name] = self._actors[name].beat.remote(self._controller)

    def _be_heard(self) -> None:
        """Who finds them while they start learns of it that they are somebody's."""
        if time.monotonic() - self._beat_s >= BEAT_S:
            self._beat_s = time.monotonic()
            self._beats = {name: call for name, call in self._beats.items() if not has_ended(call)}
            self._beat()

    def _judge(self, name: str) -> Health:
        if name in self._starting:
            return self._judge_start(name)
        health, told = judge_beat(self._beats[name])
        if isinstance(told, ray.exceptions.RayError):
            # Whatever it is, it is this one's trouble: asked again, and ended if it stays silent.
            logger.warning("%s: no beat: %s", name, told)
            del self._beats[name]
        elif health is Health.ANSWERS:
            self._num_requests[name] = told
            del self._beats[name]
        return health

    def _judge_start(self, name: str) -> Health:
        if not has_ended(self._starting[name]):
            return Health.STARTING
        try:
            told = self._calls.result(name, self._starting.pop(name))
        except KVFerryError as error:
            logger.warning("%s", error.message)
            return Health.DEAD
        if name in self.roster.workers:
            self._directory.addresses[name] = told
        self._ray.watch_descendants()
        return Health.ANSWERS
