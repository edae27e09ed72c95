"""The loads that every contestant gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from cluster.bench.capacity import find_capacity
from cluster.bench.load import Clients, Poisson, Target, Workload, load
from cluster.bench.samples import Slo, summary

SLO = Slo(ttft_s=1.0, ttft_per_token_s=0.003, tpot_s=0.1)
_MIXED = Workload(24, num_prompt_tokens=128, max_tokens=64, long_every=4, num_long_prompt_tokens=2048)
_FIRST_RATE = 0.25
# From a server, the scale of the number of requests and a seed to the row's figures.
Measure = Callable[[Target, float, int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Load:
    what: str
    measure: Measure


def _run(workload: Workload, arrivals: Poisson | Clients, target: Target, scale: float, seed: int) -> dict[str, Any]:
    measured = asyncio.run(load(target, _scaled(workload, scale, seed), arrivals))
    return summary(measured.samples, measured.wall_s, SLO)


def _capacity(workload: Workload, target: Target, scale: float, seed: int) -> dict[str, Any]:
    found = asyncio.run(find_capacity(target, _scaled(workload, scale, seed), SLO, _FIRST_RATE))
    return asdict(found)


def _scaled(workload: Workload, scale: float, seed: int) -> Workload:
    return replace(workload, num_requests=max(1, round(scale * workload.num_requests)), seed=seed)


LOADS: Mapping[str, Load] = {
    "one": Load("one at a time, 256 in, 64 out", partial(_run, Workload(8, 256, 64), Clients(1))),
    "batch16": Load("16 at a time, 256 in, 64 out", partial(_run, Workload(48, 256, 64), Clients(16))),
    "long": Load("one at a time, 1,024 in", partial(_run, Workload(6, 1024, 2), Clients(1))),
    "mixed": Load("1/s, 128 in (every fourth 2,048), 64 out", partial(_run, _MIXED, Poisson(1.0))),
    "capacity": Load(
        "the highest rate at which 90 % of such requests have TTFT within 1 s + 3 ms a prompt token and TPOT in 100 ms",
        partial(_capacity, replace(_MIXED, num_requests=60)),
    ),
}
