"""Wait until a router has nothing to do: what a preStop hook does once its Service sends nothing more."""

from __future__ import annotations

import time
from collections.abc import Callable

from protos.router_pb2 import GetStatusResponse

_POLL_S = 0.5


def wait_idle(
    status: Callable[[], GetStatusResponse],
    settle_s: float,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """How many requests are left: 0, or what still runs after `timeout_s`. For `settle_s` nobody is believed to be the
    last: whoever sends requests here may not know yet that it is over."""
    began_s = clock()
    while True:
        num_left = sum(router.num_queued + router.num_running for router in status().routers)
        waited_s = clock() - began_s
        if (not num_left and waited_s >= settle_s) or waited_s >= timeout_s:
            return num_left
        sleep(_POLL_S)
