"""The role-free engine: schedule -> execute -> update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from workers.config import CacheConfig, SchedulerConfig
from workers.engine.block_manager import BlockManager
from workers.engine.executor import Executor, SampledToken, StepResult
from workers.engine.prefix_cache import PrefixCache
from workers.engine.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from workers.errors import OverloadedError
from workers.request import FinishReason, Request, Timeline, TokenOutput, finish_reason_of

MakeScheduler = Callable[[SchedulerConfig, BlockManager, PrefixCache], Scheduler]


class Engine:
    """Continuous batching over a paged KV pool. All methods belong to one event loop."""

    def __init__(
        self,
        executor: Executor,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        make_scheduler: MakeScheduler = Scheduler,
    ) -> None:
        """`make_scheduler`: another way to fill a step, for measurements (baselines.py)."""
        self.executor = executor
        self.eos_token_ids = executor.runner.eos_token_ids
        self.block_manager = BlockManager(executor.runner.num_blocks, cache.block_size)
        self.prefix_cache = PrefixCache(cache, self.block_manager, executor.runner.layout.fingerprint)
        self.scheduler = make_scheduler(scheduler, self.block_manager, self.prefix_cache)
        self.requests: dict[str, Request] = {}
        # Finished requests whose KV is still being read.
        self._held: set[Request] = set()
        # Ended during a step that may still write to their blocks: freed when it is over.
        self._ended_in_step: list[Request] = []
        self._in_step: dict[str, Request] = {}
        self._work = asyncio.Event()
        self._num_arrivals = 0
        self.num_steps = 0
        self.num_prompt_tokens_computed = 0
        self.num_output_tokens = 0
        self.max_num_running = 0

    def add(self, request: Request) -> None:
        """Compute this request here from its tokens."""
        self._arrive(request)
        self.scheduler.add(request)
        self._work.set()

    def reserve(self, request: Request) -> None:
        """Take room for a request whose KV comes from another worker, from num_computed_tokens on.

        Raises OverloadedError when there is none.
        """
        if not self.scheduler.try_reserve(request):
            blocks = self.block_manager
            raise OverloadedError(
                f"no room for the KV of {request.num_tokens} tokens: {blocks.num_free + blocks.num_cached} of "
                f"{blocks.num_blocks} blocks can be taken"
            )
        self._arrive(request)

    def commit(self, request: Request, token_id: int) -> None:
        """The KV of all tokens of a reserved request is in its blocks, and `token_id` was sampled after them."""
        request.num_computed_tokens = request.num_tokens
        self.prefix_cache.publish(request)
        request.output_token_ids.append(token_id)
        request.handed_over = True
        request.arrived_s = _now()
        del self.scheduler.waiting_for_kv[request.request_id]
        self.scheduler.add(request)
        self._work.set()

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is and free its blocks, unless held. None when it is not here."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORTED)
        return request

    def release(self, request: Request) -> None:
        """Free the blocks of a held request: nobody reads or writes its KV any more."""
        if request in self._held:
            self._held.remove(request)
            self._free(request)

    async def wait_for_work(self) -> None:
        while not self.has_work:
            self._work.clear()
            await self._work.wait()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    async def step(self) -> list[TokenOutput]:
        """One forward pass. Raises what the executor raises; every request of the step is then still unfinished."""
        batch = self.scheduler.schedule()
        if not batch.requests:
            # All that is left waits for blocks that grants hold; a commit, an abort or a lease's end changes that.
            self._work.clear()
            await self._work.wait()
            return []
        step = self._in_step = {r.request_id: self.requests[r.request_id] for r in batch.requests}
        self.max_num_running = max(self.max_num_running, len(batch.requests))
        self._stamp_scheduled()
        try:
            results = await self.executor.execute(batch)
        finally:
            self._in_step = {}
            for request in self._ended_in_step:
                self._free(request)
            self._ended_in_step = []
        self.num_steps += 1
        return self._update(step, batch, results)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or owned by one request, running, waiting or held."""
        owned = [b for r in (*self.requests.values(), *self._held) for b in r.block_table]
        owned += [b for r in self._ended_in_step for b in r.block_table]
        self.block_manager.check_integrity(owned)
        assert {r.request_id for r in self.scheduler.live()} == set(self.requests), "requests and scheduler disagree"

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks of requests that run, wait for the next step, or are held; shared ones count once."""
        return len(self._blocks_in_use())

    @property
    def num_blocks_reserved(self) -> int:
        """Blocks that only requests waiting for KV have."""
        reserved = {b for r in self.scheduler.waiting_for_kv.values() for b in r.block_table}
        return len(reserved - self._blocks_in_use())

    @property
    def num_queued_tokens(self) -> int:
        live = (*self.scheduler.waiting, *self.scheduler.running)
        return sum(r.num_tokens - r.num_computed_tokens for r in live)

    def _blocks_in_use(self) -> set[int]:
        owners = (*self.scheduler.waiting, *self.scheduler.running, *self._held, *self._ended_in_step)
        return {b for r in owners for b in r.block_table}

    def _arrive(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"request {request.request_id} is here already"
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        request.arrived_s = _now()
        self.requests[request.request_id] = request

    def _stamp_scheduled(self) -> None:
        now = _now()
        for request in self._in_step.values():
            if request.scheduled_s is None:
                request.scheduled_s = now

    def _update(
        self, step: dict[str, Request], batch: SchedulerOutput, results: Sequence[StepResult]
    ) -> list[TokenOutput]:
        outputs = []
        for scheduled, result in zip(batch.requests, results, strict=True):
            request = step[scheduled.request_id]
            if self.requests.get(request.request_id) is not request:
                continue  # Ended while the step ran; another may already bear its id.
            self._count_computed(request, scheduled)
            if scheduled.prompt_scores is not None:
                # What a preempted request is computed anew takes the place of what it had.
                request.prompt_logprobs[scheduled.start :] = result.prompt_logprobs
            outputs += [self._append(request, token) for token in result.tokens]
        return outputs

    def _count_computed(self, request: Request, scheduled: ScheduledRequest) -> None:
        end = scheduled.start + len(scheduled.token_ids)
        request.num_computed_tokens = end
        self.prefix_cache.publish(request)
        self.num_prompt_tokens_computed += max(0, min(end, request.num_prompt_tokens) - scheduled.start)

    def _append(self, request: Request, token: SampledToken) -> TokenOutput:
        index = request.num_output_tokens
        request.output_token_ids.append(token.token_id)
        self.num_output_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = _now()
        reason = finish_reason_of(request.output_token_ids, request.params, self.eos_token_ids)
        ends_here = request.output_limit is not None and request.num_output_tokens >= request.output_limit
        timeline = _timeline(request) if reason or ends_here else None
        if reason or ends_here:
            self._finish(request, reason)
        output = TokenOutput(
            request.request_id,
            index,
            (token.token_id,),
            reason,
            timeline,
            router_id=request.router_id,
            logprobs=(token.logprobs,) if token.logprobs else (),
            choice=request.choice,
        )
        return output if index else _with_prompt(output, request)

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        del self.requests[request.request_id]
        self.scheduler.remove(request)
        request.finish_reason = reason
        if request.hold_blocks:
            self._held.add(request)
        else:
            self._free(request)
        self._work.set()

    def _free(self, request: Request) -> None:
        if self._in_step.get(request.request_id) is request:
            self._ended_in_step.append(request)
        else:
            self.scheduler.free(request)
            self._work.set()


def _with_prompt(output: TokenOutput, request: Request) -> TokenOutput:
    """Output token 0, which also tells what is known of the prompt."""
    logprobs, request.prompt_logprobs = tuple(request.prompt_logprobs), []
    return replace(output, prompt_logprobs=logprobs, num_cached_tokens=request.num_cached_tokens or 0)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _timeline(request: Request) -> Timeline:
    """What this engine knows of a request's time, at its last token here."""
    now = _now()
    scheduled_s = now if request.scheduled_s is None else request.scheduled_s
    if request.handed_over:
        decode = Timeline(decode_queued_s=scheduled_s - request.arrived_s, decode_s=now - scheduled_s)
        return request.hand_off + decode
    first_token_s = now if request.first_token_s is None else request.first_token_s
    return Timeline(
        prefill_queued_s=scheduled_s - request.arrived_s,
        prefill_s=first_token_s - scheduled_s,
        decode_s=now - first_token_s,
    )
