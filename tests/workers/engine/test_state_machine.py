"""Requests come, are handed over, end and are computed in any order; a brute-force account is kept beside the engine.

The pool is so small, and prompts so alike, that preemption, eviction and shared blocks are common. What computes is the
account itself: a step writes into it what the KV of each token depends on, and reads what it finds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.sim.executor import SimExecutor
from cluster.sim.runner import EmptyRunner
from tests.workers.engine.kv_book import KVBook, Slot, slots_of
from workers.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from workers.engine.engine import Engine
from workers.engine.executor import SampledToken, StepResult
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.errors import OverloadedError
from workers.request import Request, RequestStatus, SamplingParams

BLOCK_SIZE = 4
# Longest request: it must fit into the pool of NUM_BLOCKS alone.
NUM_BLOCKS, MAX_TOKENS = 10, 36
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
NGRAM = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2)
T = TypeVar("T")

# All begin alike, and differ from some block on.
prompts = st.builds(
    lambda fork, size, tail: ([0] * fork + [1] * MAX_TOKENS)[:size] + tail,
    st.sampled_from((2, 4, 8, 40)), st.integers(0, 18), st.lists(st.integers(0, 1), min_size=1, max_size=2),
)  # fmt: skip
answers = st.integers(2, MAX_TOKENS - 20)
salts = st.sampled_from(("", "tenant"))
picks = st.integers(0, 9)
counts = st.sampled_from((1, 1, 1, 2, 3))


def next_token(tokens: Sequence[int], choice: int) -> int:
    """A function of the tokens, so that equal requests go on alike; the second choice differs, the third does not."""
    return (sum(tokens) + choice) % 2


def first_token_ids(request: Request) -> dict[int, int]:
    """By choice."""
    return {choice: next_token(request.tokens(0, request.num_tokens), choice) for choice in request.choices}


class BookExecutor(SimExecutor):
    """Checks a step's form, lets `meanwhile` happen, then computes in the book."""

    def __init__(self) -> None:
        super().__init__(EmptyRunner(NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS))
        self.engine: Engine
        self.book: KVBook
        self.meanwhile: Callable[[], None]
        # The whole blocks that the last step filled.
        self.filled: list[Slot] = []
        self.num_steps = 0

    async def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        self.num_steps += 1
        requests = [self.engine.requests[r.request_id][r.choice] for r in batch.requests]
        _check_form(batch, requests, self.engine)
        self.meanwhile()
        owners = (*self.engine.sequences(), *self.engine.ended_in_step)
        self.book.num_copiers = Counter(r.copy_source for r in owners if r.copy_source is not None)
        for copy in batch.copies:
            self.book.copy(*copy)
        self.filled, results = [], []
        for request, scheduled in zip(requests, batch.requests, strict=True):
            drafts = drafts_of(scheduled)
            end = scheduled.start + len(scheduled.token_ids) - len(drafts)
            slots = slots_of(request, scheduled.start, end + len(drafts), drafts)
            self.book.write(scheduled.block_table, scheduled.start, slots)
            self.book.require_kv(request, scheduled.block_table, end)
            if request.status is RequestStatus.RUNNING:
                whole = slots_of(request, 0, end)[BLOCK_SIZE - 1 :: BLOCK_SIZE]
                self.filled += whole[scheduled.start // BLOCK_SIZE :]
            tokens = [*request.tokens(0, request.num_tokens), *drafts]
            sampled = (next_token(tokens[: s.position], s.choice) for s in scheduled.samples)
            results.append(StepResult(tuple(map(SampledToken, sampled))))
        self.book.num_copiers.clear()
        return results


def drafts_of(scheduled: ScheduledRequest) -> Sequence[int]:
    return scheduled.token_ids[len(scheduled.token_ids) - scheduled.num_drafts :]


def _check_form(batch: SchedulerOutput, requests: list[Request], engine: Engine) -> None:
    assert batch.num_tokens == sum(len(r.token_ids) for r in batch.requests) <= CONFIG.max_num_batched_tokens
    assert len(set(requests)) == len(requests) <= CONFIG.max_num_seqs
    for request, scheduled in zip(requests, batch.requests, strict=True):
        end = scheduled.start + len(scheduled.token_ids) - scheduled.num_drafts
        assert scheduled.start == request.num_computed_tokens
        assert list(scheduled.token_ids) == [*request.tokens(scheduled.start, end), *drafts_of(scheduled)]
        assert list(scheduled.block_table) == request.block_table
        num_wanted = max(request.params.n, 1 + scheduled.num_drafts) if end == request.num_tokens else 0
        assert len(scheduled.samples) == num_wanted
        assert request.num_output_tokens + scheduled.num_drafts < (request.params.max_tokens or 0)
    decoding = {r for r in engine.scheduler.running if r.num_tokens - r.num_computed_tokens == 1}
    assert decoding <= set(requests), "a decode is left out"


class EngineMachine(RuleBasedStateMachine):
    @initialize(caching=st.sampled_from((True, True, False)), drafting=st.booleans())
    def start(self, caching: bool, drafting: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.executor = BookExecutor()
        cache = CacheConfig(block_size=BLOCK_SIZE, hash_block_size=2, enable_prefix_caching=caching)
        scheduler = CONFIG.model_copy(update={"speculative_config": NGRAM if drafting else None})
        self.engine = self.executor.engine = Engine(self.executor, cache, scheduler)
        self.book = self.executor.book = KVBook(self.engine.block_manager, self.engine.prefix_cache)
        self.caching = caching
        self.count = 0
        # Whose KV is still read after their end.
        self.held: list[Request] = []

    @rule(arriving=st.lists(st.tuples(prompts, answers, salts, counts), min_size=1, max_size=3))
    def add(self, arriving: list[tuple[list[int], int, str, int]]) -> None:
        for request in [self._new(*one) for one in arriving]:
            self._in_loop(partial(self.engine.add, request))

    @rule(prompt=prompts, salt=salts, n=counts)
    def prefill(self, prompt: list[int], salt: str, n: int) -> None:
        """As on a prefill worker: one token, and then the KV is read."""
        request = self._new(prompt, 2, salt, n)
        request.hold_blocks, request.output_limit = True, 1
        self.held.append(request)
        self._in_loop(lambda: self.engine.add(request))

    @rule(prompt=prompts, answer=answers, salt=salts, n=counts)
    def reserve(self, prompt: list[int], answer: int, salt: str, n: int) -> None:
        request = self._new(prompt, answer, salt, n)
        before = list(self.book.free), list(self.book.cached), +self.book.owners
        try:
            self._in_loop(lambda: self.engine.reserve(request, self.engine.block_manager.num_blocks))
        except OverloadedError:
            assert (self.book.free, self.book.cached, +self.book.owners) == before
            return
        assert len(request.block_table) == len(prompt) // BLOCK_SIZE + n
        self.book.require_kv(request, request.block_table, request.num_computed_tokens)

    @precondition(lambda self: self.engine.scheduler.waiting_for_kv)
    @rule(pick=picks, ended=st.integers(0, 2))
    def commit(self, pick: int, ended: int) -> None:
        """All choices but one, which token 1 ended, if there are others."""
        grants = list(self.engine.scheduler.waiting_for_kv.values())
        request = grants[pick % len(grants)]
        start = request.num_computed_tokens
        self.book.write(request.block_table, start, slots_of(request, start, request.num_tokens))
        running = first_token_ids(request)
        if len(running) > 1:
            running.pop(ended, None)
        self._in_loop(lambda: self.engine.commit(request, running))

    @precondition(lambda self: self.engine.requests)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self._in_loop(lambda: self._abort(pick))

    @precondition(lambda self: self._releasable())
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        ended = self._releasable()
        request = ended[pick % len(ended)]
        self.held.remove(request)
        self.book.require_kv(request, request.block_table, request.num_computed_tokens)
        self._in_loop(lambda: self.engine.release(request))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step(lambda: None)

    @rule(pick=picks)
    def abort_in_a_step(self, pick: int) -> None:
        self._step(lambda: self._abort(pick) if self.engine.requests else None)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.engine.check_integrity()
        self.book.check(r.owned_blocks for r in (*self.engine.sequences(), *self._releasable()))

    @invariant()
    def those_that_wait_for_blocks_wait_in_order_of_arrival(self) -> None:
        waiting = [(r.arrival, r.choice) for r in self.engine.scheduler.waiting if not r.block_table]
        assert waiting == sorted(waiting)

    def teardown(self) -> None:
        """All that is here comes to its end once nobody withholds blocks."""
        try:
            for request in list(self.engine.scheduler.waiting_for_kv.values()):
                self._in_loop(partial(self.engine.abort, request.request_id))
            for _ in range(1 + 3 * len(self.engine.requests) * (MAX_TOKENS + 10)):
                self._step(lambda: None)
                while self._releasable():
                    self.release(0)
            assert not self.engine.requests
            self.every_block_is_accounted_for()
            assert not +self.book.owners
        finally:
            self.loop.close()

    def _new(self, prompt: list[int], answer: int, salt: str, n: int) -> Request:
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=min(answer, MAX_TOKENS - len(prompt)), n=n)
        return Request(f"r{self.count}", prompt, params, cache_salt=salt)

    def _abort(self, pick: int) -> None:
        live = list(self.engine.requests)
        self.engine.abort(live[pick % len(live)])

    def _releasable(self) -> list[Request]:
        return [r for r in self.held if r.status is RequestStatus.FINISHED]

    def _step(self, meanwhile: Callable[[], None]) -> None:
        if not self.engine.has_work:
            return
        self.executor.meanwhile = meanwhile
        preempted = {r for r in self.engine.scheduler.waiting if r.status is RequestStatus.PREEMPTED}
        task = self.loop.create_task(self.engine.step())
        self._in_loop(lambda: None)
        if not task.done():
            task.cancel()
            self._in_loop(lambda: None)
            assert self.engine.scheduler.waiting_for_kv or self._releasable(), "nothing is computed, though it could be"
            return
        task.result()
        assert not self.caching or self.book.ever_known.issuperset(self.executor.filled)
        self._check_victims(preempted)

    def _check_victims(self, preempted_before: set[Request]) -> None:
        """Nobody stays who came after somebody who had to go, save those whose KV is being read."""
        waiting = self.engine.scheduler.waiting
        victims = [r for r in waiting if r.status is RequestStatus.PREEMPTED and r not in preempted_before]
        assert not any(r.hold_blocks for r in victims), "its KV is being read"
        stay = [r for r in self.engine.scheduler.running if not r.hold_blocks]
        assert all((r.arrival, r.choice) < (victim.arrival, victim.choice) for r in stay for victim in victims)

    def _in_loop(self, act: Callable[[], T]) -> T:
        async def main() -> T:
            return act()

        return self.loop.run_until_complete(main())


# Failing steps are printed as they are: to shrink them takes minutes.
_SETTINGS = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


class ManyExamples(EngineMachine):
    pass


EngineMachine.TestCase.settings = _SETTINGS
test_engine_agrees_with_a_brute_force_account = EngineMachine.TestCase
ManyExamples.TestCase.settings = settings(_SETTINGS, max_examples=2_000)
test_engine_agrees_with_a_brute_force_account_many_times_over = pytest.mark.slow(ManyExamples.TestCase)
