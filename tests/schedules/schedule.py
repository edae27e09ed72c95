"""A schedule: who asks for what, who dies or stands still and when, and which messages fare badly. Plain data, drawn
from a seed, so that it can be played again, made smaller, and pasted into a test."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from tests.factories import BLOCK_SIZE

ROUTER = "router"
How = Literal["lose", "repeat", "delay", "truncate", "flip"]

# prefill, decode and colocated workers.
_TOPOLOGIES = ((1, 1, 0), (2, 1, 0), (1, 2, 0), (2, 2, 0), (1, 1, 1), (0, 0, 1))
_METHODS = (
    "Connect",
    "Reserve",
    "Prefill",
    "Commit",
    "Release",
    "Renew",
    "Abort",
    "GetStats",
    "Submit",
    "StreamOutputs",
    "StreamKVEvents",
)
# Prompts around the borders of blocks, of a step (16) and of a pool.
_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 15, 16, 17, 33)


@dataclass(frozen=True, slots=True)
class Ask:
    """A client asks, and leaves when its patience is at an end."""

    at_s: float = 0.0
    num_prompt_tokens: int = 1
    # Prompts of one number begin alike.
    prompt: int = 0
    max_tokens: int = 8
    n: int = 1
    # None: greedy.
    seed: int | None = None
    ignore_eos: bool = True
    # Index of the token at which choice 0 stops, its id being a stop token.
    stop_at: int | None = None
    logprobs: bool = False
    prompt_logprobs: bool = False
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """A process dies; another comes to its address after `back_after_s`, or never."""

    at_s: float = 0.0
    name: str = "d0"
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A process neither answers nor dies for a while."""

    at_s: float = 0.0
    name: str = "d0"
    for_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Spoil:
    """What becomes of the request number `nth` of a method, or of the answer, wherever it goes."""

    method: str = "Put"
    answers: bool = False
    nth: int = 0
    how: How = "lose"
    # delay: seconds. truncate: the part that arrives. flip: the place of the bit. The last two in [0, 1).
    amount: float = 0.0


Event = Ask | Kill | Pause | Spoil


@dataclass(frozen=True, slots=True)
class Schedule:
    events: tuple[Event, ...] = ()
    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    # Of each worker.
    num_blocks: int = 64
    prefix_caching: bool = False
    # Whether the KV of running requests is copied to whom would decode in their worker's place.
    replicates: bool = False
    # Whether KV goes by shared memory, the receiver reading the sender's pool.
    pulls: bool = False
    # Of the latencies.
    seed: int = 0


def draw(seed: int) -> Schedule:
    rng = random.Random(seed)
    topology = rng.choice(_TOPOLOGIES)
    names = [f"{role}{i}" for role, count in zip("pdc", topology, strict=True) for i in range(count)]
    asks = [_ask(rng) for _ in range(rng.randint(6, 20))]
    spoils = [_spoil(rng) for _ in range(rng.choice((0, 3, 6, 12)))]
    events: list[Event] = [*asks, *_deaths(rng, names), *_pauses(rng, names), *spoils]
    num_blocks, prefix_caching = rng.choice((40, 40, 48, 64)), rng.random() < 0.5
    return Schedule(
        tuple(events),
        *topology,
        num_blocks,
        prefix_caching,
        replicates=prefix_caching and rng.random() < 0.5,
        pulls=rng.random() < 0.4,
        seed=seed,
    )


def _ask(rng: random.Random) -> Ask:
    return Ask(
        at_s=_moment(rng),
        num_prompt_tokens=rng.choice(_LENGTHS) if rng.random() < 0.6 else rng.randint(1, 60),
        prompt=rng.randint(0, 3) if rng.random() < 0.5 else rng.randint(4, 1000),
        max_tokens=rng.choice((1, 2, *(rng.randint(3, 25) for _ in range(8)))),
        n=rng.choice((1, 1, 1, 2, 3)),
        seed=rng.choice((None, rng.randint(0, 9))),
        ignore_eos=rng.random() < 0.5,
        stop_at=rng.choice((0, rng.randint(1, 5), *[None] * 8)),
        logprobs=rng.random() < 0.2,
        prompt_logprobs=rng.random() < 0.1,
        patience_s=round(rng.uniform(0, 0.5), 4) if rng.random() < 0.2 else None,
    )


def _moment(rng: random.Random) -> float:
    """In the first second; now and then later, among what deaths and pauses leave."""
    return round(rng.uniform(0, 1) if rng.random() < 0.8 else rng.uniform(1, 8), 4)


def _deaths(rng: random.Random, names: list[str]) -> Iterator[Kill]:
    """All of a role may be dead at once, if they come back; at least one of each role lives or is being replaced."""
    for name in (*names, ROUTER):
        if rng.random() >= (0.3 if name != ROUTER else 0.1):
            continue
        for_good = name.endswith("1") and rng.random() < 0.5
        yield Kill(_moment(rng), name, None if for_good else round(rng.uniform(0.1, 3.0), 3))


def _pauses(rng: random.Random, names: list[str]) -> Iterator[Pause]:
    """Blinks, and sleeps longer than a lease."""
    for name in names:
        if rng.random() < 0.15:
            yield Pause(_moment(rng), name, round(rng.choice((rng.uniform(0, 1), rng.uniform(3, 7))), 3))


def _spoil(rng: random.Random) -> Spoil:
    method, answers = "Put" if rng.random() < 0.4 else rng.choice(_METHODS), rng.random() < 0.5
    # Only frames bear damage: what is said about them is gRPC's to keep whole.
    hows: list[How] = ["lose", "repeat", "delay", "delay"]
    if method == "Put" and not answers:
        hows += ["truncate", "flip", "flip"]
    how = rng.choice(hows)
    amount = rng.choice((rng.uniform(0, 0.05), rng.uniform(0, 4))) if how == "delay" else rng.random()
    return Spoil(method, answers, int(rng.expovariate(0.1)), how, round(amount, 4))


def as_code(value: object) -> str:
    """The expression that makes a schedule, or a part of it, without what is as by default."""
    if isinstance(value, tuple):
        return "(" + "".join(f"\n    {as_code(one)}," for one in value) + "\n)"
    if not isinstance(value, (Schedule, Ask, Kill, Pause, Spoil)):
        return repr(value)
    given = [(f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={as_code(one)}' for name, one in given)})"
