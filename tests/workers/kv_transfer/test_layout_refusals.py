"""A receiver refuses KV that it cannot take, whatever the sender thinks of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from protos import kv_transfer_pb2 as pb
from protos import kv_transfer_pb2_grpc as pb_grpc
from tests.factories import make_worker
from tests.workers.kv_transfer.test_layout import CONVERTED, OTHER
from workers.errors import LayoutMismatchError
from workers.rpc import call


async def connect(**changes: object) -> pb.ConnectResponse:
    network = SimNetwork()
    worker = make_worker(network.host())
    await worker.start()
    stub = pb_grpc.KVTransferServiceStub(network.host().connect(worker.address))
    layout = replace(worker.layout, **changes)  # type: ignore[arg-type]
    try:
        return await call(
            stub.Connect(pb.ConnectRequest(checksum=True, incarnation="f" * 32, layout=layout.to_proto()), timeout=5)
        )
    finally:
        await worker.stop()


@pytest.mark.parametrize("field", OTHER)
def test_a_layout_that_cannot_be_converted_is_refused_at_connect_by_its_field(field):
    with pytest.raises(LayoutMismatchError, match=f"differ in {field}") as caught:
        run(connect(**{field: OTHER[field]}))
    assert caught.value.param == field


def test_what_the_sender_converts_is_welcome():
    assert run(connect(**CONVERTED)).incarnation
