"""One request's share of a step, as the scheduler would write it."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.scheduler import ScheduledRequest
from workers.request import NextToken, SamplingParams


def scheduled(
    request_id: str,
    token_ids: Sequence[int],
    start: int,
    block_table: Sequence[int],
    params: SamplingParams | None = None,
) -> ScheduledRequest:
    """With `params`, the token after the last is sampled."""
    samples = () if params is None else (NextToken(params, start + len(token_ids)),)
    return ScheduledRequest(request_id, token_ids, start, block_table, samples)
