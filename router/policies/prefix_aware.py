"""prefix_aware: where the request is done soonest, with what is cached there counted as done."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.load import Load, ToPlace

# What is computed where another has it also takes a place in a second cache from something else.
_ANEW = 2


def prefix_aware(candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
    """Without anything cached it is least_loaded, but equals take turns: each then gets prefixes of its own."""
    count = len(candidates)
    return sorted(range(count), key=lambda i: (*_cost(candidates[i], to_place), (i - to_place.turn) % count))


def _cost(load: Load, to_place: ToPlace) -> tuple[float, int]:
    """For a decode worker, its batch: to have the whole prompt is worth one request, whose KV need not come. For
    others, the tokens to compute before token 1."""
    missing = to_place.num_tokens - load.num_cached_tokens
    if to_place.role == "decode":
        return load.num_requests + missing / max(1, to_place.num_tokens), -load.blocks_free
    return load.num_queued_tokens + _ANEW * missing, load.num_requests
