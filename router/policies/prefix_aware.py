"""prefix_aware: where the request is done soonest, with what is cached there counted as done."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.load import Load, ToPlace


def prefix_aware(candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
    """Without anything cached it is least_loaded, but equals take turns: each then gets prefixes of its own."""
    count = len(candidates)
    return sorted(range(count), key=lambda i: (*_cost(candidates[i], to_place), (i - to_place.turn) % count))


def _cost(load: Load, to_place: ToPlace) -> tuple[float, int]:
    """For a prefill worker, the tokens that it computes before token 1. For a decode worker, its batch: to have the
    whole prompt is worth one request, whose KV need not come."""
    missing = to_place.num_tokens - load.num_cached_tokens
    if to_place.role == "decode":
        return load.num_requests + missing / max(1, to_place.num_tokens), -load.blocks_free
    return load.num_queued_tokens + missing, load.num_requests
