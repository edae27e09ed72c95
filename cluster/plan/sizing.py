"""How many requests fit, and how many workers of each role a workload needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.plan.cards import Card
from cluster.plan.floors import Floor, Served, decode_floor, prefill_floor
from workers.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """Mean tokens of a request, requests a second, and what is promised them."""

    num_prompt_tokens: int
    num_output_tokens: int
    rate: float
    ttft_s: float
    tpot_s: float

    @property
    def context(self) -> float:
        """Of a request that is being decoded, on average over its output."""
        return self.num_prompt_tokens + self.num_output_tokens / 2

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Efficiency:
    """Parts of the floors' rates that real workers reach."""

    compute: float
    memory: float

    def seconds(self, floor: Floor) -> float:
        return max(floor.memory_s / self.memory, floor.compute_s / self.compute)


@dataclass(frozen=True)
class Split:
    """Workers for a workload, at the rates that `Efficiency` says."""

    num_prefill: int
    num_decode: int
    # Of one prompt alone, and what it waits for others on average.
    prefill_s: float
    prefill_wait_s: float
    # Of one step at this batch.
    decode_step_s: float
    batch: int
    kv_bytes_per_hand_off: float
    # For a hand-off to end with its prompt, by one prefill worker; and for all at the workload's rate.
    worker_bytes_per_s: float
    cluster_bytes_per_s: float


def largest_batch(kv_memory_bytes: float, request_bytes: float) -> int:
    """How many requests of so much KV each fit."""
    return math.floor(kv_memory_bytes / request_bytes + 1e-9)


def split(served: Served, card: Card, kv_memory_bytes: float, load: Workload, efficiency: Efficiency) -> Split:
    """Raises ConfigError when no number of such workers can keep the promises."""
    prefill_s = efficiency.seconds(prefill_floor(served, card, load.num_prompt_tokens))
    num_prefill = _num_prefill(prefill_s, load)
    batch = _batch(served, card, kv_memory_bytes, load, efficiency)
    step_s = efficiency.seconds(decode_floor(served, card, batch, load.context))
    num_decode = math.ceil(load.rate * load.num_output_tokens * step_s / batch - 1e-9) or 1
    hand_off = load.num_prompt_tokens * served.kv_bytes
    return Split(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_s=prefill_s,
        prefill_wait_s=_wait_s(prefill_s, load.rate / num_prefill),
        decode_step_s=step_s,
        batch=batch,
        kv_bytes_per_hand_off=hand_off,
        worker_bytes_per_s=hand_off / prefill_s,
        cluster_bytes_per_s=load.rate * hand_off,
    )


def _num_prefill(prefill_s: float, load: Workload) -> int:
    if prefill_s >= load.ttft_s:
        raise ConfigError(
            f"a prompt of {load.num_prompt_tokens} tokens takes {1000 * prefill_s:.0f} ms alone, which is no less than "
            f"the TTFT of {1000 * load.ttft_s:.0f} ms; use more or faster cards for a worker, or promise less"
        )
    num = math.floor(load.rate * prefill_s) + 1
    while prefill_s + _wait_s(prefill_s, load.rate / num) > load.ttft_s:
        num += 1
    return num


def _wait_s(service_s: float, rate: float) -> float:
    """Mean wait of an M/D/1 queue: R D^2 / (2 (1 - R D)), as DistServe has it (arXiv:2401.09670, section 3.1)."""
    return rate * service_s**2 / (2 * (1 - rate * service_s))


def _batch(served: Served, card: Card, kv_memory_bytes: float, load: Workload, efficiency: Efficiency) -> int:
    """The largest that fits and keeps TPOT: steps only grow with their batch."""
    low, high = 0, largest_batch(kv_memory_bytes, load.num_tokens * served.kv_bytes)
    if high == 0:
        raise ConfigError(f"not one request of {load.num_tokens} tokens fits; use more cards for a worker")
    while low < high:
        middle = (low + high + 1) // 2
        if efficiency.seconds(decode_floor(served, card, middle, load.context)) <= load.tpot_s:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        step_s = efficiency.seconds(decode_floor(served, card, 1, load.context))
        raise ConfigError(
            f"a step of one request takes {1000 * step_s:.1f} ms, more than the TPOT of {1000 * load.tpot_s:.0f} ms; "
            "use more or faster cards for a worker, or weights in fewer bits"
        )
    return low
