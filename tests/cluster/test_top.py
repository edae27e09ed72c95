"""kvferry top: frames of any size, several routers, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

from cluster.cli import run as kvferry
from cluster.rates import Rates
from cluster.render_lanes import SPAN_S, lane
from cluster.render_top import blocks_bar, frame
from cluster.top import Looked
from protos import router_pb2, worker_pb2
from tests.cluster.fake_router import serving

NOW_S = 1_800_000_000.0


def trace(name: str, ago_s: float, **timeline: Any) -> router_pb2.Trace:
    one = router_pb2.Try(
        prefill="prefill-0",
        decode="decode-0",
        elapsed_s=sum(seconds for phase, seconds in timeline.items() if phase != "transfer_s"),
        timeline=worker_pb2.Timeline(**timeline),
    )
    return router_pb2.Trace(request_id=name, arrived_unix_s=NOW_S - ago_s, tries=[one], num_tries=1, outcome="length")


def worker(name: str, role: str, **stats: Any) -> router_pb2.WorkerStatus:
    blocks: dict[str, Any] = {"blocks_total": 100, "blocks_free": 100} | stats
    told = worker_pb2.WorkerStats(name=name, role=role, incarnation=name, **blocks)
    return router_pb2.WorkerStatus(address="127.0.0.1:1", state=router_pb2.WORKER_STATE_READY, stats=told)


def looked(num_workers: int, num_requests: int = 100) -> Looked:
    workers = [worker(f"{role}-{at}", role) for at in range(num_workers // 2) for role in ("prefill", "decode")]
    status = router_pb2.GetStatusResponse(
        name="kvferry", ready=True, routers=[router_pb2.RouterStatus(name="router-0")], workers=workers
    )
    traces = [trace(f"chatcmpl-{at:032x}", at / 10, prefill_s=1.0, decode_s=2.0) for at in range(num_requests)]
    return Looked("127.0.0.1:1", status, router_pb2.GetActivityResponse(now_unix_s=NOW_S, traces=traces))


def lines_of(routers: list[Looked], width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(frame(routers, Rates(), ConsoleDimensions(width, height)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (120, 40), (250, 70)])
@pytest.mark.parametrize("num_workers", [2, 8, 40, 200])
@pytest.mark.parametrize("num_routers", [1, 3])
def test_a_frame_fits_any_terminal_and_shows_workers_and_requests(size, num_workers, num_routers):
    width, height = size
    lines = lines_of([looked(num_workers)] * num_routers, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("prefill-0" in line for line in lines)
    assert sum(line.startswith("chatcmpl-") for line in lines) >= 4
    shown = sum(line.count("prefill-") + line.count("decode-") for line in lines)
    told = [line for line in lines if line.startswith("and ")]
    assert shown + sum(int(line.split()[1]) for line in told) == num_workers


def test_all_200_workers_are_seen_where_there_is_room():
    lines = lines_of([looked(200)], 250, 70)
    assert sum(line.count("prefill-") + line.count("decode-") for line in lines) == 200


def test_a_request_is_drawn_where_it_was_in_the_last_seconds():
    width = 60
    per_s = width / SPAN_S
    told = trace("r", 20.0, queued_s=2.0, prefill_s=5.0, transfer_s=3.0, transfer_unhidden_s=1.0, decode_s=8.0)
    line = lane(told, NOW_S, width).plain
    assert len(line) == width
    begin = int((SPAN_S - 20.0) * per_s)
    assert line[:begin].strip() == ""
    for glyph, from_s, to_s in (("░", 0, 2), ("█", 2, 7), ("»", 7, 8), ("▬", 8, 16)):
        middle = begin + int((from_s + to_s) / 2 * per_s)
        assert line[middle] == glyph, (glyph, line)
    assert line[begin + int(16 * per_s) + 1 :].strip() == ""


def test_a_try_that_failed_is_marked():
    told = trace("r", 10.0, prefill_s=2.0)
    told.tries[0].error = "its worker is gone"
    assert "x" in lane(told, NOW_S, 60).plain
    assert "x" not in lane(trace("r", 10.0, prefill_s=2.0), NOW_S, 60).plain


def test_a_bar_has_a_share_of_each_state_and_never_hides_one():
    blocks = {"blocks_free": 39, "blocks_cached": 20, "blocks_reserved": 10, "blocks_in_use": 30}
    bar = blocks_bar(worker("w", "decode", **blocks, blocks_quarantined=1), 20).plain
    assert [bar.count(glyph) for glyph in "█▒x░·"] == [6, 2, 1, 4, 7]


def test_rates_are_of_the_last_seconds_and_of_one_incarnation():
    rates = Rates()
    for at in range(10):
        rates.see([worker_pb2.WorkerStats(incarnation="a", num_output_tokens=100 * at if at < 5 else 500)], float(at))
    assert rates.of("a", "num_output_tokens") == pytest.approx(100 / 5)
    assert rates.total("num_output_tokens") == pytest.approx(100 / 5)
    rates.see([worker_pb2.WorkerStats(incarnation="b", num_output_tokens=7)], 10.0)
    assert (rates.of("a", "num_output_tokens"), rates.total("num_output_tokens")) == (None, None)


def test_without_a_terminal_it_prints_one_frame_of_all_routers(router, capsys):
    router.traces["there"] = trace("there", 1.0, prefill_s=0.5)
    with serving() as second:
        second.traces["elsewhere"] = trace("elsewhere", 1.0, prefill_s=0.5)
        assert kvferry(["top", "--target", f"{router.target}, {second.target}", "--interval-s", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for said in ("fake  ● ready", "2 running, 4 queued", "prefill-0", "decode-0", "there", "elsewhere"):
        assert said in out


def test_a_router_that_is_gone_is_said_and_the_others_are_shown(router, capsys):
    assert kvferry(["top", "--target", f"127.0.0.1:1,{router.target}", "--interval-s", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "127.0.0.1:1 does not answer, never heard; trying again" in out
    assert "prefill-0" in out


def test_where_nobody_answers_at_first_it_is_one_line_and_exit_code_1(capsys):
    assert kvferry(["top", "--target", "127.0.0.1:1", "--interval-s", "0.1"]) == 1
    assert capsys.readouterr().err.startswith("kvferry: no router answers at 127.0.0.1:1; ")


class Terminal:
    """`kvferry top` on a terminal of its own."""

    def __init__(self, target: str) -> None:
        self._end, far_end = pty.openpty()
        command = [sys.executable, "-m", "cluster.cli", "top", "--target", target, "--interval-s", "0.2"]
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(command, stdin=far_end, stdout=far_end, stderr=far_end, env=environment)
        os.close(far_end)
        self.shown = ""

    def until(self, text: str, within_s: float = 20.0) -> None:
        """Forgets what came before it."""
        deadline_s = time.monotonic() + within_s
        while text not in self.shown:
            assert time.monotonic() < deadline_s, self.shown[-2000:]
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._end, 65536).decode(errors="replace")
                except OSError:  # The other end is closed.
                    assert text in self.shown, self.shown[-2000:]
        self.shown = self.shown.partition(text)[2]


def test_on_a_terminal_it_goes_on_through_a_routers_death_and_ctrl_c_leaves_cleanly():
    with serving() as router:
        target = router.target
        terminal = Terminal(target)
        terminal.until("\x1b[?1049h")
        terminal.until("prefill-0")
    terminal.until("does not answer, last heard")
    terminal.until("trying again")
    assert terminal.process.poll() is None
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("\x1b[?1049l")
    assert terminal.process.wait(10) == 0
    assert "Traceback" not in terminal.shown
