"""Many small calls over one stream: in Python's gRPC that costs about half of a call of its own for each.

A message is a number and the call's bytes; a number alone gives that call up. An answer is the number, and the error in
JSON if there was one. Calls of one stream run side by side.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import grpc
import grpc.aio

from workers import errors
from workers.errors import DeadlineError, KVFerryError, OverloadedError, UnavailableError

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 8


class StreamedCalls:
    """To one server: a stream is opened with the first call, and again with the first after one has ended."""

    def __init__(self, channel: grpc.aio.Channel, service: str, method: str) -> None:
        self._open: Any = channel.stream_stream(f"/{service}/{method}")
        self._stream: _Stream | None = None

    async def __call__(self, data: bytes, timeout_s: float) -> None:
        """Raises the KVFerryError that the other side answers with, UnavailableError or DeadlineError; UsageError when
        the channel is closed. `data` is not empty."""
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._open())
        stream = self._stream
        number, answer = stream.begin(data)
        try:
            async with asyncio.timeout(timeout_s):
                failure = await answer
        except TimeoutError:
            # What answers so late may not answer any more: others begin anew, too.
            stream.leave()
            raise DeadlineError(f"no answer within {timeout_s} s") from None
        except asyncio.CancelledError:
            stream.give_up(number)
            raise
        if failure is not None:
            raise failure


class _Stream:
    def __init__(self, call: Any) -> None:
        self.ended = False
        self._call = call
        self._numbers = count()
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers: dict[bytes, asyncio.Future[KVFerryError | None]] = {}
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    def begin(self, data: bytes) -> tuple[bytes, asyncio.Future[KVFerryError | None]]:
        number = next(self._numbers).to_bytes(_NUMBER_BYTES, "little")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._unsent.put_nowait(number + data)
        return number, answer

    def leave(self) -> None:
        """End it, on both sides."""
        self.ended = True
        self._call.cancel()

    def give_up(self, number: bytes) -> None:
        if self._answers.pop(number, None) is not None:
            self._unsent.put_nowait(number)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._unsent.get())
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # The reader hears why.
        except asyncio.CancelledError:
            pass  # The reader's end. A task that kept it would keep the call by it, and so the connection open.
        finally:
            self._call.cancel()

    async def _read(self) -> None:
        reason: KVFerryError = UnavailableError("the connection was closed")
        try:
            async for message in self._call:
                answer = self._answers.pop(message[:_NUMBER_BYTES], None)
                if answer is not None and not answer.done():
                    answer.set_result(_decoded(message[_NUMBER_BYTES:]))
            reason = UnavailableError("the other side ended the stream")
        except grpc.aio.AioRpcError as error:
            reason = UnavailableError(error.details() or error.code().name)
        except asyncio.CancelledError:
            pass  # The channel was closed, or the loop is about to be.
        finally:
            self._end(reason)

    def _end(self, reason: KVFerryError) -> None:
        self.ended = True
        self._writing.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(reason)
        self._answers.clear()


def add_streamed_calls(
    server: grpc.aio.Server, service: str, method: str, handle: Callable[[bytes], Awaitable[None]]
) -> None:
    """Let `handle` take each call's bytes. It is cancelled when its caller gives up or is gone."""

    async def serve(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        one_at_a_time, calls = asyncio.Lock(), dict[bytes, asyncio.Task[None]]()

        async def answer(number: bytes, data: bytes) -> None:
            try:
                failure = await _failure(handle(data))
            finally:
                # From here on it cannot be given up: an answer that is cut off half-way would cost all their stream.
                calls.pop(number, None)
            async with one_at_a_time:
                await context.write(number + failure)

        async with asyncio.TaskGroup() as group:
            async for message in messages:
                number, data = message[:_NUMBER_BYTES], message[_NUMBER_BYTES:]
                if data:
                    calls[number] = group.create_task(answer(number, data))
                elif number in calls:
                    calls[number].cancel()

    handlers: dict[str, Any] = {method: grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


async def _failure(handling: Awaitable[None]) -> bytes:
    try:
        await handling
    except KVFerryError as error:
        return _encoded(error)
    except Exception as error:
        logger.exception("a call failed")
        return _encoded(KVFerryError(f"{type(error).__name__}: {error}"))
    return b""


def _encoded(error: KVFerryError) -> bytes:
    more = [error.retry_after_s] if isinstance(error, OverloadedError) else []
    return json.dumps([type(error).__name__, error.message, error.param, error.code, *more]).encode()


def _decoded(failure: bytes) -> KVFerryError | None:
    if not failure:
        return None
    name, message, param, code, *more = json.loads(failure)
    error = errors.BY_NAME.get(name, KVFerryError)(message, param=param, code=code)
    if isinstance(error, OverloadedError) and more:
        error.retry_after_s = more[0]
    return error
