"""The native API from Python: Client and AsyncClient, one shape, typed errors, neither torch nor ray.

with Client() as client:
    print(client.generate("The capital of France is", max_tokens=8).text)
    for chunk in client.stream([{"role": "user", "content": "Hello!"}]):
        print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

import grpc
import grpc.aio

from protos import router_pb2 as pb
from protos import worker_pb2
from protos.router_pb2_grpc import RouterServiceStub
from workers.errors import InvalidRequestError, KVFerryError, UnavailableError
from workers.request import FinishReason, Timeline
from workers.rpc import error_from_rpc
from workers.wire import reason_from_pb, timeline_from_pb

if TYPE_CHECKING:
    from protos.router_pb2_grpc import RouterServiceAsyncStub

DEFAULT_TARGET = "127.0.0.1:8001"
# A string, token ids, or the messages of a chat, each {"role": ..., "content": ...}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
_STATUS_TIMEOUT_S = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.primary_user_agent", "kvferry"),
)


class Sampling(TypedDict, total=False):
    """How to choose tokens; what is not given takes the router's default. temperature 0 is greedy."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None


class Options(Sampling, total=False):
    # Empty: the only model served.
    model: str
    # Empty: the router chooses one.
    request_id: str
    # None: as long as it takes.
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer: output tokens [index, index + len(token_ids)). The last has all that follows `text`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timeline: Timeline | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    ttft_s: float
    tpot_s: float


def build_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Raises InvalidRequestError for a prompt or a parameter that cannot be sent."""
    known = Options.__optional_keys__
    if unknown := options.keys() - known:
        raise InvalidRequestError(f"unknown parameter {min(unknown)!r}; known: {', '.join(sorted(known))}")
    fields = {key: value for key, value in options.items() if key in Sampling.__annotations__ and value is not None}
    try:
        request = pb.GenerateRequest(
            request_id=options.get("request_id", ""),
            model=options.get("model", ""),
            params=worker_pb2.SamplingParams(**fields),  # type: ignore[arg-type]
        )
        _set_prompt(request, prompt)
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"the request cannot be sent: {exc}") from None
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt):
        request.token_ids.token_ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    elif all(isinstance(item, Mapping) for item in prompt):
        request.messages.messages.extend(pb.ChatMessage(**item) for item in prompt)  # type: ignore[arg-type]
    else:
        raise TypeError("prompt must be text, token ids, or chat messages {'role': ..., 'content': ...}")


def chunk_from_pb(message: pb.GenerateResponse) -> Chunk:
    reason = reason_from_pb(message.finish_reason)
    chunk = (message.request_id, message.index, tuple(message.token_ids), message.text)
    if reason is None:
        return Chunk(*chunk)
    usage = Usage(message.usage.num_prompt_tokens, message.usage.num_completion_tokens)
    return Chunk(*chunk, reason, usage, timeline_from_pb(message.timeline), message.ttft_s, message.tpot_s)


def completion_of(chunks: Sequence[Chunk]) -> Completion:
    """The whole answer of a stream that was read to its end."""
    last = chunks[-1]
    assert last.finish_reason
    assert last.usage
    assert last.timeline
    return Completion(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timeline=last.timeline,
        ttft_s=last.ttft_s or 0.0,
        tpot_s=last.tpot_s or 0.0,
    )


def _require_end(chunk: Chunk | None) -> None:
    if chunk is None or chunk.finish_reason is None:
        raise UnavailableError("the answer ended without a finish reason; the router may have stopped: try again")


def _error(exc: grpc.RpcError, target: str) -> KVFerryError:
    error = error_from_rpc(exc)
    assert isinstance(exc, (grpc.Call, grpc.aio.AioRpcError))
    if isinstance(error, UnavailableError) and "kvferry-error" not in dict(exc.trailing_metadata() or ()):
        return UnavailableError(f"no router answers at {target}; start one with `kvferry up`, or give its target")
    return error


class Client:
    """Blocking. One per process is enough; safe to share between threads."""

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self.target = target
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        with closing(self.stream(prompt, **options)) as chunks:
            return completion_of(list(chunks))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        call = self._stub.Generate(build_request(prompt, options), timeout=options.get("timeout_s"))
        chunk = None
        try:
            for message in call:
                chunk = chunk_from_pb(message)
                yield chunk
            _require_end(chunk)
        except grpc.RpcError as exc:
            raise _error(exc, self.target) from None
        finally:
            call.cancel()

    def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        try:
            return self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as exc:
            raise _error(exc, self.target) from None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Client for asyncio; to be made inside the running loop."""

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub: RouterServiceAsyncStub = RouterServiceStub(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Wait for the whole answer. Raises KVFerryError."""
        async with aclosing(self.stream(prompt, **options)) as chunks:
            return completion_of([chunk async for chunk in chunks])

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Chunk]:
        """The answer as it comes; closing the iterator cancels the request. Raises KVFerryError."""
        call = self._stub.Generate(build_request(prompt, options), timeout=options.get("timeout_s"))
        chunk = None
        try:
            async for message in call:
                chunk = chunk_from_pb(message)
                yield chunk
            _require_end(chunk)
        except grpc.aio.AioRpcError as exc:
            raise _error(exc, self.target) from None
        finally:
            call.cancel()

    async def status(self, timeout_s: float = _STATUS_TIMEOUT_S) -> pb.GetStatusResponse:
        try:
            return await self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise _error(exc, self.target) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
