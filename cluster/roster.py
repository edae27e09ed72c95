"""Roster: which workers a cluster is to have. `kvferry scale`, `flip` and `restart` write here, rollout.py follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.config_errors import complaint
from cluster.worker_configs import worker_beside
from workers.config import Role, WorkerConfig
from workers.errors import ConfigError

ROLES: tuple[Role, ...] = get_args(Role)


class Roster:
    """Whatever is asked for is possible, or refused by a ConfigError and nothing has changed."""

    def __init__(self, config: ClusterConfig, workers: Sequence[WorkerConfig]) -> None:
        # Its replicas are those of `workers`, which are wanted, by name.
        self.config = config
        self.workers = {worker.name: worker for worker in workers}
        # How often each of them was asked to be started anew.
        self.num_restarts: Counter[str] = Counter()

    def replicas(self) -> dict[Role, int]:
        counts = Counter(worker.role for worker in self.workers.values())
        return {role: counts[role] for role in ROLES}

    def scale(self, replicas: Mapping[str, int]) -> None:
        """As many workers of each role that is named. Of too many the latest go."""
        wanted = self.replicas() | {_require_role(role): count for role, count in replicas.items()}
        config = self._with_replicas(wanted)
        workers = dict(self.workers)
        for role in ROLES:
            of_role = [name for name, worker in workers.items() if worker.role == role]
            for name in of_role[wanted[role] :]:
                del workers[name]
            for _ in range(len(of_role), wanted[role]):
                name = _free_name(role, workers)
                workers[name] = worker_beside(config, name, role, workers.values())
        self.config, self.workers = config, workers

    def flip(self, name: str, role: str) -> None:
        """That worker has another role from now on. It keeps its settings, its weights and what it has cached."""
        self._require(name)
        to = _require_role(role)
        worker = self.workers[name]
        if worker.role == to:
            return
        now = self.replicas()
        config = self._with_replicas(now | {worker.role: now[worker.role] - 1, to: now[to] + 1})
        settings = config.worker_settings(to)
        for key in ("quantization", "device"):
            if settings[key] != getattr(worker, key):
                raise ConfigError(
                    f"{name} has {key}: {getattr(worker, key)}, and {to} workers have {settings[key]}: it would have "
                    "to load anew; use `kvferry scale` instead",
                    param="role",
                )
        prompts = settings.get("prefill_quantization")
        flipped = worker.model_copy(update={"role": to, "prefill_quantization": prompts})
        self.config, self.workers = config, self.workers | {name: flipped}

    def restart(self, names: Iterable[str]) -> list[str]:
        """Those workers, or all of the roles that are named, or all. Who they are."""
        asked = list(names) or list(self.workers)
        found: dict[str, None] = {}
        for name in asked:
            of_role = [worker.name for worker in self.workers.values() if worker.role == name]
            if not of_role:
                self._require(name)
            found |= dict.fromkeys(of_role or [name])
        self.num_restarts.update(list(found))
        return list(found)

    def _require(self, name: str) -> None:
        if name not in self.workers:
            raise ConfigError(f"there is no worker {name!r}; there are {', '.join(self.workers)}", param="name")

    def _with_replicas(self, replicas: Mapping[Role, int]) -> ClusterConfig:
        data = self.config.model_dump()
        for role, count in replicas.items():
            data[role] = {**data[role], "replicas": count}
        try:
            return ClusterConfig.model_validate(data)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            where = ".".join(map(str, error["loc"]))
            raise ConfigError(f"{where} {complaint(error)}" if where else complaint(error), param="replicas") from None


def _require_role(role: str) -> Role:
    for known in ROLES:
        if role == known:
            return known
    raise ConfigError(f"there is no role {role!r}; there are {', '.join(ROLES)}", param="role")


def _free_name(role: Role, taken: Iterable[str]) -> str:
    """The first that nobody has: a worker that changed its role keeps its name."""
    names = set(taken)
    return next(name for i in range(len(names) + 1) if (name := f"{role}-{i}") not in names)
