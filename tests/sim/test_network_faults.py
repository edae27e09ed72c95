"""What goes wrong on the simulated network: hosts die, messages get lost, late, doubled, damaged."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import SimNetwork, corrupt, delay, drop, duplicate
from protos import kv_transfer_pb2
from tests.sim.echo import Script, Stage, ask, ask_stream, observe, play, read_all
from workers.errors import ConfigError


def _on_stage(script: Script, seed: int = 0) -> Any:
    """Run a script on the simulated network alone."""
    return run(play(script, SimNetwork(seed).host()))[0]


def test_a_killed_host_breaks_what_it_served_and_cancels_what_it_asked_for():
    async def main() -> None:
        network = SimNetwork()
        victim, other = Stage(network.host()), Stage(network.host())
        await victim.open()
        await other.open()
        to_victim, to_other = other.network.connect(victim.address), victim.network.connect(other.address)
        calls = [observe(ask(c, b"hang")) for c in (to_victim, to_other)]
        tasks = [asyncio.create_task(c) for c in (*calls, read_all(ask_stream(to_victim, b"hang")))]
        await asyncio.sleep(1)
        network.kill(victim.address)
        unary, dead, stream = await asyncio.gather(*tasks)
        assert unary == dead == [grpc.StatusCode.UNAVAILABLE, ""]
        assert stream[-2:] == [grpc.StatusCode.UNAVAILABLE, ""]
        await asyncio.sleep(1)
        assert sorted(victim.echo.log) == ["got hang", "got hang", "stream cancelled", "unary cancelled"]
        assert other.echo.log == ["got hang", "unary cancelled"]
        for channel in (to_victim, to_other):
            assert await observe(ask(channel, b"again")) == [grpc.StatusCode.UNAVAILABLE, ""]
        assert other.echo.log == ["got hang", "unary cancelled"]
        await other.close()

    run(main())


def test_faults_drop_delay_duplicate_and_corrupt_messages():
    async def script(stage: Stage) -> None:
        network, channel = stage.network.network, stage.channel  # type: ignore[attr-defined]
        lost = network.fault("Unary", drop)
        assert await observe(ask(channel, b"a", timeout=3.0)) == [
            grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded",
        ]  # fmt: skip
        assert virtual_loop().time() >= 3
        lost.remove()
        lost = network.fault("Unary", drop, answers=True)
        assert (await observe(ask(channel, b"b", timeout=3.0)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stage.echo.log == ["got b"]
        lost.remove()
        network.fault("Unary", delay(5.0), count=1)
        began = virtual_loop().time()
        assert await observe(ask(channel, b"c")) == [b"re: c"]
        assert 5 < virtual_loop().time() - began < 5.01
        network.fault("Unary", duplicate, count=1)
        assert await observe(ask(channel, b"d")) == [b"re: d"]
        await asyncio.sleep(1)
        assert stage.echo.log[-2:] == ["got d", "got d"]
        network.fault("Unary", corrupt(-1, 1), answers=True, skip=1, count=1)
        assert [await observe(ask(channel, b"e")) for _ in range(3)] == [[b"re: e"], [b"re: d"], [b"re: e"]]
        network.fault("Stream", duplicate, answers=True, skip=1, count=1)
        assert (await read_all(ask_stream(channel, b"f")))[1:] == [b"one", b"two", b"two"]

    _on_stage(script)


def test_calls_overtake_each_other_but_a_streams_messages_do_not():
    async def script(stage: Stage) -> list[str]:
        await asyncio.gather(*(ask(stage.channel, b"%d" % i) for i in range(50)))
        return stage.echo.log

    orders = [_on_stage(script, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == sorted(f"got {i}" for i in range(50)) for order in orders)
    assert orders[0] != [f"got {i}" for i in range(50)]


def test_a_taken_port_is_refused_and_a_freed_one_given_again():
    async def main() -> None:
        network = SimNetwork()
        first, second = network.host(), network.host()
        server = first.server()
        assert await first.listen(server, "h", 9000) == "h:9000"
        with pytest.raises(ConfigError, match="9000"):
            await second.listen(second.server(), "h", 9000)
        first.kill()
        assert await second.listen(second.server(), "h", 9000) == "h:9000"

    run(main())


def test_a_frame_corrupted_on_the_way_is_other_bytes_of_the_same_length():
    message = kv_transfer_pb2.RenewRequest(incarnation="ab", grant_ids=[1, 2, 3])
    ((_, data),) = corrupt(2, 0xFF)(message.SerializeToString())
    assert len(data) == message.ByteSize()
    assert sum(a != b for a, b in zip(data, message.SerializeToString(), strict=True)) == 1
