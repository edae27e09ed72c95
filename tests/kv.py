"""KV out of a pool, for tests to look at."""

from __future__ import annotations

from workers.engine.executor import Runner
from workers.kv_transfer.slots import Slots


def read_kv(runner: Runner, slots: Slots, layer_start: int, layer_end: int) -> bytes:
    room = bytearray((layer_end - layer_start) * len(slots) * runner.layout.token_bytes_per_layer)
    runner.read_kv(slots, layer_start, layer_end, memoryview(room))
    return bytes(room)
