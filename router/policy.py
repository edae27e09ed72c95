"""Which worker gets a request: pure functions of what the router knows of the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """One candidate as its router sees it now: its own counts are exact, the worker's are up to a heartbeat old."""

    # Prompt tokens sent to it whose token 1 has not come back.
    num_queued_tokens: int
    # Requests that this router waits for.
    num_requests: int
    blocks_free: int


class RoutingPolicy(Protocol):
    def __call__(self, candidates: Sequence[Load]) -> list[int]:
        """Indices of `candidates`, the best first."""


def least_loaded_prefill(candidates: Sequence[Load]) -> list[int]:
    """Fewest tokens to compute before a new prompt's turn."""
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].num_queued_tokens, candidates[i].num_requests))


def least_loaded_decode(candidates: Sequence[Load]) -> list[int]:
    """Smallest running batch, then most free blocks."""
    return sorted(range(len(candidates)), key=lambda i: (candidates[i].num_requests, -candidates[i].blocks_free))
