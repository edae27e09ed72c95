"""Capacity: the highest rate of requests at which nine in ten of them are good."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from cluster.bench.load import Clients, Enough, Poisson, Target, Workload, load
from cluster.bench.samples import Slo

# Rates that are tried differ by this factor: first several of them at once, then what lies between.
FACTOR = 1.25
_UP, _DOWN = 4, -2
_GOOD = 0.9
_LEAST_RATE = 0.04


@dataclass(frozen=True, slots=True)
class Capacity:
    # Requests a second. 0: even the lowest rate tried was too high.
    rate: float
    # What was tried, in that order, and whether the rate was met.
    tried: tuple[tuple[float, bool], ...]


async def find_capacity(target: Target, workload: Workload, slo: Slo, first_rate: float) -> Capacity:
    """A try that has missed the mark already is given up; each has prompts of its own, which no cache knows."""
    num_tries = 0
    missed = _more_bad_than(int((1 - _GOOD) * workload.num_requests + 1e-9), slo)

    async def passes(rate: float) -> bool:
        nonlocal num_tries
        num_tries += 1
        asked = replace(workload, seed=1000 * workload.seed + num_tries)
        measured = await load(target, asked, Poisson(rate) if rate else Clients(1), missed)
        return not missed(measured.samples)

    return await highest_rate(passes, first_rate)


async def highest_rate(passes: Callable[[float], Awaitable[bool]], first_rate: float) -> Capacity:
    """Of the rates first_rate * 1.25^k, k an integer, the highest that passes if all lower ones do. Rate 0, one request
    at a time, is tried before lower ones than the first."""
    tried: list[tuple[float, bool]] = []

    async def attempt(rate: float) -> bool:
        passed = await passes(rate)
        tried.append((round(rate, 4), passed))
        return passed

    def rate_of(k: int) -> float:
        return first_rate * FACTOR**k

    stride = _UP if await attempt(first_rate) else _DOWN
    if stride == _DOWN and not await attempt(0.0):
        return Capacity(0.0, tuple(tried))
    k = stride
    while (await attempt(rate_of(k))) == (stride == _UP):
        k += stride
        if rate_of(k) < _LEAST_RATE:
            return Capacity(0.0, tuple(tried))
    low, high = sorted((k - stride, k))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await attempt(rate_of(middle)) else (low, middle)
    return Capacity(round(rate_of(low), 4), tuple(tried))


def _more_bad_than(limit: int, slo: Slo) -> Enough:
    return lambda samples: sum(not slo.met(sample) for sample in samples) > limit
