"""What a router does now and did last, for whoever looks at it: `kvferry top` and /ui."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from itertools import chain, islice

from protos import router_pb2
from router.tenants import CALLER
from router.traces import Traces

# Requests that are told of, and how many of them may be such that run.
MAX_SHOWN = 80
_MAX_RUNNING = 60
# Of each the latest tries.
MAX_TRIES = 3
# Latencies are those of the last so many seconds.
_WINDOW_S = 60.0


def visible_tenant() -> str | None:
    """Whose requests the running task's call may see; None: everybody's."""
    caller = CALLER.get()
    return None if caller is None or caller.key.admin else caller.key.tenant


def activity_of(traces: Traces, tenant: str | None) -> router_pb2.GetActivityResponse:
    """`tenant`: of whom only; None: of all."""
    now_s = asyncio.get_running_loop().time()
    known = [one for one in chain(traces.running(), traces.ended()) if tenant is None or one.tenant == tenant]
    running = list(islice((one for one in known if one.ended_s is None), _MAX_RUNNING))
    ended = islice((one for one in known if one.ended_s is not None), MAX_SHOWN - len(running))
    shown = sorted((*running, *ended), key=lambda one: one.began_s, reverse=True)
    since_s = now_s - _WINDOW_S
    ttfts_s = [one.ttft_s for one in known if one.token_1_s is not None and one.token_1_s >= since_s]
    tpots_s = [one.tpot_s for one in known if one.ended_s is not None and one.ended_s >= since_s]
    return router_pb2.GetActivityResponse(
        now_unix_s=time.time(),
        traces=[one.to_proto(now_s, MAX_TRIES) for one in shown],
        ttft=_spread([value for value in ttfts_s if value is not None]),
        tpot=_spread([value for value in tpots_s if value is not None]),
    )


def _spread(values_s: Sequence[float]) -> router_pb2.Spread:
    """By the nearest rank."""
    ordered = sorted(values_s)
    ranks = (max(0, math.ceil(share * len(ordered)) - 1) for share in (0.5, 0.99))
    p50_s, p99_s = (ordered[rank] if ordered else 0.0 for rank in ranks)
    return router_pb2.Spread(count=len(ordered), p50_s=p50_s, p99_s=p99_s)
