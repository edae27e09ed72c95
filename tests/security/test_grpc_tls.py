"""Who may speak to a worker's port, and to a router's, when security.tls is set: real handshakes over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from cluster.certs import issue_member, open_authority
from protos import worker_pb2, worker_pb2_grpc
from tests.security.certificates import DAYS, Certificates
from workers.errors import KVFerryError, UnavailableError
from workers.rpc import GrpcNetwork, add_bytes_method, call
from workers.tls import Membership


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """What is asked of a worker here."""

    async def GetStats(self, request: Any, context: Any) -> worker_pb2.GetStatsResponse:  # noqa: N802
        return worker_pb2.GetStatsResponse(stats=worker_pb2.WorkerStats(name="w"))

    async def StreamOutputs(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield worker_pb2.StreamOutputsResponse()

    async def StreamKVEvents(self, request: Any, context: Any) -> Any:  # noqa: N802
        while True:
            yield worker_pb2.StreamKVEventsResponse()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(folder: Path, *, for_clients: bool = False) -> AsyncIterator[str]:
    network = GrpcNetwork(Membership(folder))
    server = network.server(for_clients=for_clients)
    network.add_multiplexed(server, worker_pb2_grpc.add_WorkerServiceServicer_to_server, cast(Any, Servicer)())

    async def put(data: bytes) -> None:
        assert data == b"KV"

    add_bytes_method(server, "kvferry.v1.KVFrames", "Put", put)
    network.answer_bytes(server, "kvferry.v1.KVFrames", "PutShared", put)
    address = await network.listen(server, "127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.stop(None)


async def ask_all(channel: Any, network: GrpcNetwork) -> None:
    """Each kind of call that there is between processes."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    assert (await call(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5))).stats.name == "w"
    assert len([one async for one in stub.StreamOutputs(worker_pb2.StreamOutputsRequest(), timeout=5)]) == 1
    await call(channel.unary_unary("/kvferry.v1.KVFrames/Put")(b"KV", timeout=5))
    await network.bytes_caller(channel, "kvferry.v1.KVFrames", "PutShared")(b"KV", 5)


@pytest.mark.parametrize("multiplexed", [False, True])
def test_members_of_one_cluster_speak_to_each_other(ours: Certificates, multiplexed):
    async def main() -> None:
        async with serving(ours.member()) as address:
            network = GrpcNetwork(Membership(ours.member("one", "elsewhere")))
            channel = network.connect(address, multiplexed=multiplexed)
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            assert (await call(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5))).stats.name == "w"
            if not multiplexed:
                await ask_all(channel, network)
            await channel.close()

    asyncio.run(main())


def plain(address: str, own: Path) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


def without_certificate(address: str, own: Path) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials((own / "ca.crt").read_bytes())
    return grpc.aio.secure_channel(address, credentials)


@pytest.mark.parametrize("connect", [plain, without_certificate])
@pytest.mark.parametrize("for_clients", [False, True])
def test_who_shows_no_certificate_gets_nothing(ours: Certificates, connect: Callable[[str, Path], Any], for_clients):
    async def main() -> None:
        own = ours.member()
        async with serving(own, for_clients=for_clients) as address, connect(address, own) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(UnavailableError):
                await call(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5))

    asyncio.run(main())


@pytest.mark.parametrize("for_clients", [False, True])
def test_a_member_signed_by_another_authority_gets_nothing(ours: Certificates, foreign: Certificates, for_clients):
    async def main() -> None:
        async with serving(ours.member(), for_clients=for_clients) as address:
            channel = GrpcNetwork(Membership(foreign.member())).connect(address)
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(UnavailableError):
                await call(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5))
            await channel.close()

    asyncio.run(main())


def credentials_in(folder: Path) -> grpc.ChannelCredentials:
    ca, certificate, key = ((folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    return grpc.ssl_channel_credentials(ca, key, certificate)


def stub_of(channel: Any) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel)


@pytest.mark.parametrize("who", ["a client", "a member of another cluster"])
def test_a_workers_port_is_for_members_and_a_routers_for_clients_too(ours: Certificates, who):
    async def main() -> None:
        own = ours.client() if who == "a client" else ours.member("two")
        calls = {
            "GetStats": lambda channel: call(stub_of(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=5)),
            "StreamOutputs": lambda channel: call(
                stub_of(channel).StreamOutputs(worker_pb2.StreamOutputsRequest(), timeout=5).read()
            ),
            "Put": lambda channel: call(channel.unary_unary("/kvferry.v1.KVFrames/Put")(b"KV", timeout=5)),
            "PutShared": lambda channel: GrpcNetwork().bytes_caller(channel, "kvferry.v1.KVFrames", "PutShared")(
                b"KV", 5
            ),
        }
        async with serving(ours.member()) as address:
            for name, ask in calls.items():
                async with grpc.aio.secure_channel(address, credentials_in(own)) as channel:
                    with pytest.raises(
                        KVFerryError, match=r"this is one\.cluster\.kvferry|the certificate shown is not of it"
                    ):
                        await ask(channel)
                assert name
        async with (
            serving(ours.member(), for_clients=True) as address,
            grpc.aio.secure_channel(address, credentials_in(own)) as channel,
        ):
            await ask_all(channel, GrpcNetwork())

    asyncio.run(main())


def test_a_member_speaks_to_nobody_of_another_cluster(ours: Certificates):
    """By the same authority, and at an address that its certificate has."""

    async def main() -> None:
        async with serving(ours.member("two"), for_clients=True) as address:
            channel = GrpcNetwork(Membership(ours.member())).connect(address)
            with pytest.raises(UnavailableError):
                await call(stub_of(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=5))
            await channel.close()

    asyncio.run(main())


def test_new_certificates_are_taken_without_a_restart(ours: Certificates):
    """All three, of a new authority: what runs goes on, and whoever connects needs the new ones."""

    async def main() -> None:
        folder = ours.member()
        async with serving(folder) as address:
            network = GrpcNetwork(Membership(folder))
            channel = network.connect(address)
            stub = stub_of(channel)
            await call(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5))
            running = stub.StreamKVEvents(worker_pb2.StreamKVEventsRequest())
            await running.read()
            old = credentials_in(folder)
            issue_member(open_authority(ours.folder / "new authority"), folder, "one", [], DAYS)
            await asyncio.sleep(1.1)
            await call(stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5))
            async with grpc.aio.secure_channel(address, old) as late:
                with pytest.raises(UnavailableError):
                    await call(stub_of(late).GetStats(worker_pb2.GetStatsRequest(), timeout=5))
            async with grpc.aio.secure_channel(address, credentials_in(folder)) as new:
                await call(stub_of(new).GetStats(worker_pb2.GetStatsRequest(), timeout=5))
            for _ in range(3):
                assert await running.read() is not grpc.aio.EOF
            await channel.close()

    asyncio.run(main())


def test_files_that_do_not_fit_together_are_not_taken(ours: Certificates, foreign: Certificates):
    """Half of a rotation: the former ones are used until the other half is there."""

    async def main() -> None:
        folder, other = ours.member(), foreign.member()
        async with serving(folder) as address:
            for name in ("tls.key", "tls.crt", "ca.crt"):
                (folder / name).write_bytes((other / name).read_bytes())
                async with grpc.aio.secure_channel(address, credentials_in(ours.member("one", "former"))) as channel:
                    asked = call(stub_of(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=5))
                    if name == "ca.crt":
                        with pytest.raises(UnavailableError):
                            await asked
                    else:
                        await asked

    asyncio.run(main())
