"""How much of its pool a decode worker gives to hand-offs on their way (transfer.max_grant_blocks).

What runs cannot grow into blocks that wait for KV, and such blocks give no tokens: without a bound, a burst of prompts
takes the pool from answers that have begun.
"""

from __future__ import annotations

from workers.config import TransferConfig
from workers.engine.engine import Engine
from workers.errors import ConfigError, InvalidRequestError
from workers.request import Request


def num_grant_blocks(config: TransferConfig, engine: Engine) -> int:
    """Blocks that hand-offs may hold at once. ConfigError when one of a request of max_model_len cannot be."""
    blocks, max_model_len = engine.block_manager, engine.executor.runner.max_model_len
    # The last of its tokens is sampled and has no KV yet, but has its place.
    longest = blocks.blocks_for(max_model_len)
    if config.max_grant_blocks is None:
        most_choices = engine.scheduler.config.max_num_seqs
        return min(blocks.num_blocks, max(blocks.num_blocks // 2, longest + most_choices - 1))
    if config.max_grant_blocks >= longest:
        return min(config.max_grant_blocks, blocks.num_blocks)
    raise ConfigError(
        f"max_grant_blocks is {config.max_grant_blocks}: {config.max_grant_blocks * blocks.block_size} tokens, fewer "
        f"than one request of max_model_len {max_model_len}; raise it to {longest} or lower max_model_len",
        param="transfer.max_grant_blocks",
    )


def require_room(request: Request, engine: Engine, max_blocks: int) -> None:
    """InvalidRequestError when a hand-off of this request is more than all of them may hold together."""
    needed = engine.block_manager.blocks_for_choices(request.num_tokens, request.params.n)
    if needed > max_blocks:
        raise InvalidRequestError(
            f"{request.request_id}: {request.params.n} choices after {request.num_tokens} tokens need {needed} KV "
            f"blocks, and hand-offs may hold {max_blocks} (transfer.max_grant_blocks); lower n",
            param="n",
        )
