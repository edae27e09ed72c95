"""round_robin: each in turn, whatever it has to do. The baseline of the others."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.load import Load, ToPlace


def round_robin(candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
    count = len(candidates)
    return [(to_place.turn + i) % count for i in range(count)]
