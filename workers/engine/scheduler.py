"""Which tokens the next step computes. One rule for all requests: computed tokens catch up with tokens.

A request that lacks one token is decoding, one that lacks more is in prefill; both share a step (continuous batching,
chunked prefill). Preemption is by recompute and takes the latest arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from workers.config import SchedulerConfig
from workers.engine.block_manager import BlockManager
from workers.engine.choices import share_blocks
from workers.engine.drafts import propose
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
    # So many of the last token_ids are guesses. Each has a sample for its own position, and one follows the last.
    num_drafts: int = 0
    prompt_scores: PromptScores | None = None
    # Which of the request's sequences it is.
    choice: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    requests: tuple[ScheduledRequest, ...]
    num_tokens: int
    # (source, target): blocks whose KV is copied before anything is computed. No block is both.
    copies: tuple[tuple[int, int], ...] = ()


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

    @property
    def num_blocks_reserved(self) -> int:
        """Blocks that only requests waiting for KV have."""
        return self.block_manager.num_owned_only_by(b for r in self.waiting_for_kv.values() for b in r.block_table)

    def try_reserve(self, request: Request, max_blocks: int) -> bool:
        """Take the blocks of a request whose KV will come from elsewhere; False if they are not free now, or if all
        such requests would then hold more than `max_blocks`.

        There is room for one token more, and a block more for every further choice. What is cached here need not come:
        num_computed_tokens says how far.
        """
        found = self.prefix_cache.find(request, self.prefix_cache.num_shareable(request))
        blocks = self.block_manager
        beyond_room = blocks.num_free + blocks.num_cached - (max_blocks - self.num_blocks_reserved)
        left = max(self._watermark() + self._num_blocks_awaited(), beyond_room)
        num_blocks = blocks.blocks_for_choices(request.num_tokens, request.params.n)
        if not self._take_blocks(request, found, num_blocks, left):
            return False
        request.status = RequestStatus.WAITING_FOR_KV
        self.waiting_for_kv[request.request_id] = request
        return True

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        """A computed request goes on as `children`, which take over what they need of its blocks and start first.

        Those for which there was no block wait for their turn.
        """
        share_blocks(self.block_manager, parent, children)
        self.waiting.extendleft([child for child in reversed(children) if child.block_table])
        for child in children:
            if not child.block_table:
                self._wait_in_order(child)

    def schedule(self) -> SchedulerOutput:
        self._admit()
        decodes = [r for r in self.running if r.num_tokens - r.num_computed_tokens == 1]
        grown = [r for r in decodes if self._grow(r)]
        # Growing may have preempted requests behind in the list, some of them already grown.
        decoding = [r for r in grown if r.status is RequestStatus.RUNNING]
        prompts = [r for r in self.running if r.num_tokens - r.num_computed_tokens > 1]
        budget = self.config.max_num_batched_tokens - len(decoding)
        shares = share_tokens([r.num_tokens - r.num_computed_tokens for r in prompts], budget)
        if not decoding and not prompts and any(r.block_table for r in self.waiting):
            # All that ran was preempted for want of the blocks of those that bring their KV: there are seats for these.
            return self.schedule()
        chunks = [_scheduled(r, n) for r, n in zip(prompts, shares, strict=True) if n]
        requests = (*self._with_drafts(decoding, budget - sum(shares)), *chunks)
        starting = [*decoding, *(r for r, n in zip(prompts, shares, strict=True) if n)]
        return SchedulerOutput(
            requests,
            num_tokens=sum(len(r.token_ids) for r in requests),
            copies=tuple(self._copy(r, r.copy_source) for r in starting if r.copy_source is not None),
        )

    def _with_drafts(self, decoding: Sequence[Request], budget: int) -> Iterator[ScheduledRequest]:
        """Each request's next token, and drafts of those after it out of what the prompts leave of the step."""
        for request in decoding:
            drafts = self._drafts(request, budget)
            budget -= len(drafts)
            yield _scheduled(request, 1, drafts)

    def _drafts(self, request: Request, budget: int) -> list[int]:
        config = self.config.speculative_config
        if config is None or not request.output_token_ids:
            return []
        # The step gives one token more than there are right drafts.
        most = min(budget, request.num_tokens_left - 1)
        if most <= 0:
            return []
        drafts = propose(request.tokens(0, request.num_tokens), config)[:most]
        return drafts[: self._room(request, len(drafts))]

    def _room(self, request: Request, num_drafts: int) -> int:
        """How many drafts have a place for their KV. Blocks are taken for them only while nobody would miss these."""
        missing = self.block_manager.blocks_for(request.num_tokens + num_drafts) - len(request.block_table)
        if missing > 0 and self.block_manager.can_allocate(missing, self._watermark()):
            request.block_table.extend(self.block_manager.allocate(missing))
        return len(request.block_table) * self.block_manager.block_size - request.num_tokens

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
        self.block_manager.free(request.owned_blocks)
        request.block_table, request.copy_source = [], None

    def copied(self, request: Request) -> None:
        """The step is over that made its last block its own."""
        if request.copy_source is not None:
            self.block_manager.free([request.copy_source])
            request.copy_source = None

    def live(self) -> Iterable[Request]:
        yield from self.waiting
        yield from self.running
        yield from self.waiting_for_kv.values()

    def _watermark(self) -> int:
        """Blocks left free for the growth of what runs; none when nothing does, or the first could never start."""
        return len(self.running)

    def _num_blocks_awaited(self) -> int:
        """What those need that wait for blocks of their own, preempted ones among them."""
        return sum(self.block_manager.blocks_for(r.num_tokens) for r in self.waiting if not r.block_table)

    def _admit(self) -> None:
        """In their order; only those that bring their KV go past one for which there are no blocks."""
        is_blocked = False
        for request in list(self.waiting):
            if len(self.running) >= self.config.max_num_seqs:
                break
            if not request.block_table:
                is_blocked = is_blocked or not self._take_first_blocks(request)
                if is_blocked:
                    continue
            self.waiting.remove(request)
            self._run(request)

    def _take_first_blocks(self, request: Request) -> bool:
        if not self.prefix_cache.computes_prompts:
            return False  # Engine.step gives it back.
        # The last token is computed in any case: its logits are wanted. So may be those of the whole prompt.
        usable = 0 if request.wants_prompt_logprobs else request.num_tokens - 1
        found = self.prefix_cache.find(request, usable)
        num_blocks = self.block_manager.blocks_for(request.num_tokens)
        return self._take_blocks(request, found, num_blocks, self._watermark())

    def _copy(self, request: Request, source: int) -> tuple[int, int]:
        return source, request.block_table[request.num_computed_tokens // self.block_manager.block_size]

    def _take_blocks(self, request: Request, found: list[int], num_blocks: int, left: int) -> bool:
        """Give the request `num_blocks`, of which its known prefix is part, leaving so many; all or nothing."""
        num_new = num_blocks - len(found)
        if not self.block_manager.can_allocate(num_new, left, keeping=found):
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
            self._preempt(max(self._victims(), key=lambda r: (r.arrival, r.choice)))
        return False

    def _victims(self) -> Iterator[Request]:
        """Who has blocks, be it without a seat; not one whose KV is being read: they must stay as they are."""
        return (r for r in (*self.running, *self.waiting) if r.block_table and not r.hold_blocks)

    def _preempt(self, victim: Request) -> None:
        (self.running if victim.status is RequestStatus.RUNNING else self.waiting).remove(victim)
        self.free(victim)
        victim.num_computed_tokens = victim.num_published_blocks = 0
        victim.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._wait_in_order(victim)

    def _wait_in_order(self, request: Request) -> None:
        """Before who waits for blocks and came later: one that brought KV may have run while an earlier one waits."""
        order = (request.arrival, request.choice)
        later = (i for i, r in enumerate(self.waiting) if (r.arrival, r.choice) > order and not r.block_table)
        self.waiting.insert(next(later, len(self.waiting)), request)


MakeScheduler = Callable[[SchedulerConfig, BlockManager, PrefixCache], Scheduler]


def _scheduled(request: Request, num_new_tokens: int, drafts: Sequence[int] = ()) -> ScheduledRequest:
    start = request.num_computed_tokens
    end = start + num_new_tokens
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=[*request.tokens(start, end), *drafts],
        start=start,
        block_table=tuple(request.block_table),
        samples=request.next_tokens(drafts) if end == request.num_tokens else (),
        num_drafts=len(drafts),
        prompt_scores=_prompt_scores(request, start, end),
        choice=request.choice,
    )


def _prompt_scores(request: Request, start: int, end: int) -> PromptScores | None:
    if not request.wants_prompt_logprobs:
        return None
    assert request.params.prompt_logprobs is not None
    return PromptScores(request.prompt_token_ids[start + 1 : end + 1], request.params.prompt_logprobs)
