"""What a request is, and the records that cross process borders.

A request is its tokens: KV, random numbers and timing are functions of (prompt ids, SamplingParams, tokens so far).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from workers.errors import KVFerryError
from workers.timeline import NO_TIME, Timeline


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    WAITING_FOR_KV = "waiting_for_kv"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    `max_tokens` None means: up to max_model_len; the router makes it a number before a worker sees it.
    `seed` None means: derived by the router from tenant and request id.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Keeps what is at least this fraction as likely as the likeliest.
    min_p: float = 0.0
    # Divides the logits of tokens in the prompt or the output (multiplies negative ones).
    repetition_penalty: float = 1.0
    # Taken off the logits of tokens in the output: once, and for each time that they are there.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (token id, what is added to its logit), each id once.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Before so many output tokens, neither EOS nor stop_token_ids are chosen.
    min_tokens: int = 0
    # How many of the likeliest tokens to show beside each output or prompt token, 0 included; None: nothing.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Answers to give, each with random numbers of its own.
    n: int = 1
    # What the answer must match, in llguidance's form; empty: anything.
    grammar: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request asks of its times, in milliseconds; None: nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """For whom a request is served, how urgent it is (lower goes first, as vLLM's), and how soon it must be."""

    tenant: str = ""
    priority: int = 0
    slo: Slo | None = None
    # A prompt of a job: nobody waits for it, so it is held to no SLO, and holds up nobody's.
    job: bool = False


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class TokensSoFar:
    """What penalties and min_tokens are functions of."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class NextToken:
    """What the choice of one token depends on, beside its logits."""

    params: SamplingParams
    # Of the token to be chosen, in its whole sequence.
    position: int
    choice: int = 0
    # Set where `params` make the token depend on them.
    tokens_so_far: TokensSoFar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model alone: before bias, penalties, temperature and filters.

    `top_token_ids` are the likeliest, best first, equal ones by id; `rank` is the token's place in that order, from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


# Not frozen: to make a frozen one takes three times as long, and a router makes one for each token.
@dataclass(slots=True)
class TokenOutput:
    """New tokens of one request: output tokens [index, index + len(token_ids))."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    timeline: Timeline | None = None
    error_type: str = ""
    error_message: str = ""
    # Whose stream it goes to; not part of the message.
    router_id: str = ""
    # One for each token, where SamplingParams asks for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # With output token 0: of the prompt's tokens from the second on, where asked for, and how many of all of them were
    # not computed because their KV was known.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    # Which of the request's choices these tokens belong to.
    choice: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence as an engine holds it. `num_computed_tokens` catches up with `num_tokens`; there are no phases."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    router_id: str = ""
    # Stop after this many output tokens here, whatever max_tokens says: a prefill worker's is one more than it got.
    output_limit: int | None = None
    # Requests of different salts never share KV.
    cache_salt: str = ""
    # Where a copy of its KV is kept as it grows; empty: nowhere.
    replica_address: str = ""
    # Keep the blocks after the finish, until Engine.release: their KV is still being read.
    hold_blocks: bool = False
    # Index of the only choice wanted, where params.n is 1; of several, the first.
    choice: int = 0
    # Terms: the router's business, which no worker hears of.
    tenant: str = ""
    priority: int = 0
    slo: Slo | None = None
    job: bool = False

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    # Its last block gets the KV of this one, which it keeps from being freed, in its next step.
    copy_source: int | None = None
    # Prefix caching: hashes of its whole units, how many of its blocks others may share, and how many prompt tokens
    # were found when it first started.
    unit_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None
    # Of the prompt's computed tokens from the second on, where wanted.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Place in the order of arrival at this engine, and times on the event loop's clock in seconds.
    arrival: int = 0
    arrived_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    # Its KV came from another worker, which also sampled token 1; what that cost.
    handed_over: bool = False
    hand_off: Timeline = NO_TIME

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Output tokens that it may still get here."""
        limits = [n for n in (self.params.max_tokens, self.output_limit) if n is not None]
        assert limits, "the router makes max_tokens a number"
        return min(limits) - self.num_output_tokens

    @property
    def choices(self) -> Sequence[int]:
        """Indices of the answers that it asks for."""
        return range(self.params.n) if self.params.n > 1 else (self.choice,)

    @property
    def owned_blocks(self) -> list[int]:
        """Every block that it counts as an owner of."""
        return self.block_table if self.copy_source is None else [*self.block_table, self.copy_source]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whoever computes output token 0 owes them: all prompt tokens are then computed, none taken from a cache."""
        return self.params.prompt_logprobs is not None and not self.output_token_ids

    def next_tokens(self, drafts: Sequence[int] = ()) -> tuple[NextToken, ...]:
        """One for each choice: all are one sequence until they have a token. Of a single one, those too that come after
        each of `drafts`, if these are right."""
        if self.params.n > 1:
            return tuple(replace(self._next_token(()), choice=choice) for choice in self.choices)
        return tuple(self._next_token(drafts[:count]) for count in range(len(drafts) + 1))

    def _next_token(self, drafts: Sequence[int]) -> NextToken:
        params, position = self.params, self.num_tokens + len(drafts)
        if params.penalised or params.grammar or self.num_output_tokens + len(drafts) < params.min_tokens:
            tokens_so_far = TokensSoFar(self.prompt_token_ids, (*self.output_token_ids, *drafts))
            return NextToken(params, position, self.choice, tokens_so_far)
        return NextToken(params, position, self.choice)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Token ids at positions [start, end)."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]


def failure(request: Request, error: KVFerryError) -> TokenOutput:
    """The last output of a request that cannot go on here."""
    return TokenOutput(
        request.request_id,
        request.num_output_tokens,
        (),
        FinishReason.ERROR,
        error_type=type(error).__name__,
        error_message=error.message,
        router_id=request.router_id,
        choice=request.choice,
    )


def with_prompt(output: TokenOutput, request: Request) -> TokenOutput:
    """Output token 0, which also tells what is known of the prompt."""
    logprobs, request.prompt_logprobs = tuple(request.prompt_logprobs), []
    return replace(output, prompt_logprobs=logprobs, num_cached_tokens=request.num_cached_tokens or 0)


def finish_reason_of(
    output_token_ids: Sequence[int], params: SamplingParams, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Whether the last output token ends the request: the one rule both roles apply to every token."""
    last = output_token_ids[-1]
    if last in params.stop_token_ids or (last in eos_token_ids and not params.ignore_eos):
        return FinishReason.STOP
    if params.max_tokens is not None and len(output_token_ids) >= params.max_tokens:
        return FinishReason.LENGTH
    return None


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return params if params.seed is not None else replace(params, seed=seed)
