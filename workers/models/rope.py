"""Rotary position embedding as numbers: what each scaling does to the frequencies. Neither torch nor ray here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Rope:
    """Pair i of a head turns by position * theta^(-2i / dim) / divisors[i]; cos and sin are scaled by `magnitude`."""

    theta: float
    # Dimensions of a head that turn, from its first on.
    dim: int
    # One for each pair. Empty: all are 1.
    divisors: tuple[float, ...] = ()
    magnitude: float = 1.0
    # Positions the frequencies hold for, where scaling sets that itself.
    max_positions: int | None = None


def scaled_rope(theta: float, dim: int, parameters: Parameters, max_positions: int) -> Rope:
    """From Hugging Face's rope_parameters (or rope_scaling) and max_position_embeddings. KeyError for what they lack.

    ValueError with its name for a kind that is not known.
    """
    kind = rope_kind(parameters)
    if kind not in _SCALINGS:
        raise ValueError(kind)
    original = parameters.get("original_max_position_embeddings") or max_positions
    return _SCALINGS[kind](
        Rope(theta, dim), {**parameters, "original_max_position_embeddings": original}, max_positions
    )


def rope_kind(parameters: Parameters) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _unscaled(rope: Rope, parameters: Parameters, max_positions: int) -> Rope:
    return rope


def _linear(rope: Rope, parameters: Parameters, max_positions: int) -> Rope:
    """Chen et al. 2023: positions divided by a factor."""
    return Rope(rope.theta, rope.dim, (float(parameters["factor"]),) * (rope.dim // 2))


def _llama3(rope: Rope, parameters: Parameters, max_positions: int) -> Rope:
    """Llama 3.1: long waves divided, short ones kept, a ramp between them."""
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])

    def divisor(turn: float) -> float:
        kept = (original * turn / (2 * math.pi) - low) / (high - low)
        kept = min(1.0, max(0.0, kept))
        return 1 / (kept + (1 - kept) / factor)

    return Rope(rope.theta, rope.dim, tuple(divisor(turn) for turn in _turns(rope)))


def _yarn(rope: Rope, parameters: Parameters, max_positions: int) -> Rope:
    """Peng et al. 2023: the same ramp over the pairs' indices, and a larger magnitude."""
    original = float(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or max_positions / original)

    def pair(num_turns: float) -> float:
        """The index of the pair that turns so many times within the original length."""
        return rope.dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(parameters.get("beta_fast") or 32), pair(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001

    def divisor(i: int) -> float:
        divided = min(1.0, max(0.0, (i - low) / width))
        return 1 / (divided / factor + 1 - divided)

    divisors = tuple(divisor(i) for i in range(rope.dim // 2))
    longest = max(max_positions, int(original * factor))
    return Rope(rope.theta, rope.dim, divisors, _yarn_magnitude(factor, parameters), longest)


def _yarn_magnitude(factor: float, parameters: Parameters) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)


def _longrope(rope: Rope, parameters: Parameters, max_positions: int) -> Rope:
    """Ding et al. 2024, with the short factors, which hold up to the original length.

    A longer sequence would turn all of its tokens by the long ones: KV that changes with the tokens after it. So the
    original length is the limit.
    """
    original = int(parameters["original_max_position_embeddings"])
    factor = float(parameters.get("factor") or max_positions / original)
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = tuple(float(value) for value in parameters["short_factor"])
    return Rope(rope.theta, rope.dim, divisors, float(magnitude), original)


def _given(rope: Rope, parameters: Parameters, max_positions: int) -> Rope:
    """The divisors themselves, as a GGUF's rope_freqs.weight lists them."""
    return Rope(rope.theta, rope.dim, tuple(float(value) for value in parameters["divisors"]))


def _turns(rope: Rope) -> list[float]:
    return [float(rope.theta ** (-2 * i / rope.dim)) for i in range(rope.dim // 2)]


_SCALINGS: dict[str, Callable[[Rope, Parameters, int], Rope]] = {
    "default": _unscaled,
    # Scales only beyond max_position_embeddings, where nothing is served.
    "dynamic": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "given": _given,
}
