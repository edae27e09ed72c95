"""What production does better, for `kvferry lab` to measure: the three ways of old to schedule a step.

Each is the Scheduler with one thing undone; the tokens stay the same and only the cost differs. No config key leads
here: `Engine(executor, cache, scheduler, make_scheduler=StaticBatching)`.
"""

from __future__ import annotations

from workers.config import SchedulerConfig
from workers.engine.block_manager import BlockManager
from workers.engine.prefix_cache import PrefixCache
from workers.engine.scheduler import Scheduler, SchedulerOutput
from workers.request import Request, RequestStatus


class NoKVCache(Scheduler):
    """Every token is computed from all tokens before it, the first position included.

    Such a pass shares max_num_batched_tokens with the others. What does not fit goes on in the next step, so blocks
    hold the KV of one unfinished pass, and nothing outlives it.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, prefix_cache: PrefixCache) -> None:
        super().__init__(config, block_manager, prefix_cache)
        # Their pass ended with the last step.
        self._sampled: list[Request] = []

    def schedule(self) -> SchedulerOutput:
        for request in self._sampled:
            if request.status is RequestStatus.RUNNING and self._grow(request):
                request.num_computed_tokens = 0
        output = super().schedule()
        sampled = {r.request_id for r in output.requests if r.samples}
        self._sampled = [r for r in self.running if r.request_id in sampled]
        return output

    def _take_blocks(self, request: Request, found: list[int], num_blocks: int, left: int) -> bool:
        return super()._take_blocks(request, [], num_blocks, left)


class ContiguousKV(Scheduler):
    """Every request has room for `max_model_len` tokens from its start to its end.

    All reservations are equally long, so one that is free fits any request: the blocks' order costs nothing and is left
    to the BlockManager.
    """

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, prefix_cache: PrefixCache, *, max_model_len: int
    ) -> None:
        super().__init__(config, block_manager, prefix_cache)
        self._num_blocks = block_manager.blocks_for(max_model_len)

    def _watermark(self) -> int:
        """Nothing grows."""
        return 0

    def _take_blocks(self, request: Request, found: list[int], num_blocks: int, left: int) -> bool:
        return super()._take_blocks(request, [], max(num_blocks, self._num_blocks), left)


class StaticBatching(Scheduler):
    """A batch starts together; the places of those that are done stay empty until all are."""

    def _admit(self) -> None:
        if not self.running:
            super()._admit()
