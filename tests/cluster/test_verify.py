"""`kvferry verify` over real workers and routers on the virtual clock, and the command over what a router answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.cli import run as command
from cluster.sim.loop import run
from cluster.sim.network import drop
from cluster.verify import Finding, unaccounted, verify, wrong_books
from protos import router_pb2 as pb
from protos import worker_pb2
from tests.factories import GREEDY, LEASE_S, SimCluster, prompt_of, sim_cluster


async def findings(cluster: SimCluster) -> list[Finding]:
    audits = [await cluster.router.audit()]
    return [*wrong_books(audits), *unaccounted(audits)]


def test_books_add_up_at_any_moment_and_every_request_is_accounted_for_within_a_moment():
    async def main() -> None:
        async with sim_cluster(prefill=2, decode=2, enable_prefix_caching=True, num_gpu_blocks_override=48) as cluster:
            params = replace(GREEDY, max_tokens=25)
            asking = [
                asyncio.create_task(cluster.choices(prompt_of(20 + 3 * i), replace(params, n=1 + i % 2), f"r{i}"))
                for i in range(12)
            ]
            num_owners = 0
            while not all(task.done() for task in asking):
                first = {finding.request_id for finding in await findings(cluster)}
                audit = await cluster.router.audit()
                assert not list(wrong_books([audit]))
                num_owners = max(num_owners, sum(len(worker.audit.owners) for worker in audit.workers))
                await asyncio.sleep(0.05)
                assert not first & {finding.request_id for finding in await findings(cluster)}
            assert num_owners > 4
            await cluster.until_idle(0.5)
            assert await findings(cluster) == []

    run(main())


def test_what_nobody_waits_for_is_found_until_deadline_and_lease_end_it():
    async def main() -> None:
        async with sim_cluster(idle_within_s=1) as cluster:
            cluster.network.fault("Commit", drop)
            cluster.network.fault("Release", drop)
            cluster.network.fault("Abort", drop)
            async with aclosing(cluster.router.generate(prompt_of(6), GREEDY, "lost")) as stream:
                await anext(stream)
            await asyncio.sleep(1)
            found = await findings(cluster)
            assert {(one.where, one.what) for one in found} >= {
                ("d0", "waiting_for_kv, and no router waits for it here")
            }
            assert all(one.request_id.startswith("lost#") for one in found)
            await asyncio.sleep(2 * LEASE_S + 1)
            assert await findings(cluster) == []

    run(main())


def test_a_request_that_its_workers_forgot_is_found():
    async def main() -> None:
        async with sim_cluster() as cluster:
            stream = cluster.router.generate(prompt_of(6), replace(GREEDY, max_tokens=100), "r")
            async with aclosing(stream):
                await anext(stream)
                await anext(stream)
                (request,) = cluster.workers["d0"].engine.sequences()
                cluster.workers["d0"].engine.abort(request.request_id)
                await asyncio.sleep(0.1)
                (found,) = await findings(cluster)
                assert (found.where, found.what) == ("router router-1", "waits for it, and no worker has it")

    run(main())


def test_a_worker_that_does_not_answer_is_named():
    async def main() -> None:
        async with sim_cluster() as cluster:
            address = cluster.workers["d0"].address
            await cluster.kill("d0")
            assert [one.where for one in await findings(cluster)] == [address]

    run(main())


def audit_of(free: list[int], cached: list[int], owned: list[int], contradiction: str = "") -> pb.AuditRouterResponse:
    owner = worker_pb2.Ownership(request_id="a", router_id="router", state="running", block_ids=owned)
    audit = worker_pb2.AuditWorkerResponse(
        name="d0",
        blocks_total=4,
        free_block_ids=free,
        cached_block_ids=cached,
        owners=[owner] if owned else [],
        contradiction=contradiction,
    )
    attempts = [pb.Attempt(request_id="a", decode_address="h:1")] if owned else []
    return pb.AuditRouterResponse(
        incarnation="router", workers=[pb.WorkerAudit(address="h:1", audit=audit)], attempts=attempts
    )


CLEAN, LOST = audit_of([0, 1], [2], [3]), audit_of([0, 1], [2], [])
STRANGER = pb.AuditRouterResponse(incarnation="router", workers=CLEAN.workers)


@pytest.mark.parametrize(
    ("audit", "wrong"),
    [
        (CLEAN, ""),
        (LOST, "blocks [3] are neither free nor cached nor owned"),
        (audit_of([0, 1], [2, 3], [3]), "blocks [3] are free, cached or owned at once"),
        (audit_of([0, 0, 1], [2], [3]), "blocks [0] are free, cached or owned at once"),
        (audit_of([0, 1], [2], [3, 7]), "blocks [7] are not of its pool of 4"),
        (audit_of([0, 1], [2], [3], "leaked blocks [1]"), "its books contradict themselves: leaked blocks [1]"),
    ],
)
def test_books_that_do_not_add_up(audit, wrong):
    assert [one.what for one in wrong_books([audit])] == ([wrong] if wrong else [])


def test_what_does_not_add_up_yet_is_looked_at_again():
    looks = iter([STRANGER, STRANGER, CLEAN])
    said: list[str] = []
    report = verify(lambda: [next(looks)], said.append)
    assert report.clean
    assert len(said) == 2
    report = verify(lambda: [STRANGER], margin_s=0.6)
    assert [str(one) for one in report.findings] == ["d0: a: running, and no router waits for it here"]


def test_a_request_that_is_on_another_worker_than_its_router_asked_is_found():
    elsewhere = pb.AuditRouterResponse()
    elsewhere.CopyFrom(CLEAN)
    elsewhere.attempts[0].decode_address = "h:2"
    assert [one.request_id for one in unaccounted([elsewhere])] == ["a"]
    elsewhere.attempts[0].prefill_address = "h:1"
    assert list(unaccounted([elsewhere])) == []


def test_another_routers_requests_are_its_own():
    other = pb.AuditRouterResponse(incarnation="other", workers=CLEAN.workers)
    assert list(unaccounted([CLEAN, other])) == []
    assert [one.request_id for one in unaccounted([other])] == ["a"]


@pytest.mark.parametrize(("audit", "code"), [(CLEAN, 0), (LOST, 1)])
def test_the_command_shows_workers_and_says_by_its_exit_code_whether_something_leaks(router, capsys, audit, code):
    router.audits = [audit]
    assert command(["verify", "--target", router.target]) == code
    out = capsys.readouterr().out
    assert "d0" in out
    assert ("clean: every block" in out, "neither free nor cached" in out) == (code == 0, code == 1)
    assert command(["verify", "--json", "--target", router.target]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["clean"] is (code == 0)
    assert shown["workers"][0]["blocks_free"] == 2


def test_no_router_is_an_error_of_one_line(capsys):
    assert command(["verify", "--target", "127.0.0.1:1"]) == 1
    assert "no router answers at 127.0.0.1:1" in capsys.readouterr().err
