"""The text layer of both APIs: prompt -> token ids -> Router.generate -> text, usage and times."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import xxhash

from router.answer import Answer, TextChunk, TextOptions, TextRequest
from router.limits import Limits, check_cache_salt, check_request_id, check_stops, check_terms
from router.metrics import RouterMetrics
from router.tenants import CALLER
from workers.chat_template import Chat
from workers.errors import ConflictError, InvalidRequestError, KVFerryError, NotFoundError, OverloadedError
from workers.request import NO_TERMS, FinishReason, SamplingParams, Terms, TokenOutput, with_seed
from workers.tokenizer import LONG_CHARS, Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Chat

NO_OPTIONS = TextOptions()
ROLES = ("system", "developer", "user", "assistant", "tool")


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

    def end(self, request_id: str, error: KVFerryError) -> None: ...


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
        # By the ids that the router knows them by.
        self._running: dict[str, TextRequest] = {}

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
        token_ids: Sequence[int] | None = None,
        charge: bool = True,
    ) -> TextRequest:
        """Check, tokenise and charge the prompt to its caller. Raises InvalidRequestError, and OverloadedError when the
        caller's tokens are used up, before any work. `token_ids`: the prompt's, where they are known. Who prepares
        several for one answer charges them together."""
        arrived_s = asyncio.get_running_loop().time()
        check_request_id(request_id)
        check_stops(options.stops)
        check_cache_salt(options.cache_salt)
        check_terms(options.terms)
        param = _param(prompt)
        token_ids = self.token_ids(prompt) if token_ids is None else token_ids
        self._limits.check_prompt(token_ids, param)
        params = self._limits.complete_params(params, len(token_ids), options.default_max_tokens, param)
        self._limits.check_so_far(options.so_far, params)
        caller = CALLER.get()
        terms = caller.terms(options.terms) if caller else options.terms
        params = with_seed(params, seed_of(request_id, terms.tenant))
        request = TextRequest(request_id, token_ids, params, options, arrived_s, terms, caller)
        if charge:
            self.charge([request])
        return request

    def charge(self, requests: Sequence[TextRequest]) -> None:
        """The prompts of one call, all or none: to its caller. Raises OverloadedError."""
        if (caller := requests[0].caller) is not None:
            caller.take_prompt(sum(len(request.prompt_token_ids) for request in requests))

    async def prepared(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        options: TextOptions = NO_OPTIONS,
        charge: bool = True,
    ) -> TextRequest:
        """`prepare`, but a long text is tokenised on a thread, where it holds up nobody's tokens."""
        arrived_s = asyncio.get_running_loop().time()
        token_ids = await self.tokenised(prompt)
        return replace(self.prepare(prompt, params, request_id, options, token_ids, charge), arrived_s=arrived_s)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Whether the model has them all."""
        self._limits.check_ids(token_ids, param)

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
        unique = self._known_as(request)
        try:
            # The router's generator has ended, or is closed and the workers told, before the last piece goes out.
            async with aclosing(self._generate(request, unique)) as outputs:
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
            logger.info(
                "%s: aborted by the client after %d tokens",
                request.request_id,
                num_tokens,
                extra={"request_id": request.request_id},
            )
            counted = 0 in answers and answers[0].ended
            self.metrics.finished(FinishReason.ABORTED, 0 if counted else len(request.prompt_token_ids))
            raise
        finally:
            del self._running[unique]
        if last is None:
            self.metrics.failed(KVFerryError.__name__)
            raise KVFerryError(f"{request.request_id}: the router's outputs ended without a finish_reason; try again")
        yield last

    def _known_as(self, request: TextRequest) -> str:
        """An id that no other has, under which it runs from now on."""
        unique = request.request_id
        while unique in self._running:
            unique = f"{request.request_id}.{uuid.uuid4().hex[:8]}"
        self._take_over(request)
        self._running[unique] = request
        return unique

    def _generate(self, request: TextRequest, unique: str) -> AsyncGenerator[TokenOutput, None]:
        options = request.options
        return self._router.generate(
            request.prompt_token_ids,
            request.params,
            unique,
            options.cache_salt,
            options.so_far or None,
            request.terms,
        )

    def _take_over(self, request: TextRequest) -> None:
        """A client that sends a request again wants the answer here: nothing works for where it was sent first.

        Another request of the same id is no repetition, and goes on: gateways give one id to all that a user's click
        brings about.
        """
        if request.request_id not in self._running:
            return
        for unique, other in self._running.items():
            if other.is_same(request):
                error = ConflictError(f"{request.request_id}: the same request came again, and is answered there")
                self._router.end(unique, error)

    def token_ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str | Chat):
            return list(prompt)
        return self._encode(self._text(prompt), prompt)

    async def tokenised(self, prompt: Prompt, add_special_tokens: bool | None = None) -> Sequence[int]:
        """`token_ids`, on a thread if the text is long. None: text gets special tokens; a chat has its own."""
        if not isinstance(prompt, str | Chat):
            return list(prompt)
        text = self._text(prompt)
        if len(text) <= LONG_CHARS:
            return self._encode(text, prompt, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, prompt, add_special_tokens)

    def _text(self, prompt: str | Chat) -> str:
        text = self.tokenizer.apply_chat_template(_checked(prompt)) if isinstance(prompt, Chat) else prompt
        if len(text) > self.max_model_len * self.tokenizer.max_token_chars:
            param = _param(prompt)
            raise self._limits.too_long(f"your {param} has {len(text)} characters, which is more", param)
        return text

    def _encode(self, text: str, prompt: str | Chat, add_special_tokens: bool | None = None) -> Sequence[int]:
        """`text`: the prompt's."""
        special = not isinstance(prompt, Chat) if add_special_tokens is None else add_special_tokens
        try:
            return self.tokenizer.encode(text, special)
        except InvalidRequestError as error:
            error.param = _param(prompt)
            raise


def _param(prompt: Prompt) -> str:
    """The name of its field."""
    return "messages" if isinstance(prompt, Chat) else "prompt"


def new_request_id(prefix: str, joint: str = "-") -> str:
    return f"{prefix}{joint}{uuid.uuid4().hex}"


def seed_of(request_id: str, tenant: str = "") -> int:
    """The seed of a request that names none: the same request id draws the same tokens."""
    return xxhash.xxh64_intdigest(f"{tenant}\0{request_id}".encode())


def _checked(chat: Chat) -> Chat:
    for at, message in enumerate(chat.messages):
        if message["role"] not in ROLES:
            raise InvalidRequestError(
                f"messages[{at}].role is {message['role'][:40]!r}; supported: {', '.join(ROLES)}", param="messages"
            )
    return chat
