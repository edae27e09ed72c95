"""Where a request's time went on this engine."""

from __future__ import annotations

from workers.request import Request
from workers.timeline import Timeline


def timeline_of(request: Request, now_s: float) -> Timeline:
    """What this engine knows of a request's time so far, at a token of it."""
    scheduled_s = now_s if request.scheduled_s is None else request.scheduled_s
    if request.handed_over:
        decode = Timeline(decode_queued_s=scheduled_s - request.arrived_s, decode_s=now_s - scheduled_s)
        return request.hand_off + decode
    first_token_s = now_s if request.first_token_s is None else request.first_token_s
    return Timeline(
        prefill_queued_s=scheduled_s - request.arrived_s,
        prefill_s=first_token_s - scheduled_s,
        decode_s=now_s - first_token_s,
    )
