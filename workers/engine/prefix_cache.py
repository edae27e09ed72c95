"""Prefix caching: which blocks already hold the KV of a request's first tokens, by their hashes (block_hash.py)."""

from __future__ import annotations

from workers.config import CacheConfig
from workers.engine.block_hash import BlockHash
from workers.engine.block_manager import BlockManager
from workers.request import Request


class PrefixCache:
    def __init__(self, config: CacheConfig, block_manager: BlockManager, fingerprint: str) -> None:
        self._enabled = config.enable_prefix_caching
        # Whether weights here are those of prompts.
        self.computes_prompts = config.computes_prompts
        self._hash_of = BlockHash(fingerprint, config.hash_block_size)
        self._blocks = block_manager
        # Tokens looked up, and those of them that were found.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def num_shareable(self, request: Request) -> int:
        """Of its tokens, those whose KV a hash names: all that are computed with the weights of prompts."""
        return request.num_tokens if self.computes_prompts else request.num_prompt_tokens

    def find(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks of the longest known prefix that lies within the first `num_tokens`. Takes nothing."""
        if not self._enabled:
            return []
        return self._blocks.find(self._hash(request, i) for i in range(num_tokens // self._blocks.block_size))

    def publish(self, request: Request) -> None:
        """The blocks that its computed tokens have filled since the last call may be shared from now on."""
        num_full = min(request.num_computed_tokens, self.num_shareable(request)) // self._blocks.block_size
        if not self._enabled or num_full <= request.num_published_blocks:
            return
        for i in range(request.num_published_blocks, num_full):
            self._blocks.publish(request.block_table[i], self._hash(request, i))
        request.num_published_blocks = num_full

    def count(self, request: Request, num_hit_tokens: int) -> None:
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_hit_tokens

    def _hash(self, request: Request, block: int) -> bytes:
        """The hash of a block is that of its last unit."""
        units = self._blocks.block_size // self._hash_of.unit
        return self._hash_of.of_unit(request, (block + 1) * units - 1)
