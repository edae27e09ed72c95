"""Make a failing schedule small: leave events out, then make what is left simpler, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.schedules.schedule import ROUTER, Ask, Event, Schedule, Spoil

# The place of a bit: the first half and more of a short frame is its header.
_IN_A_PAYLOAD = 0.9


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A schedule that fails, none of whose `simpler` ones does. Asks `fails` about each schedule once at most."""
    tried: set[Schedule] = set()

    def still_fails(candidate: Schedule) -> bool:
        if candidate in tried:
            return False
        tried.add(candidate)
        return fails(candidate)

    while (smaller := next(filter(still_fails, simpler(schedule)), None)) is not None:
        schedule = smaller
    return schedule


def simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with less in them, the boldest cuts first. Going from one to the next comes to an end."""
    events = schedule.events
    size = len(events)
    while size:
        for start in range(0, len(events), size):
            yield replace(schedule, events=events[:start] + events[start + size :])
        size //= 2
    yield from _smaller_clusters(schedule)
    for index, event in enumerate(events):
        for other in _simpler_events(event):
            yield replace(schedule, events=(*events[:index], other, *events[index + 1 :]))


def _smaller_clusters(schedule: Schedule) -> Iterator[Schedule]:
    yield from _to_defaults(schedule, ("replicates", "prefix_caching", "num_blocks", "seed"))
    for role in ("prefill", "decode", "colocated"):
        count = getattr(schedule, role)
        gone = f"{role[0]}{count - 1}"
        left_alone = all(isinstance(e, Ask) or getattr(e, "name", ROUTER) != gone for e in schedule.events)
        if count > (role != "colocated") and left_alone:
            yield replace(schedule, **{role: count - 1})


def _simpler_events(event: Event) -> Iterator[Event]:
    change: Any = replace
    what_it_is = ("name", "method", "answers", "how")
    yield from _to_defaults(event, [field.name for field in fields(event) if field.name not in what_it_is])
    if isinstance(event, Spoil) and event.how == "flip" and event.nth:
        yield change(event, nth=0, amount=_IN_A_PAYLOAD)
    for field in fields(event):
        value = getattr(event, field.name)
        if value != field.default:
            yield from (change(event, **{field.name: less}) for less in _lesser(value) if less != field.default)


def _lesser(value: Any) -> Iterator[Any]:
    """Of a number: a smaller one, or one with a digit less."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        yield from (value // 2, value - 1)
    elif isinstance(value, float):
        digits = len(repr(value).partition(".")[2])
        if (rounded := round(value, digits - 1)) != value:
            yield rounded


def _to_defaults(value: Any, names: Any) -> Iterator[Any]:
    plain = {f.name: f.default for f in fields(value) if f.name in names}
    for name, default in plain.items():
        if getattr(value, name) != default:
            yield replace(value, **{name: default})
