"""A request as a client has it answered so far: what came of it, and how it goes on when its router dies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from cluster.records import Chunk, Options, Prompt, build_request, chunk_from_pb
from cluster.routers import Patience, Routers
from protos import router_pb2 as pb
from workers.errors import KVFerryError, UnavailableError


class Answering:
    """Both clients send `request`, `take` what comes, and after an error wait for `patience` and send again."""

    def __init__(
        self, prompt: Prompt, options: Options, routers: Routers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request = build_request(prompt, options)
        # It keys the random numbers: chosen here, it is the same for every router.
        self._request.request_id = self._request.request_id or f"gen-{uuid.uuid4().hex}"
        # By choice that has not ended: its tokens. Empty before the first piece.
        self._so_far = self._request.output_token_ids
        self._unfinished = set(range(options.get("n") or 1))
        self.patience = Patience(routers, self._request.request_id, options.get("timeout_s"), clock)

    @property
    def ended(self) -> bool:
        return not self._unfinished

    @property
    def request(self) -> pb.GenerateRequest:
        """For what is still to come."""
        return self._request

    def take(self, message: pb.GenerateResponse) -> Chunk:
        """Raises KVFerryError when it is not the next piece."""
        self.patience.heard()
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
