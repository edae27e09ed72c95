"""Unary calls over one stream for each channel: in Python's gRPC a call by itself costs several times as much CPU.

What is called while a message is written goes with the next: the more there is to do, the fewer messages it takes. Both
sides see each call as gRPC would show it: with its deadline, cancellation, status and metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, NoReturn, TypeVar

import grpc
import grpc.aio

from protos import calls_pb2_grpc
from protos.calls_pb2 import Call, CallAnswer, CallFailure, MultiplexRequest, MultiplexResponse

logger = logging.getLogger(__name__)

M = TypeVar("M", Call, CallAnswer)
Write = Callable[[list[M]], Awaitable[None]]

_CODES = {code.value[0]: code for code in grpc.StatusCode}

Deserialise = Callable[[bytes], Any]
Metadata = Sequence[tuple[str, str]]


class MultiplexedChannel:
    """As much of a channel as a stub needs. The first call opens the stream, as does the first after its end."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub: Any = calls_pb2_grpc.MultiplexServiceStub(channel)
        self._stream: _Stream | None = None
        # What is a stream goes by itself.
        self.unary_stream = channel.unary_stream

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Deserialise,
        _registered_method: bool | None = False,
    ) -> Callable[..., asyncio.Future[Any]]:
        def begin(message: Any, *, timeout: float | None = None) -> asyncio.Future[Any]:
            """Ends with the response or AioRpcError; is cancelled when the channel is closed, as grpc.aio's calls are.
            Raises UsageError when it is closed already."""
            call = Call(method=method, request=request_serializer(message), timeout_s=timeout)
            return self._open_stream().begin(call, response_deserializer)

        return begin

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _open_stream(self) -> _Stream:
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._stub.Multiplex())
        return self._stream


class _Outbox(Generic[M]):
    """What is put while `write` is at work goes together, in order."""

    def __init__(self, write: Write[M]) -> None:
        self._write: Write[M] = write
        self._unsent: list[M] = []
        self._news = asyncio.Event()

    def put(self, one: M) -> None:
        self._unsent.append(one)
        self._news.set()

    def take_back(self, number: int) -> bool:
        """Whether what has this number was still unsent, and is not sent now."""
        kept = [one for one in self._unsent if one.number != number]
        found, self._unsent = len(kept) < len(self._unsent), kept
        return found

    async def run(self) -> NoReturn:
        while True:
            await self._news.wait()
            self._news.clear()
            batch, self._unsent = self._unsent, []
            await self._write(batch)


@dataclass(slots=True)
class _Pending:
    answer: asyncio.Future[Any]
    deserialise: Deserialise
    deadline: asyncio.TimerHandle | None


class _Stream:
    """The calls' side of one stream."""

    def __init__(self, stream: grpc.aio.StreamStreamCall[MultiplexRequest, MultiplexResponse]) -> None:
        self.ended = False
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._pending: dict[int, _Pending] = {}
        self._unsent = _Outbox[Call](lambda calls: stream.write(MultiplexRequest(calls=calls)))
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    def begin(self, call: Call, deserialise: Deserialise) -> asyncio.Future[Any]:
        call.number = number = next(self._numbers)
        answer = self._loop.create_future()
        deadline = self._loop.call_later(call.timeout_s, _miss, answer) if call.HasField("timeout_s") else None
        self._pending[number] = _Pending(answer, deserialise, deadline)
        answer.add_done_callback(partial(self._give_up, number))
        self._unsent.put(call)
        return answer

    def _give_up(self, number: int, answer: asyncio.Future[Any]) -> None:
        """Unless it has been answered: it was cancelled, or is late."""
        if self._forget(number) is not None and not self._unsent.take_back(number):
            self._unsent.put(Call(number=number))

    def _forget(self, number: int) -> _Pending | None:
        pending = self._pending.pop(number, None)
        if pending is not None and pending.deadline is not None:
            pending.deadline.cancel()
        return pending

    def _take(self, answered: CallAnswer) -> None:
        pending = self._forget(answered.number)
        if pending is None or pending.answer.done():
            return
        if answered.HasField("failure"):
            failure = answered.failure
            code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
            pending.answer.set_exception(_error(code, failure.details, failure.trailing_metadata))
            return
        try:
            response = pending.deserialise(answered.response)
        except Exception as error:  # noqa: BLE001  Only this call's: another version of kvferry may be there.
            reason = f"its answer cannot be read: {error}"
            pending.answer.set_exception(_error(grpc.StatusCode.INTERNAL, reason))
        else:
            pending.answer.set_result(response)

    async def _write(self) -> None:
        try:
            await self._unsent.run()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # The reader hears why.
        finally:
            self._stream.cancel()

    async def _read(self) -> None:
        reason: str | None = "the other side ended the stream"
        try:
            async for message in self._stream:
                for answered in message.answers:
                    self._take(answered)
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        except asyncio.CancelledError:
            reason = None  # The channel was closed, or the loop is about to be.
        finally:
            self._end(reason)

    def _end(self, reason: str | None) -> None:
        """All that wait hear of it, whoever ended it."""
        self.ended = True
        self._writing.cancel()
        for number in list(self._pending):
            pending = self._forget(number)
            if pending is None or pending.answer.done():
                continue
            if reason is None:
                pending.answer.cancel()
            else:
                pending.answer.set_exception(_error(grpc.StatusCode.UNAVAILABLE, reason))


