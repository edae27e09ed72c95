"""Cards that people have, from their makers' data sheets: dense rates, without sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from workers.errors import ConfigError


@dataclass(frozen=True)
class Card:
    name: str
    memory_bytes: float
    # Of its memory, a second.
    bandwidth_bytes: float
    # Floating-point operations a second in 16 bits; two are one multiply and add.
    flops: float

    def __mul__(self, num: int) -> Card:
        """So many as one: an upper bound, since what they say to each other takes time."""
        name = self.name if num == 1 else f"{num} x {self.name}"
        return Card(name, num * self.memory_bytes, num * self.bandwidth_bytes, num * self.flops)


def _card(name: str, memory_gb: float, bandwidth_gb: float, tflops: float) -> tuple[str, Card]:
    return name, Card(name, memory_gb * 1e9, bandwidth_gb * 1e9, tflops * 1e12)


CARDS = dict(
    (
        _card("b200", 180, 7700, 2250),
        _card("h200", 141, 4800, 989),
        _card("h100", 80, 3350, 989),
        _card("h100-pcie", 80, 2000, 756),
        _card("a100-80gb", 80, 2039, 312),
        _card("a100-40gb", 40, 1555, 312),
        _card("l40s", 48, 864, 362),
        _card("l4", 24, 300, 121),
        _card("a10", 24, 600, 125),
        _card("t4", 16, 320, 65),
        _card("rtx-4090", 24, 1008, 165),
        _card("rtx-3090", 24, 936, 71),
        _card("mi300x", 192, 5300, 1307),
    )
)


def card_of(name: str) -> Card:
    found = CARDS.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), CARDS, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"unknown card {name}{hint} Known are {', '.join(CARDS)}; or give --memory, --bandwidth and --flops",
            param="--card",
        )
    return found
