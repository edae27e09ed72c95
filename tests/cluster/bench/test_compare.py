"""The comparison: its contestants' processes, and what it makes of rows."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from cluster.bench.compare import kvferry, llama_cpp, server, vllm
from cluster.bench.compare.__main__ import main
from cluster.bench.compare.contestant import Command, Contestant
from cluster.bench.compare.goals import BATCH, COMPARISONS, METRICS, Ratio, ratios
from cluster.bench.compare.loads import LOADS
from cluster.bench.compare.report import markdown
from cluster.config import parse_config
from cluster.guard import start_time
from workers.errors import ConfigError, KVFerryError

SERVER = """
import asyncio, subprocess, sys
from pathlib import Path
from aiohttp import web
from tests.cluster.bench.stub_server import StubServer
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Path(sys.argv[2]).write_text(str(child.pid))
app = web.Application()
app.router.add_post("/v1/completions", StubServer(0.0, 0.0).complete)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


def contestant(*arguments: str) -> Contestant:
    return Contestant(
        "stub", "colocated", "fp32", lambda folder, port: [Command([sys.executable, "-c", arguments[0], str(port)])]
    )


def test_a_contestant_is_gone_with_all_that_stems_from_it(tmp_path: Path):
    def commands(folder: Path, port: int) -> Sequence[Command]:
        return [Command([sys.executable, "-c", SERVER, str(port), str(folder / "pid")])]

    began_s = time.monotonic()
    with server.running(Contestant("stub", "colocated", "fp32", commands), tmp_path) as running:
        assert 0 < running.ready_s < time.monotonic() - began_s
        child = int((tmp_path / "pid").read_text())
        assert start_time(child)
        assert os.getsid(child) != os.getsid(0)
    assert not start_time(child)


def test_one_that_ends_before_it_answers_says_why(tmp_path: Path):
    dies = contestant("raise SystemExit('no such model')")
    with pytest.raises(KVFerryError, match=r"ended with 1 before it answered: no such model; see .*stub"):
        server.running(dies, tmp_path).__enter__()


@pytest.mark.parametrize(("precision", "modes"), [("fp32", ["colocated", "1P1D"]), ("bf16", ["colocated", "1P1D"])])
def test_our_configs_are_valid(precision: str, modes: list[str]):
    assert [one.mode for one in kvferry.contestants("m.gguf", [precision], {})] == modes
    for mode in modes:
        config = kvferry.config_of("m.gguf", mode, precision, {"max_num_batched_tokens": 256})
        parsed = parse_config(yaml.safe_dump(config), mode)
        assert parsed.dtype == {"fp32": "float32", "bf16": "bfloat16"}[precision]
        assert parsed.max_num_batched_tokens == 256
        assert len(parsed.worker_roles()) == {"colocated": 1, "1P1D": 2}[mode]


def test_a_precision_of_each_role_is_for_roles():
    assert [one.mode for one in kvferry.contestants("m.gguf", ["int8+native"], {})] == ["1P1D"]
    config = kvferry.config_of("m.gguf", "1P1D", "int8+native", {})
    assert (config["prefill"]["quantization"], config["decode"]["quantization"]) == ("int8", "native")


def test_a_rival_that_is_not_there_or_not_tuned_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="llama-server"):
        list(llama_cpp.contestants(tmp_path, tmp_path / "m.gguf"))
    with pytest.raises(ConfigError, match="vLLM is not tuned without"):
        list(vllm.contestants(tmp_path, tmp_path, ["fp32"]))


def row(contestant: str, mode: str, precision: str, load: str, **figures: Any) -> dict[str, Any]:
    return {"contestant": contestant, "mode": mode, "precision": precision, "load": load, **figures}


ROWS = [
    row("kvferry", "colocated", "fp32", "batch16", out_tok_s=150.0, errors=0),
    row("kvferry", "1P1D", "native", "batch16", out_tok_s=210.0, errors=0),
    row("vllm", "colocated", "fp32", "batch16", out_tok_s=100.0, errors=0),
    row("vllm", "colocated", "bf16", "batch16", out_tok_s=110.0, errors=0),
    row("vllm", "colocated", "bf16", "batch16", out_tok_s=900.0, errors=3),
]


def test_ratios_are_of_equal_precision_and_of_each_side_s_best():
    found = {ratio.kind: ratio for ratio in ratios(ROWS)}
    assert (found["equal"].value, found["equal"].met) == (1.5, True)
    assert found["best"].value == pytest.approx(210 / 110)
    assert (found["best"].goal, found["best"].met) == (2.0, False)


def test_a_lower_ratio_is_better_where_lower_is_better():
    rows = [
        row("kvferry", "1P1D", "native", "mixed", itl_ms={"p99": 50.0}, ttft_ms={"p50": 9.0}),
        row("vllm", "colocated", "fp32", "mixed", itl_ms={"p99": 500.0}, ttft_ms={}),
    ]
    (found,) = ratios(rows)
    assert (found.value, found.goal, found.met) == (0.1, 0.12, True)


def test_of_several_rounds_the_best_counts():
    rows = [*ROWS, row("vllm", "colocated", "fp32", "batch16", out_tok_s=125.0, errors=0)]
    assert BATCH.best(rows) == ROWS[1]
    (equal,) = (ratio.value for ratio in ratios(rows) if ratio.kind == "equal")
    assert equal == pytest.approx(1.2)


def test_every_metric_is_of_a_load_there_is_and_no_comparison_is_twice():
    assert {metric.load for metric in METRICS} == {*LOADS, "start"}
    assert len({(one.metric, one.ours, one.rival) for one in COMPARISONS}) == len(COMPARISONS)


def test_the_tables_show_every_contestant_and_every_ratio():
    rows = [*ROWS, row("llama.cpp", "colocated", "native", "start", errors=1, first_error="gone")]
    text = markdown(rows)
    assert "| vllm | colocated | bf16 | - | - | 110 |" in text
    assert "| llama.cpp | colocated | native |" in text
    assert "1 failed" in text
    shown = [line for line in text.splitlines() if line.startswith("| batch16")]
    assert len(shown) == len(ratios(rows))
    assert "| 1.50 | over 1.2 | met |" in shown[0]
    assert "| 1.91 | over 2 | missed |" in shown[-1]


def test_a_ratio_to_nothing_is_infinite():
    capacity = next(one for one in COMPARISONS if one.goals == {"best": 2.0} and one.metric.load == "capacity")
    ours, theirs = (row(name, "1P1D", "fp32", "capacity", rate=rate) for name, rate in (("kvferry", 1.0), ("vllm", 0)))
    assert Ratio(capacity, "best", ours, theirs).met


def test_the_command_says_what_it_left_out_and_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dies = contestant("raise SystemExit('no memory')")
    monkeypatch.setattr(kvferry, "contestants", lambda *_: iter([dies]))
    result = CliRunner().invoke(main, ["--only", "kvferry,vllm", "--loads", "one", "--folder", str(tmp_path)], env={})
    assert result.exit_code == 0, result.output
    assert "left out: vllm: not installed; give its place with --vllm" in result.output
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert "no memory" in json.loads(line)["first_error"]
    assert (tmp_path / "table.md").read_text() in f"{result.output}\n"
