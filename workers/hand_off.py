"""One hand-off as its decode worker sees it, and what became of all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from workers.errors import KVFerryError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import Frame
from workers.request import Request


@dataclass(slots=True, eq=False)
class HandOff:
    """One request on its way here. It ends once: by commit, release, abort, failure or the end of its lease."""

    grant: Grant
    request: Request
    lease: asyncio.TimerHandle
    # What has been verified and written, or is about to be, payloads left out.
    received: list[Frame] = field(default_factory=list)
    num_bytes: int = 0
    writing: dict[Frame, asyncio.Future[None]] = field(default_factory=dict)
    # A copy that nobody waits for: once whole, it is a known prefix.
    is_replica: bool = False


@dataclass(slots=True)
class HandOffCounts:
    """num_started = num_committed + num_released + all of num_failed + those under way. Copies are not counted."""

    num_started: int = 0
    num_committed: int = 0
    # Given back by the sender: token 1 ended the request, or it was aborted there.
    num_released: int = 0
    # By the class of the error.
    num_failed: Counter[str] = field(default_factory=Counter)
    # Grants whose lease ran out, and reservations for which there was no room.
    num_expired: int = 0
    num_refused: int = 0
    # Frames, by the class of the error.
    num_frames_refused: Counter[str] = field(default_factory=Counter)

    def failed(self, hand_off: HandOff, kind: type[KVFerryError]) -> None:
        if not hand_off.is_replica:
            self.num_failed[kind.__name__] += 1
