"""The role-free engine: schedule -> execute -> update."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from workers.config import CacheConfig, SchedulerConfig
from workers.engine.block_manager import BlockManager
from workers.engine.choices import children_of
from workers.engine.executor import Executor, SampledToken, StepResult
from workers.engine.prefix_cache import PrefixCache
from workers.engine.scheduler import MakeScheduler, ScheduledRequest, Scheduler, SchedulerOutput
from workers.engine.timeline import timeline_of
from workers.errors import OverloadedError, UnavailableError
from workers.request import FinishReason, Request, RequestStatus, TokenOutput, failure, finish_reason_of, with_prompt


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
        # By request id and choice. A request of several choices is its choice 0 until its prompt is computed.
        self.requests: dict[str, dict[int, Request]] = {}
        # Finished requests whose KV is still being read or written, and readers of that of others.
        self.held: set[Request] = set()
        # Ended during a step that may still write to their blocks: freed when it is over.
        self.ended_in_step: list[Request] = []
        self._in_step: list[Request] = []
        self._work = asyncio.Event()
        self._num_arrivals = 0
        self.num_steps = 0
        self.num_prompt_tokens_computed = 0
        self.num_output_tokens = 0
        # Of speculative decoding: tried, and found right.
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.max_num_running = 0

    def add(self, request: Request) -> None:
        """Compute this request here from its tokens."""
        self._arrive(request)
        self.scheduler.add(request)
        self._work.set()

    def reserve(self, request: Request, max_blocks: int) -> None:
        """Take room for a request whose KV comes from another worker, from num_computed_tokens on.

        All such requests together hold `max_blocks` at most. Raises OverloadedError when there is no room.
        """
        if not self.scheduler.try_reserve(request, max_blocks):
            blocks = self.block_manager
            raise OverloadedError(
                f"no room for the KV of {request.num_tokens} tokens: {blocks.num_free + blocks.num_cached} of "
                f"{blocks.num_blocks} blocks can be taken, and hand-offs under way hold "
                f"{self.scheduler.num_blocks_reserved} of {max_blocks} (transfer.max_grant_blocks)"
            )
        self._arrive(request)

    def commit(self, request: Request, first_token_ids: Mapping[int, int]) -> None:
        """The KV that a reserved request waits for is in its blocks, and these were sampled after it, by choice.

        Choices that are not among them have ended. Where there are none, the KV is kept as a known prefix. Of an answer
        that goes on with other weights than prompts', it is the prompt's; its tokens are there, and computed here.
        """
        request.num_computed_tokens = self.prefix_cache.num_shareable(request)
        self.prefix_cache.publish(request)
        request.handed_over = True
        request.arrived_s = _now()
        if request.params.n > 1 or not first_token_ids:
            children = [child for child in children_of(request) if child.choice in first_token_ids]
            for child in children:
                child.output_token_ids.append(first_token_ids[child.choice])
            self._split(request, children)
        else:
            if request.num_computed_tokens == request.num_tokens:
                request.output_token_ids.append(first_token_ids[request.choice])
            del self.scheduler.waiting_for_kv[request.request_id]
            self.scheduler.add(request)
        self._work.set()

    def abort(self, request_id: str) -> bool:
        """End all choices of a request wherever they are and free their blocks, unless held. False: it is not here."""
        sequences = list(self.requests.get(request_id, {}).values())
        for request in sequences:
            self._finish(request, FinishReason.ABORTED)
        return bool(sequences)

    def hold(self, reader: Request) -> None:
        """Let `reader` own the blocks of its table, which are those of a live request, too, until `release`."""
        self.block_manager.share(reader.block_table)
        self.held.add(reader)

    def release(self, request: Request) -> None:
        """Free the blocks of a held request: nobody reads or writes its KV any more."""
        if request in self.held:
            self.held.remove(request)
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
            if not (given_back := self._give_back()):
                # What is left waits for blocks that grants hold; a commit, an abort or a lease's end changes that.
                self._work.clear()
                await self._work.wait()
            return given_back
        step = self._in_step = [self.requests[r.request_id][r.choice] for r in batch.requests]
        self.max_num_running = max(self.max_num_running, len(batch.requests))
        self._stamp_scheduled()
        try:
            results = await self.executor.execute(batch)
        finally:
            self._in_step = []
            for request in self.ended_in_step:
                self._free(request)
            self.ended_in_step = []
        self.num_steps += 1
        return self._update(step, batch, results) + self._give_back()

    def _give_back(self) -> list[TokenOutput]:
        """End who has no KV, where that of prompts is made with other weights than this engine's."""
        if self.prefix_cache.computes_prompts:
            return []
        lost = [request for request in self.scheduler.waiting if not request.block_table]
        for request in lost:
            self._finish(request, FinishReason.ERROR)
        error = UnavailableError("its KV made room for others', and its prompt is for prefill's weights to compute")
        return [failure(request, error) for request in lost]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or owned by one request, running, waiting or held."""
        owners = (*self.sequences(), *self.held, *self.ended_in_step)
        self.block_manager.check_integrity(b for r in owners for b in r.owned_blocks)
        assert set(self.scheduler.live()) == set(self.sequences()), "requests and scheduler disagree"

    def sequences(self) -> Iterator[Request]:
        """All that is alive: of a request with several choices, one for each once its prompt is computed."""
        for by_choice in self.requests.values():
            yield from by_choice.values()

    def blocks_in_use(self, besides: Sequence[Request] = ()) -> set[int]:
        """Of requests that run, wait for the next step, or are held, but those `besides`."""
        owners = {*self.scheduler.waiting, *self.scheduler.running, *self.held, *self.ended_in_step} - {*besides}
        return {b for r in owners for b in r.owned_blocks}

    def _arrive(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"request {request.request_id} is here already"
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        request.arrived_s = _now()
        self.requests[request.request_id] = {request.choice: request}

    def _stamp_scheduled(self) -> None:
        now = _now()
        for request in self._in_step:
            if request.scheduled_s is None:
                request.scheduled_s = now

    def _update(
        self, step: Sequence[Request], batch: SchedulerOutput, results: Sequence[StepResult]
    ) -> list[TokenOutput]:
        outputs = []
        for request, scheduled, result in zip(step, batch.requests, results, strict=True):
            if request.status is RequestStatus.FINISHED:
                continue  # While the step ran.
            self.scheduler.copied(request)
            if scheduled.prompt_scores is not None:
                # What a preempted request is computed anew takes the place of what it had.
                request.prompt_logprobs[scheduled.start :] = result.prompt_logprobs
            if result.error is not None:
                self._finish(request, FinishReason.ERROR)
                outputs.append(failure(request, result.error))
            elif request.params.n > 1:
                self._count_computed(request, scheduled, len(scheduled.token_ids))
                outputs += self._fork(request, result.tokens)
            else:
                outputs += self._continue(request, scheduled, result.tokens)
        return outputs

    def _continue(
        self, request: Request, scheduled: ScheduledRequest, sampled: Sequence[SampledToken]
    ) -> Iterator[TokenOutput]:
        """Its new tokens, if there are: as many of the drafts as are right, and the one after them."""
        drafts = scheduled.token_ids[len(scheduled.token_ids) - scheduled.num_drafts :]
        tokens = self._append(request, sampled, drafts)
        # The KV of wrong drafts does not count.
        num_right = max(0, len(tokens) - 1)
        self._count_computed(request, scheduled, len(scheduled.token_ids) - len(drafts) + num_right)
        self.num_draft_tokens += len(drafts)
        self.num_accepted_tokens += num_right
        if tokens:
            yield (output := self._output(request, tokens))
            if self._ends_here(request):
                self._finish(request, output.finish_reason)

    def _append(
        self, request: Request, sampled: Sequence[SampledToken], drafts: Sequence[int] = ()
    ) -> Sequence[SampledToken]:
        """Those of the sampled tokens that come after right drafts only, to the one that ends the request."""
        for count, token in enumerate(sampled, start=1):
            request.output_token_ids.append(token.token_id)
            right = count <= len(drafts) and drafts[count - 1] == token.token_id
            if not right or self._finish_reason(request) is not None:
                return sampled[:count]
        return sampled

    def _finish_reason(self, request: Request) -> FinishReason | None:
        return finish_reason_of(request.output_token_ids, request.params, self.eos_token_ids)

    def _ends_here(self, request: Request) -> bool:
        at_limit = request.output_limit is not None and request.num_output_tokens >= request.output_limit
        return at_limit or self._finish_reason(request) is not None

    def _fork(self, parent: Request, tokens: Sequence[SampledToken]) -> list[TokenOutput]:
        """Token 1 of every choice, if it is there."""
        if not tokens:
            return []
        children = children_of(parent)
        given = zip(children, tokens, strict=True)
        outputs = [self._output(child, self._append(child, [token])) for child, token in given]
        self._split(parent, [child for child in children if not self._ends_here(child)])
        return outputs

    def _split(self, parent: Request, children: Sequence[Request]) -> None:
        """The request goes on as these, each with a token of its own; where there are none, it ends."""
        if children:
            self.scheduler.fork(parent, children)
        self._finish(parent, None)
        if children:
            self.requests[parent.request_id] = {child.choice: child for child in children}

    def _count_computed(self, request: Request, scheduled: ScheduledRequest, num_tokens: int) -> None:
        """So many of the tokens that were scheduled have their KV."""
        end = scheduled.start + num_tokens
        request.num_computed_tokens = end
        self.prefix_cache.publish(request)
        self.num_prompt_tokens_computed += max(0, min(end, request.num_prompt_tokens) - scheduled.start)

    def _output(self, request: Request, tokens: Sequence[SampledToken]) -> TokenOutput:
        """Of its last `tokens`; the first and the last here tell where its time went so far."""
        index = request.num_output_tokens - len(tokens)
        self.num_output_tokens += len(tokens)
        reason, is_first = self._finish_reason(request), request.first_token_s is None
        if is_first:
            request.first_token_s = _now()
        timeline = timeline_of(request, _now()) if is_first or self._ends_here(request) else None
        token_ids = tuple(token.token_id for token in tokens)
        logprobs = tuple(token.logprobs for token in tokens if token.logprobs)
        output = TokenOutput(
            request.request_id, index, token_ids, reason, timeline,
            router_id=request.router_id, logprobs=logprobs, choice=request.choice,
        )  # fmt: skip
        return output if index else with_prompt(output, request)

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        del self.requests[request.request_id][request.choice]
        if not self.requests[request.request_id]:
            del self.requests[request.request_id]
        self.scheduler.remove(request)
        request.finish_reason = reason
        if request.hold_blocks:
            self.held.add(request)
        else:
            self._free(request)
        self._work.set()

    def _free(self, request: Request) -> None:
        if request in self._in_step:
            self.ended_in_step.append(request)
        else:
            self.scheduler.free(request)
            self._work.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
