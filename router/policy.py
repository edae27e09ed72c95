"""RoutingPolicy: which worker gets a request, a pure function of what its router knows of the candidates.

Both roles are ranked by the same one. `router.policy` names one of ours, or any by its import path.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol

from router.policies.least_loaded import least_loaded
from router.policies.load import Load, ToPlace
from router.policies.power_of_two import power_of_two
from router.policies.prefix_aware import prefix_aware
from router.policies.round_robin import round_robin
from router.policies.topology import topology
from workers.errors import ConfigError


class RoutingPolicy(Protocol):
    def __call__(self, candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
        """Each index of `candidates` once, the best first."""


POLICIES: dict[str, RoutingPolicy] = {
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
    "power_of_two": power_of_two,
    "topology": topology,
}


def policy_named(name: str) -> RoutingPolicy:
    """One of POLICIES, or what `package.module:name` imports. Raises ConfigError, also when that does not rank."""
    if name in POLICIES:
        return POLICIES[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        known = ", ".join(POLICIES)
        raise ConfigError(f"{name!r} is no policy; choose {known}, or one of yours by package.module:name")
    try:
        policy: RoutingPolicy = getattr(importlib.import_module(module), function)
    except Exception as exc:  # Whatever another's module raises when it is imported.
        raise ConfigError(f"{name} cannot be imported ({type(exc).__name__}: {exc}); mend its path or module") from exc
    _require_ranking(policy, name)
    return policy


def _require_ranking(policy: RoutingPolicy, name: str) -> None:
    loads = [Load(1, 1, 1), Load(2, 2, 2, num_cached_tokens=1, same_host=True)]
    for role in ("prefill", "decode", "colocated"):
        try:
            ranked = sorted(policy(loads, ToPlace(role, "r", 2, 0)))
        except Exception as exc:  # Another's code.
            raise ConfigError(f"{name} ranks nobody ({type(exc).__name__}: {exc}); see router/policy.py") from exc
        if ranked != [0, 1]:
            raise ConfigError(f"{name} ranks two workers as {ranked}; it must give the indices 0 and 1, each once")
