"""kvferry trace, over a router that has seen a worker die."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from cluster.cli import run as kvferry
from cluster.client import Client
from cluster.render_trace import failures, title
from cluster.sim.loop import run
from protos import router_pb2
from tests.cluster.fake_router import serving
from tests.factories import GREEDY, prompt_of, sim_cluster
from workers.errors import NotFoundError


def trace_of_a_death(ended: bool) -> router_pb2.Trace:
    """Of a request whose first decode worker died at its ninth output."""

    async def main() -> router_pb2.Trace:
        async with sim_cluster(1, 2) as cluster:
            async with aclosing(cluster.router.generate(prompt_of(10), GREEDY, "mine")) as stream:
                num_outputs = 0
                async for _ in stream:
                    num_outputs += 1
                    if num_outputs == 4:
                        await cluster.kill(next(name for name in cluster.busy() if name.startswith("d")))
                    if num_outputs == 6 and not ended:
                        return cluster.router.traces.tell("mine")[0]
            return cluster.router.traces.tell("mine")[0]

    return run(main())


def test_it_shows_each_try_its_workers_its_phases_and_why_it_failed(router, capsys):
    router.traces["mine"] = trace_of_a_death(ended=True)
    code = kvferry(["trace", "mine", "--target", router.target])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.startswith("mine: length, ")
    assert "2 tries, 10 prompt tokens" in out
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert [row[0] for row in rows if row[0].isdigit()] == ["1", "2"]
    first, second = router.traces["mine"].tries
    assert {first.decode, second.decode} == {"d0", "d1"}
    for one in (first, second):
        assert any(row[-3:-1] == [one.decode, f"{1000 * one.timeline.decode_s:.1f}"] for row in rows)
        assert f"{one.prefill} -> {one.decode}" in out
    assert "try 1 failed after 4 tokens: worker d" in out
    assert "try 2 failed" not in out


def test_a_request_that_runs_is_shown_so_far():
    trace = trace_of_a_death(ended=False)
    assert title(trace).startswith("mine: running, ")
    assert len(list(failures(trace))) == 1
    assert trace.tries[-1].running
    assert trace.tries[-1].timeline.prefill_s > 0


def test_an_unknown_id_is_one_line_and_a_typed_error(router, capsys):
    assert kvferry(["trace", "nobody", "--target", router.target]) == 1
    assert capsys.readouterr().err == "kvferry: no request 'nobody' is known here\n"
    with Client(router.target) as client, pytest.raises(NotFoundError):
        client.trace("nobody")


def test_every_router_of_the_cluster_is_asked(router, capsys):
    with serving() as second:
        second.traces["there"] = trace_of_a_death(ended=True)
        for targets in (f"{router.target},{second.target}", f"127.0.0.1:1,{second.target}"):
            assert kvferry(["trace", "there", "--target", targets]) == 0
            assert "2 tries" in capsys.readouterr().out
        assert kvferry(["trace", "nowhere", "--target", f"{router.target},{second.target}"]) == 1
        assert "no request 'nowhere'" in capsys.readouterr().err
