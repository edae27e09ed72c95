"""A request as a client has it answered so far: what came of it, and how it goes on when its router dies."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from cluster.records import Chunk, Options, Prompt, build_request, chunk_from_pb
from protos import router_pb2 as pb
from workers.backoff import pause_s
from workers.errors import KVFerryError, UnavailableError
from workers.rpc import ACCEPTED_KEY, error_from_rpc

# A router that died is started anew within a few seconds, and one that fell silent is replaced after ten.
_RESUME_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


@dataclass(slots=True)
class Target:
    """Where a client asks."""

    address: str
    api_key: str | None = field(default=None, repr=False)
    # Whether a router was ever there. Where none was, none is waited for.
    heard: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        api_key = self.api_key or os.environ.get("KVFERRY_API_KEY")
        return (("authorization", f"Bearer {api_key}"),) if api_key else ()

    def error(self, exc: grpc.RpcError) -> KVFerryError:
        """The typed error behind a failed call."""
        assert isinstance(exc, (grpc.Call, grpc.aio.AioRpcError))
        self.heard = self.heard or ACCEPTED_KEY in dict(exc.initial_metadata() or ())
        error = error_from_rpc(exc)
        if "kvferry-error" in dict(exc.trailing_metadata() or ()):
            self.heard = True
        elif isinstance(error, UnavailableError):
            reason = "start one with `kvferry up`, or give its target"
            return UnavailableError(f"no router answers at {self.address}; {reason}")
        return error


class Answering:
    """Both clients send `request()`, `take` what comes, and after an error wait for `pause_s` and send again."""

    def __init__(
        self, prompt: Prompt, options: Options, target: Target, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request = build_request(prompt, options)
        # It keys the random numbers: chosen here, it is the same for every router.
        self._request.request_id = self._request.request_id or f"gen-{uuid.uuid4().hex}"
        # By choice that has not ended: its tokens. Empty before the first piece.
        self._so_far = self._request.output_token_ids
        self._target = target
        self._clock = clock
        timeout_s = options.get("timeout_s")
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._unfinished = set(range(options.get("n") or 1))
        self._give_up_s: float | None = None
        self._num_failed = 0

    @property
    def ended(self) -> bool:
        return not self._unfinished

    @property
    def request(self) -> pb.GenerateRequest:
        """For what is still to come."""
        return self._request

    def time_left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    def take(self, message: pb.GenerateResponse) -> Chunk:
        """Raises KVFerryError when it is not the next piece."""
        self._target.heard = True
        self._give_up_s, self._num_failed = None, 0
        if message.choice not in self._unfinished:
            raise KVFerryError(f"{message.request_id}: choice {message.choice} goes on after its end; try again")
        for choice in self._unfinished:
            self._so_far.get_or_create(choice)
        held = self._so_far[message.choice].token_ids
        if message.index != len(held):
            raise KVFerryError(
                f"{message.request_id}: token {len(held)} is next, {message.index} came: a gap in the answer; try again"
            )
        held.extend(message.token_ids)
        if message.HasField("seed"):
            self._request.params.seed = message.seed
        chunk = chunk_from_pb(message)
        if chunk.finish_reason is not None:
            self._unfinished.remove(chunk.choice)
            del self._so_far[chunk.choice]
        return chunk

    def require_end(self) -> None:
        if self._unfinished:
            raise UnavailableError("the answer ended without a finish reason; the router may have stopped: try again")

    def pause_s(self, exc: grpc.RpcError) -> float:
        """How long to wait before sending again. Raises the error if that would be of no use, or has been for long."""
        error, now_s = self._target.error(exc), self._clock()
        if self._give_up_s is None:
            self._give_up_s = now_s + _RESUME_S
        give_up_s = self._give_up_s if self._deadline_s is None else min(self._give_up_s, self._deadline_s)
        self._num_failed += 1
        wait_s = pause_s(_FIRST_PAUSE_S, self._num_failed, self._request.request_id, _LONGEST_PAUSE_S)
        if not isinstance(error, UnavailableError) or not self._target.heard or now_s + wait_s > give_up_s:
            raise error from None
        return wait_s
