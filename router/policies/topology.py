"""topology: first those on the host of the other end, to which KV goes through shared memory; then by load."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.least_loaded import work
from router.policies.load import Load, ToPlace


def topology(candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
    def cost(i: int) -> tuple[bool, int, int]:
        return not candidates[i].same_host, *work(candidates[i], to_place.role)

    return sorted(range(len(candidates)), key=cost)
