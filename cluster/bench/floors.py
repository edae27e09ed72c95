"""How fast a step could be: its bytes at the rate memory is read, its operations at the rate they are computed.

A machine's rates differ from day to day where it is shared: they are measured in the run whose times stand beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.layers.linear import make_linear
from workers.models.architecture import ArchitectureConfig

_READ_BYTES = 256 << 20
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Rates:
    read_bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class Floors:
    """Of one step, in ms."""

    read_ms: float
    compute_ms: float


def measure_rates(dtype: torch.dtype, num_tries: int = 5) -> Rates:
    """The best of some tries, with torch's number of threads: a sum over much memory, and a linear of many rows."""
    memory = torch.ones(_READ_BYTES // 4)
    linear, x = make_linear(torch.randn(3072, 576).to(dtype)), torch.randn(_ROWS, 576).to(dtype)
    read_s = min(seconds(memory.sum) for _ in range(num_tries))
    multiply_s = min(seconds(lambda: linear(x)) for _ in range(4 * num_tries))
    return Rates(_READ_BYTES / read_s, 2 * _ROWS * 3072 * 576 / multiply_s)


def seconds(call: Callable[[], object]) -> float:
    start = now()
    call()
    return now() - start


def now() -> float:
    """Of one thread the time that it ran, since a shared machine lets it wait; of several the clock's."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def weight_bytes(config: ArchitectureConfig, dtype: torch.dtype) -> int:
    """Of the dense matrices that every step reads, the head's among them."""
    return _num_weights(config) * dtype.itemsize


def floors(
    config: ArchitectureConfig, rates: Rates, dtype: torch.dtype, num_rows: int, context: int, kv_bytes: int
) -> Floors:
    """Of a step of `num_rows` requests with so many tokens of context each, whose KV is kv_bytes together."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    operations = num_rows * (2 * _num_weights(config) + attention)
    num_bytes = weight_bytes(config, dtype) + kv_bytes
    return Floors(1000 * num_bytes / rates.read_bytes_per_s, 1000 * operations / rates.operations_per_s)


def _num_weights(config: ArchitectureConfig) -> int:
    hidden, heads = config.hidden_size, config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = hidden * heads + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * hidden
