"""least_loaded: whoever has least to do."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.load import Load, ToPlace
from workers.config import Role


def least_loaded(candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
    return sorted(range(len(candidates)), key=lambda i: work(candidates[i], to_place.role))


def work(load: Load, role: Role) -> tuple[int, int]:
    """Less is better. For a decode worker: its running batch, then how full its pool is. For others: the tokens to
    compute before a new prompt's turn."""
    if role == "decode":
        return load.num_requests, -load.blocks_free
    return load.num_queued_tokens, load.num_requests
