from __future__ import annotations

import io
import socket

from rich.console import Console

from cluster.client import Chunk, Usage
from cluster.config import load_config
from cluster.demo import Transcript, demo_config
from cluster.render import timeline_table, work_table
from protos.worker_pb2 import WorkerStats
from tests.cluster.test_client import run
from workers.request import FinishReason
from workers.timeline import Timeline


def printed(*objects: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    for item in objects:
        console.print(item)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_several_answers_are_shown_line_by_line():
    console = Console(file=io.StringIO(), width=100)
    transcript = Transcript(console)
    words = [f"word{i} " for i in range(20)]
    for word in words:
        transcript.add("poem", Chunk("p", 0, (1,), word))
        transcript.add("ferry", Chunk("f", 0, (1,), word.upper()))
    for label in ("poem", "ferry"):
        end = Chunk("p", 20, (), "end\nlast", FinishReason.STOP, Usage(1, 20), Timeline(), 0.1, 0.1)
        transcript.add(label, end)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    poem = [line.removeprefix("    poem ") for line in lines if line.startswith("    poem ")]
    assert " ".join(poem).split() == [*"".join(words).split(), "end", "last"]
    assert len(poem) > 2
    assert len(poem) * 2 == len(lines)


def test_tables_fit_a_terminal(router):
    completion = run(router.target, "sync", "hi")
    stats = WorkerStats(name="decode-0", blocks_total=10, blocks_free=7, blocks_cached=3, kv_bytes_received=2_500_000)
    text = printed(timeline_table({"poem": completion}), work_table([stats]))
    assert "500.0" in text
    assert "10/10" in text
    assert "2.5" in text
    assert "…" not in text


def test_demo_takes_other_ports_where_its_own_are_taken():
    router = load_config(None).router
    try:
        busy = socket.create_server((router.host, router.http_port))
    except OSError:
        busy = None
    config = demo_config()
    assert config.router.http_port == 0
    assert config.name == "demo"
    if busy:
        busy.close()
