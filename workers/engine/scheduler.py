"""Which tokens the next step computes. One rule for all requests: computed tokens catch up with tokens.

A request that lacks one token is decoding, one that lacks more is in prefill; both share a step (continuous batching,
chunked prefill). Preemption is by recompute and takes the latest arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.config import SchedulerConfig
from workers.engine.block_manager import BlockManager
from workers.engine.prefix_cache import PrefixCache
from workers.request import NextToken, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs wanted of the prompt tokens at [start + 1, start + 1 + len(token_ids)) of a ScheduledRequest."""

    token_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: compute the KV of `token_ids` at positions [start, start + len(token_ids))."""

    request_id: str
    token_ids: Sequence[int]
    start: int
    # Blocks of positions [0, start + len(token_ids)) at least; block i holds [i * block_size, (i + 1) * block_size).
    block_table: Sequence[int]
    # Tokens to choose, each after the one before its position: the next one, when the step reaches the last token.
    samples: tuple[NextToken, ...] = ()
    prompt_scores: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    requests: tuple[ScheduledRequest, ...]
    num_tokens: int


def share_tokens(remaining: Sequence[int], budget: int) -> list[int]:
    """Deal `budget` tokens to prompts that lack `remaining` tokens each, in order of arrival.

    Half goes to the oldest, so that nobody starves; the rest to the shortest first, so that a short prompt does not
    wait for a long one.
    """
    shares = [0] * len(remaining)
    if remaining:
        shares[0] = min(remaining[0], max(1, budget // 2))
        budget -= shares[0]
    for i in sorted(range(len(remaining)), key=lambda i: remaining[i] - shares[i]):
        extra = min(remaining[i] - shares[i], budget)
        shares[i] += extra
        budget -= extra
    return shares


class Scheduler:
    """Owns every live request and its place: waiting, running, or waiting for KV from another worker."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, prefix_cache: PrefixCache) -> None:
        self.config = config
        self.block_manager = block_manager
        self.prefix_cache = prefix_cache
        # In order of arrival, save those that bring their KV with them (handed over): they already have blocks.
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.waiting_for_kv: dict[str, Request] = {}
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def try_reserve(self, request: Request) -> bool:
        """Take the blocks of a request whose KV will come from elsewhere, and of one token more; False if not free now.

        What is cached here need not come: num_computed_tokens says how far.
        """
        if any(not r.block_table for r in self.waiting):
            return False  # A preempted request waits for blocks of its own.
        found = self.prefix_cache.find(request, request.num_tokens)
        if not self._take_blocks(request, found, request.num_tokens + 1):
            return False
        request.status = RequestStatus.WAITING_FOR_KV
        self.waiting_for_kv[request.request_id] = request
        return True

    def schedule(self) -> SchedulerOutput:
        self._admit()
        decodes = [r for r in self.running if r.num_tokens - r.num_computed_tokens == 1]
        scheduled = [(r, 1) for r in decodes if self._grow(r)]
        # Growing may have preempted requests behind in the list, some of them already scheduled.
        scheduled = [(r, n) for r, n in scheduled if r.status is RequestStatus.RUNNING]
        prompts = [r for r in self.running if r.num_tokens - r.num_computed_tokens > 1]
        budget = self.config.max_num_batched_tokens - len(scheduled)
        shares = share_tokens([r.num_tokens - r.num_computed_tokens for r in prompts], budget)
        scheduled += [(r, n) for r, n in zip(prompts, shares, strict=True) if n]
        return SchedulerOutput(
            requests=tuple(_scheduled(r, n) for r, n in scheduled), num_tokens=sum(n for _, n in scheduled)
        )

    def remove(self, request: Request) -> None:
        """Take a request out of wherever it is; its blocks stay its own."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_KV:
            del self.waiting_for_kv[request.request_id]
        elif request.status is not RequestStatus.FINISHED:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def free(self, request: Request) -> None:
        self.block_manager.free(request.block_table)
        request.block_table = []

    def live(self) -> Iterable[Request]:
        yield from self.waiting
        yield from self.running
        yield from self.waiting_for_kv.values()

    def _watermark(self) -> int:
        """Blocks left free for the growth of what runs; none when nothing does, or the first could never start."""
        return len(self.running)

    def _admit(self) -> None:
        room = self.config.max_num_seqs - len(self.running)
        bring_kv = [r for r in self.waiting if r.block_table][:room]
        for request in bring_kv:
            self.waiting.remove(request)
            self._run(request)
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            # The last token is computed in any case: its logits are wanted. So may be those of the whole prompt.
            usable = 0 if request.wants_prompt_logprobs else request.num_tokens - 1
            found = self.prefix_cache.find(request, usable)
            if request.block_table or not self._take_blocks(request, found, request.num_tokens):
                break
            self.waiting.popleft()
            self._run(request)

    def _take_blocks(self, request: Request, found: list[int], num_tokens: int) -> bool:
        """Give the request the blocks of its known prefix and new ones up to `num_tokens`, all or nothing."""
        num_new = self.block_manager.blocks_for(num_tokens) - len(found)
        if not self.block_manager.can_allocate(num_new, self._watermark(), keeping=found):
            return False
        self.block_manager.share(found)
        request.block_table = found + self.block_manager.allocate(num_new)
        request.num_computed_tokens = len(found) * self.block_manager.block_size
        request.num_published_blocks = len(found)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.prefix_cache.count(request, request.num_computed_tokens)
        return True

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _grow(self, request: Request) -> bool:
        """Make sure of a block for the request's last token, preempting later arrivals if need be."""
        while request.status is RequestStatus.RUNNING:
            missing = self.block_manager.blocks_for(request.num_tokens) - len(request.block_table)
            if missing <= 0:
                return True
            if self.block_manager.can_allocate(missing):
                request.block_table.extend(self.block_manager.allocate(missing))
                return True
            # Not one whose KV is being read: its blocks must stay as they are.
            self._preempt(max((r for r in self.running if not r.hold_blocks), key=lambda r: r.arrival))
        return False

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.free(victim)
        victim.num_computed_tokens = victim.num_published_blocks = 0
        victim.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        # Not just to the front: one that brought its KV may have run while an earlier one waits.
        later = (i for i, r in enumerate(self.waiting) if r.arrival > victim.arrival and not r.block_table)
        self.waiting.insert(next(later, len(self.waiting)), victim)


def _scheduled(request: Request, num_new_tokens: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    end = start + num_new_tokens
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.tokens(start, end),
        start=start,
        block_table=tuple(request.block_table),
        samples=(request.next_token,) if end == request.num_tokens else (),
        prompt_scores=_prompt_scores(request, start, end),
    )


def _prompt_scores(request: Request, start: int, end: int) -> PromptScores | None:
    if not request.wants_prompt_logprobs:
        return None
    assert request.params.prompt_logprobs is not None
    return PromptScores(request.prompt_token_ids[start + 1 : end + 1], request.params.prompt_logprobs)
