"""When each phase of a try at a request began and how long it took, of what its workers have told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protos import router_pb2


class Phase(NamedTuple):
    name: str
    # Workers that it was spent on.
    on: str
    # Seconds after the request's arrival.
    began_s: float
    seconds: float
    # False: it goes on, as far as can be seen from here.
    told: bool = True


def phases_of(one: router_pb2.Try) -> Iterator[Phase]:
    """What took time, in order. The transfer goes on beside prefill, and ends with its unhidden part."""
    times, at_s = one.timeline, one.began_s
    in_order = {
        "queued": "",
        "prefill_queued": one.prefill,
        "prefill": one.prefill,
        "transfer_unhidden": f"{one.prefill} -> {one.decode}",
        "decode_queued": one.decode,
        "decode": one.decode,
    }
    for name, on in in_order.items():
        seconds = getattr(times, f"{name}_s")
        if name == "transfer_unhidden" and times.transfer_s:
            yield Phase("transfer", on, at_s + seconds - times.transfer_s, times.transfer_s)
        if seconds:
            yield Phase(name, on, at_s, seconds)
        at_s += seconds
    # Workers tell of their phases at their first and last tokens; messages between them take a little, too.
    if one.running:
        name = _going_on(one)
        untold_s = max(0.0, one.began_s + one.elapsed_s - at_s)
        yield Phase(name, in_order.get(name, f"{one.prefill} -> {one.decode}"), at_s, untold_s, told=False)


def distinct_phases(one: router_pb2.Try) -> list[Phase]:
    """Without the part of the transfer that the transfer itself shows."""
    return [phase for phase in phases_of(one) if phase.name != "transfer_unhidden"]


def _going_on(one: router_pb2.Try) -> str:
    if not one.prefill:
        return "queued"
    if not one.timeline.prefill_s:
        return "prefill"
    handed_over = one.prefill == one.decode or one.timeline.decode_queued_s or one.timeline.decode_s
    return "decode" if handed_over or one.num_tokens > len(one.choices) else "transfer"
