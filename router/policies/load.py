"""What a routing policy sees."""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import Role


@dataclass(frozen=True, slots=True)
class Load:
    """One candidate as its router sees it now: its own counts are exact, the worker's are up to a heartbeat old."""

    # Prompt tokens sent to it to be computed, whose token 1 has not come back.
    num_queued_tokens: int
    # Requests that this router waits for.
    num_requests: int
    # Blocks that can be taken: free, or cached and used by nobody.
    blocks_free: int
    # Of the request's tokens, those whose KV it is known to have.
    num_cached_tokens: int = 0
    # Whether the worker at the other end of the hand-off shares its memory.
    same_host: bool = False


@dataclass(frozen=True, slots=True)
class ToPlace:
    """What a policy sees of the request that wants a worker."""

    role: Role
    request_id: str
    num_tokens: int
    # Requests that this router has placed before.
    turn: int
