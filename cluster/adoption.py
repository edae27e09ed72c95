"""What a former `kvferry up` has left in a Ray that was joined, for the next one to take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.actors import Described
from cluster.config import RouterReplica
from cluster.ray_calls import end_all, found_actors
from workers.errors import ConfigError

_ANSWER_S = 5.0
# A controller of which no process has heard for so long is gone: while it is there it beats ten times as often.
_GIVEN_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Left:
    """Processes that serve, by name: each one's actor, and what it told."""

    processes: dict[str, tuple[Any, Described]]
    # Of the controller that takes them over: higher than of all before.
    controller: int

    def endpoints(self) -> dict[str, tuple[str, str]]:
        """Of routers."""
        return {name: one.where for name, (_, one) in self.processes.items() if isinstance(one.config, RouterReplica)}


def left_behind(actors: Sequence[str], cluster: str) -> Left | None:
    """None: nothing can be taken over. What does not serve is ended, and without a router all.

    Raises ConfigError while the controller of these actors, by their names, is there.
    """
    found = found_actors(actors, _ANSWER_S)
    told = [one for _, one in found.values() if one is not None]
    if any(one.silence_s < _GIVEN_UP_S for one in told):
        raise ConfigError(
            f"a cluster named {cluster} runs in this Ray already, and its `kvferry up` too: give yours another name"
        )
    serving = {name: (actor, one) for name, (actor, one) in found.items() if one and one.where is not None}
    left = Left(serving, 1 + max((one.controller for one in told), default=0))
    kept = serving if left.endpoints() else {}
    end_all([actor for name, (actor, _) in found.items() if name not in kept], actors)
    return left if kept else None
