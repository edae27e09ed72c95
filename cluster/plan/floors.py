"""The least time that a prompt or a step can take: its bytes at the memory's rate, or its arithmetic at the card's,
whichever is longer (the roofline of Williams, Waterman and Patterson, CACM 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.plan.cards import Card
from cluster.plan.shape import ModelShape


@dataclass(frozen=True)
class Served:
    """A model as a worker holds it."""

    shape: ModelShape
    # Of all its weights; of a number of its KV.
    weights_bytes: float
    kv_element_bytes: float

    @property
    def kv_bytes(self) -> float:
        """Of one token."""
        return self.shape.kv_bytes(self.kv_element_bytes)

    @property
    def _param_bytes(self) -> float:
        return self.weights_bytes / self.shape.num_params if self.shape.num_params else 0.0


@dataclass(frozen=True)
class Floor:
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s > self.compute_s else "compute"


def prefill_floor(served: Served, card: Card, num_tokens: int) -> Floor:
    """Of a prompt: 2 operations a weight and token, and for every pair of tokens, half of the square, attention's."""
    shape = served.shape
    pairs = num_tokens * (num_tokens + 1) / 2
    operations = 2 * shape.num_active_params * num_tokens + 2 * shape.num_layers * shape.attention.score_macs * pairs
    num_bytes = shape.params_read(num_tokens) * served._param_bytes + num_tokens * served.kv_bytes
    return Floor(num_bytes / card.bandwidth_bytes, operations / card.flops)


def decode_floor(served: Served, card: Card, batch: int, context: float) -> Floor:
    """Of a step that gives each of `batch` requests a token, with so much context on average."""
    shape = served.shape
    num_bytes = shape.params_read(batch) * served._param_bytes + batch * context * served.kv_bytes
    attention = shape.num_layers * shape.attention.score_macs * context
    return Floor(num_bytes / card.bandwidth_bytes, 2 * batch * (shape.num_active_params + attention) / card.flops)
