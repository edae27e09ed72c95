"""What one request has got from one worker and nobody has read yet."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from protos import worker_pb2
from router.waits import Waits
from workers.errors import BY_NAME, KVFerryError, UnavailableError
from workers.request import FinishReason, TokenOutput
from workers.wire import output_from_pb

logger = logging.getLogger(__name__)


class Outputs:
    """Filled by the worker's stream, read by the request. What its reader was too late for comes as one output, so that
    a router that falls behind has less to do for each token."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[TokenOutput] = deque()
        self._error: KVFerryError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        # What else ends when the request has failed here.
        self.waits = Waits()

    def take(self, message: worker_pb2.TokenOutput) -> None:
        """As it came. What cannot be read fails this request and no other."""
        try:
            self.put(output_from_pb(message))
        except Exception as exc:  # Of a worker of another version, say.
            extra = {"request_id": message.request_id}
            logger.exception("%s: an output cannot be read", message.request_id, extra=extra)
            self.fail(
                UnavailableError(
                    f"an output of its worker cannot be read here: {type(exc).__name__}: {exc}; start routers and "
                    "workers from one version"
                )
            )

    def put(self, output: TokenOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self.fail(BY_NAME.get(output.error_type, KVFerryError)(output.error_message))
            return
        self._heard_s = self._loop.time()
        if not (self._arrived and _join(self._arrived[-1], output)):
            self._arrived.append(output)
        self._wake()

    def fail(self, error: KVFerryError) -> None:
        """The reader gets what has arrived, then this."""
        self._error = self._error or error
        self.waits.fail(self._error)
        self._wake()

    async def next(self) -> TokenOutput:
        """Raises what ended the request here once all that had arrived is read."""
        if not self._arrived:
            await self.arrival()
        return self._arrived.popleft()

    async def arrival(self) -> None:
        """Wait until there is something to read."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._reader = self._loop.create_future()
            await self._reader

    def limit_silence(self, seconds: float, error: KVFerryError) -> None:
        """From now until `close`: fail with `error` when nothing has come for so long.

        One timer a request: one a token would cost more than all else here.
        """
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look, seconds, error)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, seconds: float, error: KVFerryError) -> None:
        left_s = self._heard_s + seconds - self._loop.time()
        if left_s <= 0:
            self.fail(error)
        else:
            self._timer = self._loop.call_later(left_s, self._look, seconds, error)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _join(one: TokenOutput, output: TokenOutput) -> bool:
    """Append to `one` the tokens that follow its own; False: they do not."""
    follows = output.choice == one.choice and output.index == one.index + len(one.token_ids)
    if not follows or one.finish_reason is not None:
        return False
    one.token_ids += output.token_ids
    one.logprobs += output.logprobs
    one.finish_reason = output.finish_reason
    if output.timeline is not None:
        one.timeline = output.timeline if one.timeline is None else one.timeline | output.timeline
    return True
