"""A plan: everything that `kvferry plan` answers, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.plan.cards import Card
from cluster.plan.floors import Floor, Served, decode_floor, prefill_floor
from cluster.plan.sizing import Efficiency, Split, Workload, largest_batch, split
from workers.errors import ConfigError

# Of their elements, with the scales of groups of 32.
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 32}
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
_BATCHES = (1, 8, 32, 128)


@dataclass(frozen=True)
class Memory:
    """Of one worker."""

    total_bytes: float
    weights_bytes: float
    other_bytes: float

    @property
    def kv_bytes(self) -> float:
        return self.total_bytes - self.weights_bytes - self.other_bytes


@dataclass(frozen=True)
class Plan:
    served: Served
    card: Card | None
    memory: Memory | None
    # Requests at once, by the KV that each has.
    batches: dict[float, int]
    prefill: dict[int, Floor]
    # By batch.
    decode: dict[int, Floor]
    workload: Workload | None
    split: Split | None


def make_plan(
    served: Served,
    card: Card | None,
    memory: Memory | None,
    request_bytes: Sequence[float],
    workload: Workload | None,
    efficiency: Efficiency,
) -> Plan:
    """`card`: a worker's together. Raises ConfigError when the model does not fit, or no split keeps its word."""
    batches: dict[float, int] = {}
    if memory:
        if memory.kv_bytes <= 0:
            raise ConfigError(
                f"weights of {memory.weights_bytes / 1e9:.1f} GB and {memory.other_bytes / 1e9:.1f} GB of other things "
                f"do not fit {memory.total_bytes / 1e9:.0f} GB; use --cards-per-worker, or --weights int4"
            )
        batches = {size: largest_batch(memory.kv_bytes, size) for size in request_bytes}
    prefill: dict[int, Floor] = {}
    decode: dict[int, Floor] = {}
    if card and workload:
        lengths = sorted({512, 2048, 8192, workload.num_prompt_tokens})
        prefill = {length: prefill_floor(served, card, length) for length in lengths}
        decode = {batch: decode_floor(served, card, batch, workload.context) for batch in _BATCHES}
    placed = None
    if card and workload and memory and workload.rate:
        placed = split(served, card, memory.kv_bytes, workload, efficiency)
    return Plan(served, card, memory, batches, prefill, decode, workload, placed)
