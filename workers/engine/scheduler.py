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
from workers.request import Request, RequestStatus, SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: compute the KV of `token_ids` at positions [start, start + len(token_ids))."""

    request_id: str
    token_ids: Sequence[int]
    start: int
    # Blocks of positions [0, start + len(token_ids)) at least; block i holds [i * block_size, (i + 1) * block_size).
    block_table: Sequence[int]
    # Set when the step reaches the request's last token: sample the one at position start + len(token_ids).
    params: SamplingParams | None


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

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        # In order of arrival. Those that bring their KV with them (handed over) already have blocks.
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.waiting_for_kv: dict[str, Request] = {}
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.append(request)

    def reserve(self, request: Request) -> None:
        """Take the blocks of a request whose KV will come from elsewhere, and of one token more.

        Raises OverloadedError when they are not free.
        """
        request.block_table = self.block_manager.allocate(self.block_manager.blocks_for(request.num_tokens + 1))
        request.status = RequestStatus.WAITING_FOR_KV
        self.waiting_for_kv[request.request_id] = request

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether a hand-off of `num_tokens` may come; not while a preempted request waits for blocks of its own."""
        if any(not r.block_table for r in self.waiting):
            return False
        return self.block_manager.can_allocate(self.block_manager.blocks_for(num_tokens + 1), self._watermark())

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
            needed = self.block_manager.blocks_for(request.num_tokens)
            if request.block_table or not self.block_manager.can_allocate(needed, self._watermark()):
                break
            self.waiting.popleft()
            request.block_table = self.block_manager.allocate(needed)
            self._run(request)

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
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        # Victims come latest first, so each goes before those preempted just before it.
        self.waiting.appendleft(victim)


def _scheduled(request: Request, num_new_tokens: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    end = start + num_new_tokens
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.tokens(start, end),
        start=start,
        block_table=tuple(request.block_table),
        params=request.params if end == request.num_tokens else None,
    )
