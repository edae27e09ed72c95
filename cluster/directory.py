"""Directory: the workers that a cluster has now, and what its routers have been told of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cluster.ray_calls import has_ended, has_succeeded
from router.roles import Member
from workers.config import WorkerConfig


class Directory:
    """Routers are told all, again and again, until what they were told last is how it is."""

    def __init__(self) -> None:
        # By worker, once it has told; of one that died, where it was.
        self.addresses: dict[str, str] = {}
        # As which each was begun, or has become.
        self.configs: dict[str, WorkerConfig] = {}
        self._draining: frozenset[str] = frozenset()
        self._without: frozenset[str] = frozenset()
        self._told: dict[str, Mapping[str, Member]] = {}
        # Calls that have not been answered yet, and what they tell.
        self._telling: dict[str, tuple[Any, Mapping[str, Member]]] = {}

    def members(self) -> dict[str, Member]:
        """By address."""
        return {
            address: Member(self.configs[name].role, name in self._draining)
            for name, address in self.addresses.items()
            if name not in self._without
        }

    def forget(self, worker: str) -> None:
        self.addresses.pop(worker, None)
        self.configs.pop(worker, None)

    def lose_router(self, name: str) -> None:
        """Whoever follows it has been told nothing."""
        self._told.pop(name, None)
        self._telling.pop(name, None)

    def mark(self, draining: Collection[str], without: Collection[str]) -> None:
        self._draining, self._without = frozenset(draining), frozenset(without)

    def tell(self, routers: Mapping[str, Any]) -> bool:
        """Whether each of these, by name, knows all by now. They are Ray actors of RouterProcess."""
        now = self.members()
        for name, router in routers.items():
            if (telling := self._telling.get(name)) and has_ended(telling[0]):
                del self._telling[name]
                if has_succeeded(telling[0]):
                    self._told[name] = telling[1]
            if self._told.get(name) != now and name not in self._telling:
                self._telling[name] = router.set_workers.remote(now), now
        return all(self._told.get(name) == now for name in routers)
