"""The text layer of both APIs: prompt -> token ids -> Router.generate -> text, stop strings, usage and times."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

import xxhash

from router.limits import Limits, check_request_id, check_stops
from router.metrics import RouterMetrics
from router.stop_strings import StopStrings
from workers.detokenizer import Detokenizer
from workers.errors import BY_NAME, AbortedError, InvalidRequestError, KVFerryError, NotFoundError
from workers.request import FinishReason, SamplingParams, Timeline, TokenOutput, with_seed
from workers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

ROLES = ("system", "developer", "user", "assistant")


class Generator(Protocol):
    """The part of Router that text needs."""

    def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[TokenOutput, None]: ...


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request checked and tokenised."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stops: tuple[str, ...]
    # On the event loop's clock.
    arrived_s: float


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Output tokens [index, index + len(token_ids)) and the text that they made sure. From num_prompt_tokens on the
    fields are those of the whole answer, set on the last chunk, which has finish_reason.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    timeline: Timeline | None = None
    # Seconds from arrival to token 1, and per token after it.
    ttft_s: float = 0.0
    tpot_s: float = 0.0


class TextService:
    def __init__(
        self,
        router: Generator,
        tokenizer: Tokenizer,
        served_model_names: Sequence[str],
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._router = router
        self.tokenizer = tokenizer
        self.served_model_names = tuple(served_model_names)
        self.max_model_len = max_model_len
        self.metrics = RouterMetrics(self.served_model_names[0])
        self._limits = Limits(max_model_len, vocab_size)
        self._running: set[str] = set()

    def model_name(self, model: str | None) -> str:
        """The name to answer with; none given means the only model served. NotFoundError for another model's."""
        if not model:
            return self.served_model_names[0]
        if model not in self.served_model_names:
            raise NotFoundError(
                f"model {model[:200]!r} does not exist here; served: {', '.join(self.served_model_names)}",
                param="model",
                code="model_not_found",
            )
        return model

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        stops: Sequence[str] = (),
        default_max_tokens: int | None = None,
    ) -> TextRequest:
        """Check and tokenise. Raises InvalidRequestError, before any work. max_tokens None: default_max_tokens, or
        what max_model_len leaves."""
        arrived_s = asyncio.get_running_loop().time()
        check_request_id(request_id)
        check_stops(stops)
        param = "messages" if _is_chat(prompt) else "prompt"
        token_ids = self._token_ids(prompt, param)
        self._limits.check_prompt(token_ids, param)
        params = self._limits.complete_params(params, len(token_ids), default_max_tokens, param)
        return TextRequest(request_id, token_ids, with_seed(params, seed_of(request_id)), tuple(stops), arrived_s)

    async def complete(
        self, prompt: Prompt, params: SamplingParams, request_id: str, stops: Sequence[str] = ()
    ) -> AsyncGenerator[TextChunk, None]:
        async with aclosing(self.stream(self.prepare(prompt, params, request_id, stops))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """The answer in pieces, the last with finish_reason. Closing it aborts the request. Raises KVFerryError."""
        answer = _Answer(request, self.tokenizer, self.metrics)
        last: TextChunk | None = None
        try:
            # The router's generator has ended, or is closed and the workers told, before the last piece goes out.
            async with aclosing(self._generate(request)) as outputs:
                async for output in outputs:
                    chunk = answer.take(output)
                    if chunk.finish_reason is None:
                        yield chunk
                        continue
                    last = chunk
                    if output.finish_reason is None:
                        break  # A stop string: the router would go on.
        except KVFerryError as error:
            self.metrics.failed(type(error).__name__)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            logger.info("%s: aborted by the client after %d tokens", request.request_id, answer.num_tokens)
            self.metrics.finished(FinishReason.ABORTED, len(request.prompt_token_ids))
            raise
        if last is None:
            self.metrics.failed(KVFerryError.__name__)
            raise KVFerryError(f"{request.request_id}: the router's outputs ended without a finish_reason; try again")
        yield last

    async def _generate(self, request: TextRequest) -> AsyncGenerator[TokenOutput, None]:
        # Clients may repeat an id while its first use still runs; workers must not see it twice.
        unique = request.request_id
        while unique in self._running:
            unique = f"{request.request_id}.{uuid.uuid4().hex[:8]}"
        self._running.add(unique)
        try:
            async with aclosing(self._router.generate(request.prompt_token_ids, request.params, unique)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._running.discard(unique)

    def _token_ids(self, prompt: Prompt, param: str) -> Sequence[int]:
        if param == "messages":
            text = self.tokenizer.apply_chat_template(_checked(cast(Sequence[Message], prompt)))
        elif isinstance(prompt, str):
            text = prompt
        else:
            return list(cast(Sequence[int], prompt))
        if len(text) > self.max_model_len * self.tokenizer.max_token_chars:
            raise self._limits.too_long(f"your {param} has {len(text)} characters, which is more", param)
        try:
            # A chat template writes the special tokens itself.
            return self.tokenizer.encode(text, add_special_tokens=param == "prompt")
        except InvalidRequestError as error:
            error.param = param
            raise


class _Answer:
    """One answer as it grows: what to show of each output, and when it was heard."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer, metrics: RouterMetrics) -> None:
        self._request = request
        self._metrics = metrics
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.stops) if request.stops else None
        self._clock = asyncio.get_running_loop().time
        self._first_s = 0.0
        self._latest_s: float | None = None
        self.num_tokens = 0

    def take(self, output: TokenOutput) -> TextChunk:
        _raise_if_failed(output)
        if output.index != self.num_tokens:
            raise KVFerryError(
                f"{output.request_id}: token {self.num_tokens} is next, {output.index} came: a gap in the answer; retry"
            )
        token_ids, text = self._show(output)
        self._time(len(token_ids))
        index, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        stopped = self._stops is not None and self._stops.matched
        reason = FinishReason.STOP if stopped else output.finish_reason
        if reason is None:
            return TextChunk(index, token_ids, text)
        return self._last(index, token_ids, text if stopped else text + self._flush(), reason, output.timeline)

    def _show(self, output: TokenOutput) -> tuple[tuple[int, ...], str]:
        """The output's tokens up to the one that completes a stop string, and the text that may be shown."""
        # The token that stops an answer is no part of its text.
        silent = 1 if output.finish_reason is FinishReason.STOP else 0
        spoken = output.token_ids[: len(output.token_ids) - silent]
        if self._stops is None:
            return output.token_ids, self._detokenizer.push(spoken)
        text = ""
        for count, token_id in enumerate(spoken, start=1):
            text += self._stops.push(self._detokenizer.push((token_id,)))
            if self._stops.matched:
                return output.token_ids[:count], text
        return output.token_ids, text

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        return rest if self._stops is None else self._stops.flush() + rest

    def _time(self, count: int) -> None:
        if not count:
            return
        now_s = self._clock()
        if self._latest_s is None:
            self._first_s = now_s
            self._metrics.first_token(now_s - self._request.arrived_s)
            self._metrics.tokens(count, None)
        else:
            self._metrics.tokens(count, now_s - self._latest_s)
        self._latest_s = now_s

    def _last(
        self, index: int, token_ids: tuple[int, ...], text: str, reason: FinishReason, timeline: Timeline | None
    ) -> TextChunk:
        arrived_s, end_s = self._request.arrived_s, self._clock()
        tpot_s = (end_s - self._first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0
        num_prompt_tokens = len(self._request.prompt_token_ids)
        self._metrics.finished(reason, num_prompt_tokens)
        self._metrics.times(end_s - arrived_s, tpot_s, timeline)
        ttft_s = self._first_s - arrived_s if self._latest_s is not None else 0.0
        return TextChunk(
            index, token_ids, text, reason, num_prompt_tokens, self.num_tokens, timeline, ttft_s=ttft_s, tpot_s=tpot_s
        )


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def seed_of(request_id: str, tenant: str = "") -> int:
    """The seed of a request that names none: the same request id draws the same tokens."""
    return xxhash.xxh64_intdigest(f"{tenant}\0{request_id}".encode())


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    for at, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise InvalidRequestError(
                f"messages[{at}].role is {message['role'][:40]!r}; supported: {', '.join(ROLES)}", param="messages"
            )
    return messages


def _raise_if_failed(output: TokenOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise BY_NAME.get(output.error_type, KVFerryError)(output.error_message or "the request failed; try again")
    if output.finish_reason is FinishReason.ABORTED:
        raise AbortedError(f"{output.request_id} was aborted on its worker; try again")
