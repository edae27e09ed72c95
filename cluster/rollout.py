"""Rollout: the workers that a cluster has become those that its roster wants, and no request notices.

A worker that is to go, to be started anew or to change its role drains first: routers send it nothing new. What it has
may end within scaling.drain_timeout_s; after that a worker that leaves or starts anew gives it up, and streams go on at
others. Workers leave together. All else happens to one worker at a time, and only while everybody else is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.controller import Controller
from cluster.roster import Roster
from workers.config import WorkerConfig
from workers.errors import KVFerryError

logger = logging.getLogger(__name__)

# Of looks in a row at which a worker has nothing: what routers had sent before they knew has come by then.
_IDLE_LOOKS = 2


class Members(Protocol):
    """The cluster's workers."""

    def config(self, name: str) -> WorkerConfig:
        """As which it was begun, or has become."""

    def tell(self, draining: Collection[str], without: Collection[str]) -> bool:
        """Let the routers know all workers that have served, `without` some, some of them as draining. Whether each
        router that serves knows it by now."""

    def num_requests(self, name: str) -> int:
        """That this worker had at the last look."""

    def become(self, config: WorkerConfig) -> None:
        """The worker of that name has that role from now on. Raises KVFerryError when it does not take it up."""


@dataclass(slots=True)
class _Change:
    kind: Literal["leave", "restart", "flip"]
    # When a drain ends at the latest.
    until_s: float
    num_idle_looks: int = 0
    # Drained, and what follows is under way.
    acting: bool = False


class Rollout:
    """`look` again and again, after the controller's."""

    def __init__(
        self,
        controller: Controller,
        roster: Roster,
        members: Members,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Whoever the controller watches now is there; whoever else the roster wants is begun."""
        self._controller = controller
        self._roster = roster
        self._members = members
        self._say = say
        self._clock = clock
        # Of every worker that is there, or is about to be: how often it was started anew because somebody asked.
        self._num_restarts = {name: roster.num_restarts[name] for name in roster.workers.keys() & controller.names}
        self._changes: dict[str, _Change] = {}
        self._told = True

    @property
    def settled(self) -> bool:
        """All is as the roster wants it, everybody answers, and routers know."""
        there, wanted = self._num_restarts.keys(), self._roster.workers.keys()
        return self._told and not self._changes and there == wanted and all(self._is_right(name) for name in wanted)

    @property
    def under_way(self) -> dict[str, str]:
        """What happens to whom."""
        starting = {name: "starts" for name in self._num_restarts if not self._controller.serves(name)}
        return starting | {name: self._described(name, change) for name, change in self._changes.items()}

    def look(self) -> None:
        self._begin_those_missing()
        for name in list(self._num_restarts.keys() - self._roster.workers.keys() - self._changes.keys()):
            self._controller.expect(name, leaving=True)
            self._begin_change(name, "leave")
        if not self._changes and all(map(self._controller.serves, self._num_restarts)):
            self._begin_next_change()
        for name, change in list(self._changes.items()):
            self._advance(name, change)
        leaving = {name for name, change in self._changes.items() if change.kind == "leave" and change.acting}
        self._told = self._members.tell(self._changes.keys() - leaving, leaving)

    def _begin_those_missing(self) -> None:
        for name in self._roster.workers:
            if name not in self._num_restarts:
                self._num_restarts[name] = self._roster.num_restarts[name]
                self._controller.begin(name)

    def _begin_next_change(self) -> None:
        for name, wanted in self._roster.workers.items():
            if self._needs_restart(name):
                return self._begin_change(name, "restart")
            if self._members.config(name) != wanted:
                return self._begin_change(name, "flip")
        return None

    def _is_right(self, name: str) -> bool:
        if not self._controller.serves(name):
            return False
        return self._members.config(name) == self._roster.workers[name] and not self._needs_restart(name)

    def _needs_restart(self, name: str) -> bool:
        """Rather than a call that changes its role, if anything."""
        config, wanted = self._members.config(name), self._roster.workers[name]
        kept = {"role": config.role, "prefill_quantization": config.prefill_quantization}
        was_asked = self._num_restarts[name] != self._roster.num_restarts[name]
        return was_asked or wanted.model_copy(update=kept) != config

    def _begin_change(self, name: str, kind: Literal["leave", "restart", "flip"]) -> None:
        self._changes[name] = _Change(kind, self._clock() + self._roster.config.scaling.drain_timeout_s)
        self._say(f"{name} drains: {self._purpose(name, kind)}")

    def _purpose(self, name: str, kind: str) -> str:
        return {"leave": "it leaves", "restart": "it is started anew"}.get(kind) or (
            f"it becomes a {self._roster.workers[name].role} worker"
        )

    def _advance(self, name: str, change: _Change) -> None:
        if change.acting:
            self._finish(name, change)
        elif change.kind == "leave" and name in self._roster.workers:
            self._controller.expect(name, leaving=False)  # It is wanted again.
            del self._changes[name]
        elif not self._controller.serves(name):
            self._lost(name, change)
        elif self._told and self._may_go(name) and self._drained(name, change):
            self._act(name, change)

    def _may_go(self, name: str) -> bool:
        """Whether somebody has taken its place, where somebody is to."""
        role = self._members.config(name).role
        return all(self._controller.serves(other) for other, w in self._roster.workers.items() if w.role == role)

    def _drained(self, name: str, change: _Change) -> bool:
        change.num_idle_looks = 0 if self._members.num_requests(name) else change.num_idle_looks + 1
        return change.num_idle_looks >= _IDLE_LOOKS or self._clock() >= change.until_s

    def _act(self, name: str, change: _Change) -> None:
        left = self._members.num_requests(name)
        if left and change.kind != "flip":
            self._say(f"{name} still has {left} requests: they go on at others")
        if change.kind == "restart":
            self._num_restarts[name] = self._roster.num_restarts[name]
            self._controller.restart(name)
        elif change.kind == "flip":
            try:
                self._members.become(self._roster.workers[name])
            except KVFerryError as error:
                logger.warning("%s does not change its role: %s", name, error.message)
                return
        change.acting = True

    def _finish(self, name: str, change: _Change) -> None:
        if change.kind != "leave":
            if self._controller.serves(name):
                del self._changes[name]
                self._say(f"{name} {self._outcome(name, change.kind)}")
        elif self._told:
            self._controller.leave(name)
            del self._num_restarts[name], self._changes[name]
            self._say(f"{name} has left")

    def _lost(self, name: str, change: _Change) -> None:
        """It does not answer while it drains. What is still to be done with it shows when it does."""
        if change.kind == "leave":
            change.acting = True
        else:
            del self._changes[name]

    def _outcome(self, name: str, kind: str) -> str:
        return "has been started anew" if kind == "restart" else f"is a {self._members.config(name).role} worker now"

    def _described(self, name: str, change: _Change) -> str:
        return self._purpose(name, change.kind) if change.acting else f"drains: {self._purpose(name, change.kind)}"
