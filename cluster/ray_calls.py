"""Calls of Ray actors: waiting for many of them, and what their failures mean."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from cluster.actors import Described
from cluster.controller import Health
from cluster.ray_session import STOPPED
from workers.errors import AbortedError, KVFerryError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Calls:
    """Of the processes of one cluster. A call is Ray's reference to its result."""

    # Raises KVFerryError when true meanwhile.
    stopped: Callable[[], bool]
    # Where the process of this name writes.
    log: Callable[[str], Path]
    # Called again and again while others are waited for.
    meanwhile: Callable[[], None]

    def all(self, calls: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The results by name, or the first error as soon as it is known; one of its own after start_timeout_s."""
        pending = {call: name for name, call in calls.items()}
        give_up_s = time.monotonic() + limit_s
        results: dict[str, Any] = {}
        while pending:
            if self.stopped():
                raise AbortedError(STOPPED)
            if time.monotonic() > give_up_s:
                names, log = ", ".join(pending.values()), self.log(next(iter(pending.values())))
                raise KVFerryError(
                    f"{names}: not started within start_timeout_s, {limit_s:g} s; raise it, or see {log}"
                )
            self.meanwhile()
            for call in ray.wait(list(pending), timeout=_POLL_S)[0]:
                name = pending.pop(call)
                results[name] = self.result(name, call)
        return results

    def result(self, name: str, call: Any) -> Any:
        """Of a call that has ended. Raises KVFerryError."""
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as exc:
            cause = exc.cause
            raise cause if isinstance(cause, KVFerryError) else KVFerryError(f"{name} failed: {cause}") from None
        except ray.exceptions.RayError:
            raise KVFerryError(f"{name} died while it started; see {self.log(name)}") from None


def wait_for(calls: Mapping[str, Any], timeout_s: float) -> None:
    """Until all have ended, however they have."""
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)


def has_ended(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])


def has_succeeded(call: Any) -> bool:
    """Of one that has ended."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as exc:
        logger.warning("%s", exc)
        return False
    return True


def judge_beat(call: Any) -> tuple[Health, Any]:
    """What a beat tells of its process, and its result where it answered. Silent without an error: it may yet. Raises
    AbortedError when another controller has taken over."""
    try:
        return Health.ANSWERS, ray.get(call, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return Health.SILENT, None
    except ray.exceptions.ActorDiedError:
        return Health.DEAD, None
    except ray.exceptions.RayTaskError as exc:
        if isinstance(exc.cause, AbortedError):
            raise exc.cause from None
        return Health.SILENT, exc
    except ray.exceptions.RayError as exc:
        return Health.SILENT, exc


def found_actors(names: Sequence[str], timeout_s: float) -> dict[str, tuple[Any, Described | None]]:
    """Actors that another process has started, by the last part of their names, and what each tells of itself. None: it
    has not answered."""
    actors = {name.rpartition("/")[2]: ray.get_actor(name) for name in names}
    calls: dict[str, Any] = {name: actor.describe.remote() for name, actor in actors.items()}
    wait_for(calls, timeout_s)
    return {name: (actor, _described(name, calls[name])) for name, actor in actors.items()}


def end_all(actors: Sequence[Any], names: Sequence[str]) -> None:
    """Kill them, and wait for their names, some of `names`, to be free."""
    for actor in actors:
        ray.kill(actor)
    give_up_s = time.monotonic() + _END_S
    while len(set(ray.util.list_named_actors()) & set(names)) > len(names) - len(actors):
        if time.monotonic() > give_up_s:
            raise KVFerryError(f"actors of Ray have not ended within {_END_S:g} s")
        time.sleep(_POLL_S)


def _described(name: str, call: Any) -> Described | None:
    try:
        told: Described = ray.get(call, timeout=0)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as exc:
        logger.warning("%s does not say what it is: %s", name, exc)
        return None
    return told


def node_address() -> str:
    """Of the node on which this is called."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
