"""A frame's KV into this worker's pool, verified."""

from __future__ import annotations

from workers.engine.executor import Runner
from workers.kv_transfer.frame import Digest, Frame
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.slots import Slots


def write_frame(runner: Runner, frame: Frame, slots: Slots, claimed: int, digest: Digest | None) -> None:
    """Put its payload into `slots`. Raises FrameError unless `digest` comes to the `claimed` checksum over it; None:
    its payload has none."""
    layers, payload = (frame.layer_start, frame.layer_end), frame.payload
    pool = runner.host_pool
    if pool is not None:
        # Checked as it is copied. What is false then lies under a range that is not received: a true frame comes there
        # before anybody may commit it.
        rows = payload if isinstance(payload, KVRows) else frame.rows(payload)
        if digest is None:
            pool.pull(slots, *layers, rows)
        else:
            digest.see(pool.pull_and_check(slots, *layers, rows))
            digest.require(claimed)
        return
    if isinstance(payload, KVRows):
        payload = bytes(payload)
    if digest is not None:
        digest.see(digest.crcs_of(payload))
        digest.require(claimed)
    runner.write_kv(slots, *layers, payload)
