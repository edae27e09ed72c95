"""Controller: whoever should be there is. A process that died is started anew, where it was if that can be: whoever
answers there with another incarnation is a new peer to routers and clients. Who should be there is rollout.py's."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.errors import KVFerryError

logger = logging.getLogger(__name__)

# Between the death of a process that never answered and its replacement: doubled each time up to the most. One that did
# answer is replaced at once, however often it dies: requests wait for it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# One that is silent for this long is ended and replaced. Routers have long gone around it, and no work of ours keeps a
# process from answering for so long; one that wakes up before goes on where it was.
_SILENCE_S = 10.0


class Health(enum.Enum):
    STARTING = "starting"
    ANSWERS = "answers"
    SILENT = "silent"
    DEAD = "dead"


class Processes(Protocol):
    """What runs and dies, each by its name."""

    def health(self) -> Mapping[str, Health]:
        """Of every process that was begun and not ended; asking takes a bounded time."""

    def begin(self, name: str) -> None:
        """Start one, where it was if it was there before, and return at once. Raises KVFerryError."""

    def end(self, name: str) -> None:
        """Kill it. To end one that is dead is no error."""

    def log(self, name: str) -> Path:
        """Where the latest of this name wrote."""


@dataclass(slots=True)
class _Watched:
    began_s: float
    heard_s: float
    answered: bool = True
    # Deaths in a row before an answer.
    num_failed_starts: int = 0
    # When it is to be begun again; None while it runs.
    due_s: float | None = None
    health: Health = Health.ANSWERS
    # It is about to go: if it dies before, nobody follows.
    leaving: bool = False


class Controller:
    """`look` again and again; it never waits for a process to start. All of them are up when it is made."""

    def __init__(
        self,
        processes: Processes,
        say: Callable[[str], None],
        longest_start_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One that starts for longer than `longest_start_s` is ended and begun again."""
        self._processes = processes
        self._say = say
        self._longest_start_s = longest_start_s
        self._clock = clock
        self._watched = {name: _Watched(clock(), clock()) for name in processes.health()}

    @property
    def names(self) -> set[str]:
        """Of those that are watched, whether they run or are about to."""
        return set(self._watched)

    def serves(self, name: str) -> bool:
        watched = self._watched.get(name)
        return watched is not None and watched.due_s is None and watched.health is Health.ANSWERS

    def begin(self, name: str) -> None:
        """A new one, at the next look."""
        self._watched[name] = _Watched(self._clock(), self._clock(), due_s=self._clock())

    def restart(self, name: str) -> None:
        """It is ended, and begun anew at the next look."""
        self._processes.end(name)
        self.begin(name)

    def expect(self, name: str, *, leaving: bool) -> None:
        """One that is leaving is not begun anew when it dies, unless it is to stay after all."""
        watched = self._watched[name]
        watched.leaving = leaving
        if not leaving and watched.health is Health.DEAD and watched.due_s is None:
            self.begin(name)

    def leave(self, name: str) -> None:
        """It is ended, and watched no more."""
        del self._watched[name]
        self._processes.end(name)

    def look(self) -> None:
        for name, health in self._processes.health().items():
            self._watched[name].health = health
            self._judge(name, health, self._watched[name])
        for name, watched in self._watched.items():
            if watched.due_s is not None and watched.due_s <= self._clock():
                self._begin(name, watched)

    def _judge(self, name: str, health: Health, watched: _Watched) -> None:
        now_s = self._clock()
        match health:
            case Health.ANSWERS:
                watched.heard_s = now_s
                watched.answered = True
            case Health.STARTING:
                watched.heard_s = now_s
                if now_s - watched.began_s >= self._longest_start_s:
                    self._lose(name, watched, f"has not started within {self._longest_start_s:.0f} s")
            case Health.DEAD:
                self._lose(name, watched, "died")
            case Health.SILENT if now_s - watched.heard_s >= _SILENCE_S:
                self._lose(name, watched, f"has been silent for {_SILENCE_S:.0f} s")

    def _lose(self, name: str, watched: _Watched, how: str) -> None:
        now_s = self._clock()
        log = self._processes.log(name)
        self._processes.end(name)
        if watched.leaving:
            watched.health = Health.DEAD
            self._say(f"{name} {how}, and was to leave; see {log}")
            return
        if watched.answered:
            watched.num_failed_starts, pause_s, when = 0, 0.0, "now"
        else:
            pause_s = min(_FIRST_PAUSE_S * 2**watched.num_failed_starts, _LONGEST_PAUSE_S)
            watched.num_failed_starts, when = watched.num_failed_starts + 1, f"in {pause_s:g} s"
        watched.due_s = now_s + pause_s
        self._say(f"{name} {how}: it is started anew {when}; see {log}")

    def _begin(self, name: str, watched: _Watched) -> None:
        watched.due_s, watched.answered, watched.health = None, False, Health.STARTING
        watched.began_s = watched.heard_s = self._clock()
        try:
            self._processes.begin(name)
        except KVFerryError as error:
            logger.warning("%s cannot be started: %s", name, error.message)
            self._lose(name, watched, "could not be started")
