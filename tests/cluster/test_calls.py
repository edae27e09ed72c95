"""Calls of several threads that are cancelled together."""

from __future__ import annotations

import grpc

from cluster.connection import Calls
from protos import router_pb2 as pb
from protos.router_pb2_grpc import RouterServiceStub


def test_a_call_that_begins_while_the_others_are_cancelled_is_cancelled_too():
    """Else the map that is closed waits for its answer, and the router works on."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        stub = RouterServiceStub(channel)
        early, ended, late = (stub.Generate(pb.GenerateRequest(), wait_for_ready=True) for _ in range(3))
        calls = Calls()
        calls.add(early)
        calls.add(ended)
        calls.discard(ended)
        assert early.is_active()
        calls.cancel()
        calls.add(late)
        assert [call.is_active() for call in (early, ended, late)] == [False, True, False]
