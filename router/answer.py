"""One answer: from the outputs of its tokens to pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.metrics import RouterMetrics
from router.stop_strings import StopStrings
from router.tenants import Caller
from workers.detokenizer import Detokenizer
from workers.errors import BY_NAME, AbortedError, InvalidRequestError, KVFerryError
from workers.request import NO_TERMS, FinishReason, SamplingParams, Terms, TokenLogprobs, TokenOutput
from workers.timeline import Timeline
from workers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a request may ask of the router."""

    # Strings that end the answer.
    stops: tuple[str, ...] = ()
    # Show what ended it, string or token, too.
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # Requests of different salts never share KV.
    cache_salt: str = ""
    # Where the request names none. None: what max_model_len leaves.
    default_max_tokens: int | None = None
    # By choice: tokens that the client has from a router that is gone. What comes after them is wanted, and no choice
    # that is not there; none at all: everything is.
    so_far: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # What it asks for itself; whose it is, its API key tells.
    terms: Terms = NO_TERMS


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request checked and tokenised."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    options: TextOptions
    # On the event loop's clock.
    arrived_s: float
    terms: Terms = NO_TERMS
    # Who is charged for it; None: nobody.
    caller: Caller | None = None

    @property
    def choices(self) -> Iterable[int]:
        """Those wanted."""
        return self.options.so_far or range(self.params.n)

    def is_same(self, other: TextRequest) -> bool:
        """Whether it is one request sent twice, whatever of the answer is there already."""
        return (
            (self.request_id, self.terms.tenant, self.terms.job)
            == (other.request_id, other.terms.tenant, other.terms.job)
            and self.params == other.params
            and replace(self.options, so_far={}) == replace(other.options, so_far={})
            and self.prompt_token_ids == other.prompt_token_ids
        )


# Not frozen, for speed: there is one for each token.
@dataclass(slots=True)
class TextChunk:
    """Output tokens [index, index + len(token_ids)) and the text that they made sure. From num_prompt_tokens on the
    fields are those of the whole answer, set on the last chunk, which has finish_reason; but for the logprobs.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: Timeline | None = None
    # Seconds from arrival to token 1, and per token after it.
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    # One for each token, and on the chunk with index 0 of the prompt's from the second on, where asked for.
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Which of the request's answers it is a piece of.
    choice: int = 0
    # With output token 0: the seed in effect.
    seed: int | None = None


class Answer:
    """One answer as it grows: what to show of each output, and when it was heard."""

    def __init__(self, request: TextRequest, choice: int, tokenizer: Tokenizer, metrics: RouterMetrics) -> None:
        self._request = request
        self._choice = choice
        self._metrics = metrics
        # Times of jobs, for which nobody waits, would hide those of others.
        self._timed = not request.terms.job
        options = request.options
        self._include_stop = options.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._stops = StopStrings(options.stops, self._include_stop) if options.stops else None
        self._clock = asyncio.get_running_loop().time
        self._first_s = 0.0
        self._latest_s: float | None = None
        self._num_cached_tokens = 0
        # The latest that was told of it.
        self._timeline = Timeline()
        self.num_tokens = 0
        self.ended = False
        self._hold(request.options.so_far.get(choice, ()))
        self._num_held = self.num_tokens

    def take(self, output: TokenOutput) -> TextChunk:
        _raise_if_failed(output)
        if output.index != self.num_tokens:
            raise KVFerryError(
                f"{output.request_id}: token {self.num_tokens} is next, {output.index} came: a gap in the answer; retry"
            )
        if output.timeline is not None:
            self._timeline = output.timeline
        token_ids, text = self._show(output)
        self._time(len(token_ids))
        index, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        stopped = self._stops is not None and self._stops.matched
        if index == 0:
            self._num_cached_tokens = output.num_cached_tokens
        chunk = TextChunk(
            index,
            token_ids,
            text,
            logprobs=output.logprobs[: len(token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            choice=self._choice,
            seed=None if index else self._request.params.seed,
        )
        reason = FinishReason.STOP if stopped else output.finish_reason
        if reason is None:
            return chunk
        if not stopped:
            chunk.text += self._flush()
        return self._last(chunk, reason, stopped)

    def _hold(self, token_ids: Sequence[int]) -> None:
        """Tokens whose text the client has: what of it was held back is known again. Raises InvalidRequestError."""
        self._show(TokenOutput(self._request.request_id, 0, tuple(token_ids)))
        if self._stops is not None and self._stops.matched:
            raise InvalidRequestError(
                f"output_token_ids[{self._choice}] hold a stop string, which ended the answer; leave out that choice",
                param="output_token_ids",
            )
        self.num_tokens = len(token_ids)

    def _show(self, output: TokenOutput) -> tuple[tuple[int, ...], str]:
        """The output's tokens up to the one that completes a stop string, and the text that may be shown."""
        # The token that stops an answer is no part of its text, unless asked for.
        silent = 1 if output.finish_reason is FinishReason.STOP and not self._include_stop else 0
        spoken = output.token_ids[: len(output.token_ids) - silent]
        if self._stops is None:
            return output.token_ids, self._detokenizer.push(spoken)
        text = ""
        for count, token_id in enumerate(spoken, start=1):
            may_match = self.num_tokens + count > self._request.params.min_tokens
            text += self._stops.push(self._detokenizer.push((token_id,)), may_match)
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
        gap_s = None
        if self._latest_s is None:
            self._first_s = now_s
            if self._timed:
                self._metrics.first_token(now_s - self._request.arrived_s)
        elif self._timed:
            gap_s = now_s - self._latest_s
        self._metrics.tokens(count, gap_s)
        self._latest_s = now_s

    def _last(self, chunk: TextChunk, reason: FinishReason, stopped: bool) -> TextChunk:
        self.ended = True
        arrived_s, end_s = self._request.arrived_s, self._clock()
        timeline = self._timeline
        if stopped:
            # Its worker has not told the end of it.
            timeline += Timeline(decode_s=max(0.0, end_s - arrived_s - timeline.total_s))
        num_new = self.num_tokens - self._num_held
        tpot_s = (end_s - self._first_s) / (num_new - 1) if num_new > 1 else 0.0
        num_prompt_tokens = len(self._request.prompt_token_ids)
        # All choices have one prompt.
        self._metrics.finished(reason, 0 if self._choice else num_prompt_tokens)
        self._metrics.lengths(num_prompt_tokens, self.num_tokens, self._request.params)
        if self._timed:
            self._metrics.times(end_s - arrived_s, tpot_s, timeline)
        chunk.finish_reason = reason
        chunk.num_prompt_tokens = num_prompt_tokens
        chunk.num_completion_tokens = self.num_tokens
        chunk.num_cached_tokens = self._num_cached_tokens
        chunk.timeline = timeline
        chunk.ttft_s = self._first_s - arrived_s if self._latest_s is not None else 0.0
        chunk.tpot_s = tpot_s
        return chunk


def _raise_if_failed(output: TokenOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise BY_NAME.get(output.error_type, KVFerryError)(output.error_message or "the request failed; try again")
    if output.finish_reason is FinishReason.ABORTED:
        raise AbortedError(f"{output.request_id} was aborted on its worker; try again")
