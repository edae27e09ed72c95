"""A frame's KV into this worker's pool, verified."""

from __future__ import annotations

from workers.engine.executor import Runner
from workers.kv_transfer.frame import Digest, Frame
from workers.kv_transfer.shared_rows import SharedRows
from workers.kv_transfer.slots import Slots


def write_frame(runner: Runner, frame: Frame, slots: Slots, claimed: int, digest: Digest | None) -> None:
    """Put its payload into `slots`. Raises FrameError unless `digest` comes to the `claimed` checksum over it; None:
    its payload has none."""
    layers, payload = (frame.layer_start, frame.layer_end), frame.payload
    if isinstance(payload, SharedRows):
        if runner.host_pool is not None:
            # Verified while it is in the cache, hence after it was written. What is false lies under a range that is
            # not received: a true frame comes there before anybody may commit it.
            runner.host_pool.pull(slots, *layers, payload, digest.see if digest else None)
            if digest is not None:
                digest.require(claimed)
            return
        payload = bytes(payload)
    if digest is not None:
        digest.payload(payload)
        digest.require(claimed)
    runner.write_kv(slots, *layers, payload)
