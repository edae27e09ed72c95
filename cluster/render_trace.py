"""What `kvferry trace` shows: a request's tries, one bar for each phase."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from rich.bar import Bar
from rich.table import Table

from protos import router_pb2
from router.phases import phases_of


def title(trace: router_pb2.Trace) -> str:
    arrived = datetime.datetime.fromtimestamp(trace.arrived_unix_s).astimezone()
    tries = "1 try" if trace.num_tries == 1 else f"{trace.num_tries} tries"
    return (
        f"{trace.request_id}: {trace.outcome}, {1000 * trace.elapsed_s:.1f} ms, {tries}, "
        f"{trace.num_prompt_tokens} prompt tokens, arrived {arrived:%Y-%m-%d %H:%M:%S}"
    )


def table(trace: router_pb2.Trace) -> Table:
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    for name in ("try", "phase", "on"):
        shown.add_column(name, no_wrap=True)
    shown.add_column("ms", justify="right", no_wrap=True)
    shown.add_column("", ratio=1)
    first = trace.num_tries - len(trace.tries) + 1
    for number, one in enumerate(trace.tries, start=first):
        label = str(number)
        for phase in phases_of(one):
            bar = Bar(max(trace.elapsed_s, 1e-9), phase.began_s, phase.began_s + phase.seconds)
            shown.add_row(
                label, phase.name if phase.told else "not told yet", phase.on, f"{1000 * phase.seconds:.1f}", bar
            )
            label = ""
    return shown


def failures(trace: router_pb2.Trace) -> Iterator[str]:
    """A line for each try that failed."""
    first = trace.num_tries - len(trace.tries) + 1
    for number, one in enumerate(trace.tries, start=first):
        if one.error:
            yield f"try {number} failed after {one.num_tokens} tokens: {one.error}"
