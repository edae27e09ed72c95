"""A request of `kvferry top` on its way through the latest seconds: prefill, transfer, decode, in one line."""

from __future__ import annotations

from rich.text import Text

from protos import router_pb2
from router.phases import distinct_phases

# Seconds that a line shows.
SPAN_S = 30.0
# Later ones are drawn over earlier ones. Not told apart by colour alone.
_GLYPHS = {
    "queued": ("░", "bright_black"),
    "prefill_queued": ("░", "bright_black"),
    # Where prefill hides it, prefill is seen.
    "transfer": ("»", "bold yellow"),
    "prefill": ("█", "blue"),
    "decode_queued": ("░", "bright_black"),
    "decode": ("▬", "green"),
}
_FAILED = ("x", "bold red")
_SHOWN = ("queued", "prefill", "transfer", "decode")


def lanes_legend() -> Text:
    names = [Text.assemble(_GLYPHS[name], f" {name}") for name in _SHOWN]
    return Text("  ").join((*names, Text.assemble(_FAILED, f" failed; {SPAN_S:.0f} s")))


def lane(trace: router_pb2.Trace, now_unix_s: float, width: int) -> Text:
    """`width` characters; the last one is now."""
    if width <= 0:
        return Text()
    cells: list[tuple[str, str]] = [(" ", "")] * width
    begin_s = trace.arrived_unix_s - (now_unix_s - SPAN_S)
    for one in trace.tries:
        phases = sorted(distinct_phases(one), key=lambda phase: list(_GLYPHS).index(phase.name))
        for phase in phases:
            first = _column(begin_s + phase.began_s, width)
            last = _column(begin_s + phase.began_s + phase.seconds, width)
            for at in range(max(0, first), min(width, last + 1)):
                cells[at] = _GLYPHS[phase.name]
        failed = _column(begin_s + one.began_s + one.elapsed_s, width)
        if one.error and 0 <= failed < width:
            cells[failed] = _FAILED
    return Text.assemble(*cells)


def _column(seconds: float, width: int) -> int:
    """Of so many seconds after the beginning of what is shown; what is now is the last one."""
    return min(width - 1, int(seconds / SPAN_S * width)) if seconds >= 0 else -1