def _miss(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))


def _error(code: grpc.StatusCode, details: str, metadata: Mapping[str, str] | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*(metadata or {}).items())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


class MultiplexService(calls_pb2_grpc.MultiplexServiceServicer):
    """Answers calls of the services that are added to it, as they are to a server."""

    def __init__(self) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Generated code adds the same ones twice."""

    async def Multiplex(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await _Served(self._handlers, context).run(request_iterator)


class _Served:
    """The answers' side of one stream."""

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], context: Any) -> None:
        self._handlers = handlers
        self._unsent = _Outbox[CallAnswer](lambda answers: context.write(MultiplexResponse(answers=answers)))
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, messages: AsyncIterator[MultiplexRequest]) -> None:
        """Until the caller is gone, with which all of its calls end."""
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(self._unsent.run())
            async for message in messages:
                for call in message.calls:
                    if call.method:
                        self._tasks[call.number] = group.create_task(self._answer(call))
                    else:
                        self._give_up(call.number)
            writing.cancel()

    async def _answer(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(call.timeout_s, self._give_up, call.number) if call.HasField("timeout_s") else None
        answer = CallAnswer(number=call.number)
        try:
            answer.response = await self._response(call)
        except _FailedError as failed:
            answer.failure.CopyFrom(failed.failure)
        except asyncio.CancelledError:
            if call.number not in self._tasks:
                raise
            answer.failure.CopyFrom(_failure(grpc.StatusCode.CANCELLED, "its server cancelled it"))
        except Exception as error:  # As grpc.aio does.
            logger.exception("%s failed", call.method)
            answer.failure.CopyFrom(_failure(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
        finally:
            self._tasks.pop(call.number, None)
            if deadline is not None:
                deadline.cancel()
        self._unsent.put(answer)

    async def _response(self, call: Call) -> bytes:
        handler = self._handlers.get(call.method)
        if handler is None or handler.unary_unary is None:
            raise _FailedError(_failure(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
        read, write = handler.request_deserializer, handler.response_serializer
        assert read, "generated code has both"
        assert write, "generated code has both"
        answering: Any = handler.unary_unary(read(call.request), _Context())  # type: ignore[arg-type]
        return write(await answering)

    def _give_up(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()


class _Context:
    """What handlers of unary calls do with theirs."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        raise _FailedError(_failure(code, details, trailing_metadata))


class _FailedError(Exception):
    def __init__(self, failure: CallFailure) -> None:
        self.failure = failure


def _failure(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> CallFailure:
    # Texts of exceptions may hold what is no character.
    readable = details.encode("utf-8", "replace").decode()
    return CallFailure(code=code.value[0], details=readable, trailing_metadata=dict(metadata))
