"""Both clients over real gRPC, with a router that breaks off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.client import Client
from cluster.routers import Patience, Routers
from protos import router_pb2 as pb
from protos import worker_pb2
from tests.cluster.fake_router import WORDS, FakeRouter, serving
from tests.cluster.test_client import both, run
from workers.errors import DeadlineError, KVFerryError, UnavailableError
from workers.rpc import ACCEPTED_KEY

SEED = 2**64 - 1


class BreakingRouter(FakeRouter):
    """Breaks off after so many words of each call, then of the next; the last call is answered to its end."""

    def __init__(self, num_words: Sequence[int], accepts: bool = True, forgets: bool = False) -> None:
        super().__init__()
        self._num_words = num_words
        self._accepts = accepts
        self._forgets = forgets

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        if self._accepts:
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
        num_calls = len(self.requests)
        start = 0 if self._forgets else len(request.output_token_ids[0].token_ids) if request.output_token_ids else 0
        end = start + self._num_words[num_calls - 1] if num_calls <= len(self._num_words) else len(WORDS)
        for index in range(start, end):
            seed = None if index else SEED
            yield pb.GenerateResponse(
                request_id="r1", index=index, token_ids=[index + 10], text=WORDS[index], seed=seed
            )
        if num_calls <= len(self._num_words):
            # A client does not always hear of metadata that come together with the end.
            await asyncio.sleep(0.1)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        usage = pb.Usage(num_completion_tokens=end)
        stop = worker_pb2.FINISH_REASON_STOP
        yield pb.GenerateResponse(
            request_id="r1", index=end, finish_reason=stop, usage=usage, timeline=worker_pb2.Timeline()
        )


@both
def test_an_answer_goes_on_where_it_broke_off(kind):
    with serving(BreakingRouter([1, 2, 0])) as router:
        completion = run(router.target, kind, "hi", max_tokens=4)
    assert (completion.text, completion.token_ids) == ("".join(WORDS), (10, 11, 12, 13))
    assert completion.usage.num_completion_tokens == 4
    held = [list(request.output_token_ids[0].token_ids) for request in router.requests[1:]]
    assert held == [[10], [10, 11, 12], [10, 11, 12]]
    assert not router.requests[0].params.HasField("seed")
    assert {request.params.seed for request in router.requests[1:]} == {SEED}
    assert len({request.request_id for request in router.requests}) == 1
    assert router.requests[0].request_id
    assert {(request.text, request.params.max_tokens) for request in router.requests} == {("hi", 4)}


@both
def test_a_new_client_sends_again_what_a_router_had_taken_and_nothing_else(kind):
    with serving(BreakingRouter([0, 0])) as router:
        assert run(router.target, kind, "hi").token_ids == (10, 11, 12, 13)
        assert [len(request.output_token_ids) for request in router.requests] == [0, 0, 0]
    with serving(BreakingRouter([0, 0], accepts=False)) as router:
        with pytest.raises(UnavailableError, match="no router answers"):
            run(router.target, kind, "hi")
        assert len(router.requests) == 1


@both
def test_an_answer_that_does_not_fit_on_is_an_error(kind):
    with (
        serving(BreakingRouter([2], forgets=True)) as router,
        pytest.raises(KVFerryError, match="token 2 is next, 0 came: a gap"),
    ):
        run(router.target, kind, "hi")


def test_a_client_that_has_met_its_router_waits_for_it_as_long_as_it_may():
    with serving() as router:
        client = Client(router.target)
        client.status()
    began_s = time.monotonic()
    with client, pytest.raises(UnavailableError, match="no router answers"):
        client.generate("hi", timeout_s=1.0)
    assert 0.2 < time.monotonic() - began_s < 2.0


def failed(status: grpc.StatusCode, *accepted: tuple[str, str]) -> grpc.aio.AioRpcError:
    """A call that came to no router, or to one that `accepted` it and has not answered."""
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(*accepted), grpc.aio.Metadata())


def test_time_that_runs_out_within_another_try_does_not_hide_that_no_router_answers():
    routers = Routers("127.0.0.1:1")
    routers.heard = True
    gone, late = failed(grpc.StatusCode.UNAVAILABLE), failed(grpc.StatusCode.DEADLINE_EXCEEDED)
    patience = Patience(routers, "key", 10.0)
    patience.pause_s(gone)
    with pytest.raises(UnavailableError, match="no router answers"):
        patience.pause_s(late)
    # A router that had it, or was heard since, is what was too slow.
    with pytest.raises(DeadlineError):
        patience.pause_s(failed(grpc.StatusCode.DEADLINE_EXCEEDED, (ACCEPTED_KEY, "1")))
    patience.heard()
    with pytest.raises(DeadlineError):
        patience.pause_s(late)
