"""Peers: one connection to each incarnation, and none to one that was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import SimNetwork, delay, drop
from protos import kv_transfer_pb2 as pb
from tests.factories import make_config, make_worker
from tests.workers.kv_transfer.unsent import unsent
from workers.errors import DeadlineError, LayoutMismatchError, StaleGrantError, UnavailableError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import Frame
from workers.kv_transfer.grpc import GrpcTransport
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.peers import Peers
from workers.kv_transfer.transports import Transports
from workers.worker import Worker

OLD, NEW = "a" * 32, "b" * 32


class Stage:
    def __init__(self, network: SimNetwork, decode: Worker) -> None:
        self.network = network
        self.decode = decode
        host = network.host()
        self.peers = Peers(host, Transports([GrpcTransport(host)]), decode.layout, "f" * 32, make_config().transfer)

    def grant(self, incarnation: str = OLD) -> Grant:
        return Grant(1, incarnation, self.decode.address, 10.0, 0, 8)

    async def launch(self) -> None:
        """Another incarnation where the first was."""
        port = int(self.decode.address.rsplit(":", 1)[1])
        self.decode = make_worker(self.network.host(), incarnation=NEW, port=port)
        await self.decode.start()


def on_stage(script: Callable[[Stage], Awaitable[Any]]) -> None:
    async def main() -> None:
        network = SimNetwork()
        decode = make_worker(network.host(), incarnation=OLD)
        await decode.start()
        stage = Stage(network, decode)
        await script(stage)
        await stage.peers.close()
        await stage.decode.stop()

    run(main())


def test_a_peer_is_connected_to_once_and_gives_its_credits():
    async def script(stage: Stage) -> None:
        hook = stage.network.fault("Connect", delay(0.1))
        first, second = await asyncio.gather(stage.peers.get(stage.grant()), stage.peers.get(stage.grant()))
        assert first is second is await stage.peers.get(stage.grant())
        assert (hook.num_seen, first.window._value) == (1, 2)
        assert [p.incarnation for p in stage.peers.connected] == [OLD]

    on_stage(script)


def test_a_replaced_worker_is_a_new_peer_and_its_old_grants_are_refused():
    async def script(stage: Stage) -> None:
        old = await stage.peers.get(stage.grant(OLD))
        await stage.decode.stop()
        with pytest.raises(UnavailableError):
            await old.renew([1], 1.0)
        await stage.launch()
        new = await stage.peers.get(stage.grant(NEW))
        assert [p.incarnation for p in stage.peers.connected] == [new.incarnation] == [NEW]
        with pytest.raises(StaleGrantError):
            await stage.peers.get(stage.grant(OLD))

    on_stage(script)


def test_an_old_grant_does_not_break_the_connection_to_the_new_incarnation():
    async def script(stage: Stage) -> None:
        await stage.decode.stop()
        await stage.launch()
        new = await stage.peers.get(stage.grant(NEW))
        stage.network.fault("Renew", delay(0.1))
        renewing = asyncio.create_task(new.renew([7], 1.0))
        await asyncio.sleep(0.01)
        with pytest.raises(StaleGrantError):
            await stage.peers.get(stage.grant(OLD))
        assert await renewing == [7]
        assert await stage.peers.get(stage.grant(NEW)) is new

    on_stage(script)


def test_another_layout_is_refused_by_either_side():
    async def script(stage: Stage) -> None:
        stage.peers._layout = replace(stage.decode.layout, head_dim=64)
        with pytest.raises(LayoutMismatchError, match="head_dim") as caught:
            await stage.peers.get(stage.grant())
        assert caught.value.param == "head_dim"
        assert stage.peers.connected == []

    on_stage(script)


def test_another_layout_is_refused_by_the_asking_side_too(monkeypatch):
    async def script(stage: Stage) -> None:
        layout = stage.decode.layout
        # A peer that does not look.
        monkeypatch.setattr(
            type(layout), "require_convertible", _unless_it_is(layout, type(layout).require_convertible)
        )
        stage.peers._layout = replace(layout, head_dim=64)
        with pytest.raises(LayoutMismatchError, match="head_dim"):
            await stage.peers.get(stage.grant())

    on_stage(script)


def _unless_it_is(careless: KVLayout, require: Callable[[KVLayout, KVLayout], None]) -> Callable[..., None]:
    return lambda mine, theirs: None if mine is careless else require(mine, theirs)


def test_a_peer_that_does_not_answer_ends_the_wait_at_its_deadline():
    async def script(stage: Stage) -> None:
        stage.network.fault("Connect", drop)
        with pytest.raises(DeadlineError):
            await stage.peers.get(stage.grant())
        assert virtual_loop().time() == pytest.approx(make_config().transfer.rpc_timeout_s, abs=0.1)

    on_stage(script)


def test_who_still_has_a_peer_that_was_replaced_is_told_so():
    async def script(stage: Stage) -> None:
        old = await stage.peers.at(stage.decode.address)
        await stage.decode.stop()
        await stage.launch()
        await stage.peers.get(stage.grant(NEW))
        await asyncio.sleep(0.01)
        packed = old.pack(unsent(Frame(1, OLD, 0, 1, 0, 1, bytes(2))))
        for asked in (old.release(1, ""), old.renew([1], 1.0), old.commit(pb.CommitRequest()), old.send(packed)):
            with pytest.raises(UnavailableError, match="another incarnation"):
                await asked

    on_stage(script)


def test_a_peer_that_no_call_reaches_is_not_told_of_and_is_closed_after_a_while():
    async def script(stage: Stage) -> None:
        other = make_worker(stage.network.host(), incarnation="c" * 32)
        address = await other.start()
        gone = await stage.peers.known(address, "c" * 32)
        assert await gone.renew([1], 1.0) == [1]
        await other.stop()
        with pytest.raises(UnavailableError):
            await gone.renew([1], 1.0)
        assert stage.peers.connected == []
        await asyncio.sleep(61.0)
        assert stage.peers._peers
        await stage.peers.get(stage.grant())
        assert [peer.incarnation for peer in stage.peers._peers.values()] == [OLD]

    on_stage(script)


def test_nothing_is_kept_of_an_address_where_nobody_answers():
    async def script(stage: Stage) -> None:
        for port in range(1, 20):
            with pytest.raises(UnavailableError):
                await stage.peers.at(f"nowhere:{port}")
        assert not len(stage.peers._connecting)

    on_stage(script)


def test_whoever_is_cut_off_while_a_peer_is_replaced_leaves_no_connection_behind():
    async def script(stage: Stage) -> None:
        old = await stage.peers.get(stage.grant(OLD))
        closing = asyncio.Event()
        close = old.close

        async def slowly() -> None:
            await closing.wait()
            await close()

        old.close = slowly  # type: ignore[method-assign]
        await stage.decode.stop()
        await stage.launch()
        try:
            async with asyncio.timeout(1.0):
                await stage.peers.get(stage.grant(NEW))
        except TimeoutError:
            pass
        closing.set()
        assert [peer.incarnation for peer in stage.peers.connected] == [NEW]

    on_stage(script)
