"""A frame of `kvferry top`: routers, workers with their blocks, the latest requests with their phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.text import Text

from cluster.rates import Rates
from cluster.render_lanes import lane, lanes_legend
from protos import router_pb2
from router.ui.state import BLOCK_STATES, worker_state

if TYPE_CHECKING:
    from cluster.top import Looked

# Title, totals, and an empty line before workers and before requests.
_FIXED_LINES = 4
# At least so many lines are the requests', two of them headings.
_LEAST_REQUESTS = 7
_CELL_WIDTH = 25
_ROLES = ("prefill", "decode", "colocated", "")
_STATE_STYLES = {"ready": "green", "draining": "yellow", "unreachable": "red"}
# Of the states of blocks: what they are drawn with. Free ones come last.
_BLOCKS = {
    "in_use": ("█", "blue"),
    "reserved": ("▒", "yellow"),
    "quarantined": ("x", "red"),
    "cached": ("░", "cyan"),
    "free": ("·", "bright_black"),
}


def frame(routers: Sequence[Looked], rates: Rates, size: ConsoleDimensions) -> RenderableType:
    known = [one for one in routers if one.status is not None]
    current = [one for one in known if not one.error] or known
    status = current[0].status
    assert status is not None
    workers = sorted(status.workers, key=lambda worker: _ROLES.index(_role(worker)))
    head = [_title(status), _totals(current, rates, workers), *_router_lines(routers)]
    room = max(1, size.height - _FIXED_LINES - len(routers) - _LEAST_REQUESTS)
    shown = list(_workers(workers, rates, size.width, room))
    left = size.height - _FIXED_LINES - len(routers) - len(shown)
    requests = _requests(current, size.width, max(1, left))
    return Group(*head, Text(""), *shown, Text(""), *requests)


def _title(status: router_pb2.GetStatusResponse) -> Text:
    state = ("● ready", "bold green") if status.ready else ("▲ not ready", "bold red")
    text = Text.assemble((status.name, "bold"), "  ", state, f"  {', '.join(status.served_model_names)}")
    if status.reason:
        text.append(f"  {status.reason}", "yellow")
    return _one_line(text)


def _totals(current: Sequence[Looked], rates: Rates, workers: Sequence[router_pb2.WorkerStatus]) -> Text:
    routers = [router for one in current if one.status is not None for router in one.status.routers]
    running, queued = (sum(getattr(one, name) for one in routers) for name in ("num_running", "num_queued"))
    parts = (
        f"{running} running, {queued} queued",
        f"{rate(rates.total('num_output_tokens'))} output tokens/s",
        f"{rate(rates.total('num_prompt_tokens_computed'))} prompt tokens/s",
        f"KV {_bytes(rates.total('kv_bytes_received'))}",
        f"{len(workers)} workers",
    )
    return _one_line(Text("  ".join(parts)))


def _router_lines(routers: Sequence[Looked]) -> Iterator[Text]:
    for one in routers:
        if one.error:
            ago = f"last heard {time.monotonic() - one.heard_s:.0f} s ago" if one.heard_s else "never heard"
            yield _one_line(Text(f"{one.address} does not answer, {ago}; trying again", "bold red"))
            continue
        assert one.status is not None
        router = one.status.routers[0]
        latency = "  ".join(
            f"{name} {_ms(spread.p50_s)} p50, {_ms(spread.p99_s)} p99" if spread.count else f"{name} -"
            for name, spread in (("TTFT", one.activity.ttft), ("TPOT", one.activity.tpot))
        )
        yield _one_line(Text(f"{router.name}  {latency}  {one.status.http_endpoint}", "dim"))


def _workers(
    workers: Sequence[router_pb2.WorkerStatus], rates: Rates, width: int, room: int
) -> Iterator[RenderableType]:
    """At most `room` lines: one for each worker, or several workers in each."""
    legend = "  ".join(f"{glyph} {state.replace('_', ' ')}" for state, (glyph, _) in _BLOCKS.items())
    yield _one_line(Text.assemble(("workers", "bold"), (f"  blocks:  {legend}", "dim")))
    if len(workers) < room:
        name_width = min(24, max((len(_name(worker)) for worker in workers), default=0))
        yield from (_row(worker, rates, name_width, width) for worker in workers)
        return
    columns = max(1, width // _CELL_WIDTH)
    lines = [workers[at : at + columns] for at in range(0, len(workers), columns)]
    if len(lines) >= room:
        picked = _most_notable(workers, columns * max(1, room - 2))
        lines = [picked[at : at + columns] for at in range(0, len(picked), columns)]
    for line in lines:
        yield Text("").join(_cell(worker) for worker in line)
    if hidden := len(workers) - sum(map(len, lines)):
        yield Text(f"and {hidden} more, with fewer blocks taken", "dim")


def _most_notable(workers: Sequence[router_pb2.WorkerStatus], count: int) -> list[router_pb2.WorkerStatus]:
    """First those that are not ready, then those that are fullest; in their old order."""
    at = sorted(range(len(workers)), key=lambda at: (worker_state(workers[at]) == "ready", -_taken(workers[at])))
    return [workers[one] for one in sorted(at[:count])]


def _taken(worker: router_pb2.WorkerStatus) -> float:
    stats = worker.stats
    return (stats.blocks_in_use + stats.blocks_reserved + stats.blocks_quarantined) / max(1, stats.blocks_total)


def _row(worker: router_pb2.WorkerStatus, rates: Rates, name_width: int, width: int) -> Text:
    stats, state = worker.stats, worker_state(worker)
    row = Text.assemble(
        f"{_name(worker)[:name_width]:{name_width}} ",
        (f"{state:11} ", _STATE_STYLES.get(state, "")),
        blocks_bar(worker, max(8, min(40, width - name_width - 60))),
        f" {100 * _taken(worker):3.0f} %  ",
        f"{stats.num_running:3} run {stats.num_waiting + stats.num_waiting_for_kv:3} wait ",
    )
    counter = "num_prompt_tokens_computed" if stats.role == "prefill" else "num_output_tokens"
    row.append(f"{rate(rates.of(stats.incarnation, counter)):>6} tok/s")
    return _one_line(row)


def _cell(worker: router_pb2.WorkerStatus) -> Text:
    state = worker_state(worker)
    name = f"{_name(worker)[-13:]:13} "
    if state != "ready":
        return Text(f"{name}{state[: _CELL_WIDTH - 15]:{_CELL_WIDTH - 14}}", _STATE_STYLES.get(state, ""))
    return Text.assemble(name, blocks_bar(worker, 6), f"{worker.stats.num_running:4} ")


def blocks_bar(worker: router_pb2.WorkerStatus, width: int) -> Text:
    """A character for each share of the blocks; what there is at all has at least one, but for free ones."""
    total = max(1, worker.stats.blocks_total)
    bar = Text()
    for state in BLOCK_STATES:
        glyph, style = _BLOCKS[state]
        count = getattr(worker.stats, f"blocks_{state}")
        left = width - len(bar)
        length = left if state == "free" else min(left, max(1, round(width * count / total)) if count else 0)
        bar.append(glyph * length, style)
    return bar


def _requests(current: Sequence[Looked], width: int, room: int) -> Iterator[Text]:
    """At most `room` lines."""
    told = [(trace, one.activity.now_unix_s) for one in current for trace in one.activity.traces]
    told.sort(key=lambda pair: pair[0].arrived_unix_s, reverse=True)
    id_width = max(12, min(40, width // 4))
    yield _one_line(Text.assemble(("requests", "bold"), "  ", lanes_legend()))
    yield _one_line(Text(f"{'':{id_width}} {'tokens':>7} {'TTFT':>8} {'TPOT':>8}", "dim"))
    for trace, now_s in told[: room - 2]:
        ttft = _ms(trace.ttft_s) if trace.HasField("ttft_s") else "-"
        tpot = _ms(trace.tpot_s) if trace.HasField("tpot_s") else "-"
        line = Text(f"{trace.request_id[:id_width]:{id_width}} {trace.num_tokens:7} {ttft:>8} {tpot:>8}  ")
        yield _one_line(line.append_text(lane(trace, now_s, width - len(line))))


def rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f} MB/s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _role(worker: router_pb2.WorkerStatus) -> str:
    return worker.stats.role if worker.stats.role in _ROLES else ""


def _name(worker: router_pb2.WorkerStatus) -> str:
    return worker.stats.name or worker.address


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
