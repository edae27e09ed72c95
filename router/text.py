"""The text layer of both APIs: prompt -> token ids -> Router.generate -> text, usage and times."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, cast

import xxhash

from router.answer import Answer, TextChunk, TextOptions, TextRequest
from router.limits import Limits, check_cache_salt, check_request_id, check_stops, check_terms
from router.metrics import RouterMetrics
from router.tenants import CALLER
from workers.errors import InvalidRequestError, KVFerryError, NotFoundError, OverloadedError
from workers.request import NO_TERMS, FinishReason, SamplingParams, Terms, TokenOutput, with_seed
from workers.tokenizer import LONG_CHARS, Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

NO_OPTIONS = TextOptions()
ROLES = ("system", "developer", "user", "assistant")


class Generator(Protocol):
    """The part of Router that text needs."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str = "",
        so_far: Mapping[int, Sequence[int]] | None = None,
        terms: Terms = NO_TERMS,
    ) -> AsyncGenerator[TokenOutput, None]: ...


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
        options: TextOptions = NO_OPTIONS,
    ) -> TextRequest:
        """Check, tokenise and charge the prompt to its caller. Raises InvalidRequestError, and OverloadedError when the
        caller's tokens are used up, before any work."""
        arrived_s = asyncio.get_running_loop().time()
        check_request_id(request_id)
        check_stops(options.stops)
        check_cache_salt(options.cache_salt)
        check_terms(options.terms)
        param = "messages" if _is_chat(prompt) else "prompt"
        token_ids = self._token_ids(prompt, param)
        self._limits.check_prompt(token_ids, param)
        params = self._limits.complete_params(params, len(token_ids), options.default_max_tokens, param)
        self._limits.check_so_far(options.so_far, params)
        caller = CALLER.get()
        terms = caller.terms(options.terms) if caller else options.terms
        params = with_seed(params, seed_of(request_id, terms.tenant))
        if caller is not None:
            caller.take_prompt(len(token_ids))
        return TextRequest(request_id, token_ids, params, options, arrived_s, terms, caller)

    async def prepared(
        self, prompt: Prompt, params: SamplingParams, request_id: str, options: TextOptions = NO_OPTIONS
    ) -> TextRequest:
        """`prepare`, but a long text is tokenised on a thread, where it holds up nobody's tokens."""
        if not isinstance(prompt, str) or len(prompt) <= LONG_CHARS:
            return self.prepare(prompt, params, request_id, options)
        arrived_s = asyncio.get_running_loop().time()
        token_ids = await asyncio.to_thread(self._token_ids, prompt, "prompt")
        return replace(self.prepare(token_ids, params, request_id, options), arrived_s=arrived_s)

    async def complete(
        self, prompt: Prompt, params: SamplingParams, request_id: str, options: TextOptions = NO_OPTIONS
    ) -> AsyncGenerator[TextChunk, None]:
        async with aclosing(self.stream(self.prepare(prompt, params, request_id, options))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """The answers in pieces, the last of each with finish_reason. Closing it aborts all. Raises KVFerryError."""
        answers = {choice: Answer(request, choice, self.tokenizer, self.metrics) for choice in request.choices}
        # Choices of which the router has more to say; behind a stop string nobody listens.
        running = set(answers)
        last: TextChunk | None = None
        try:
            # The router's generator has ended, or is closed and the workers told, before the last piece goes out.
            async with aclosing(self._generate(request)) as outputs:
                async for output in outputs:
                    if output.finish_reason is not None:
                        running.discard(output.choice)
                    if (answer := answers[output.choice]).ended:
                        continue
                    chunk = answer.take(output)
                    if request.caller is not None:
                        request.caller.spend(len(chunk.token_ids))
                    if chunk.finish_reason is None or not all(one.ended for one in answers.values()):
                        yield chunk
                        continue
                    last = chunk
                    if running:
                        break
        except KVFerryError as error:
            self.metrics.failed(type(error).__name__)
            refused = isinstance(error, OverloadedError) and not any(answer.num_tokens for answer in answers.values())
            if refused and request.caller is not None:
                request.caller.spend(-len(request.prompt_token_ids))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            num_tokens = sum(answer.num_tokens for answer in answers.values())
            logger.info("%s: aborted by the client after %d tokens", request.request_id, num_tokens)
            counted = 0 in answers and answers[0].ended
            self.metrics.finished(FinishReason.ABORTED, 0 if counted else len(request.prompt_token_ids))
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
            options = request.options
            generated = self._router.generate(
                request.prompt_token_ids,
                request.params,
                unique,
                options.cache_salt,
                options.so_far or None,
                request.terms,
            )
            async with aclosing(generated) as outputs:
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
