"""Prefix caching: which blocks already hold the KV of a request's first tokens.

Blocks are named by chained hashes: hash(i) = xxh3_128(hash(i - 1), token ids of unit i), hash(-1) = xxh3_128(salt).
The salt tells apart what must never be shared: models, quantisations and kernels (the layout's fingerprint), and the
request's own cache_salt. Units have hash_block_size tokens all over the cluster; every block_size is a multiple of it.
"""

from __future__ import annotations

from array import array

import xxhash

from workers.config import CacheConfig
from workers.engine.block_manager import BlockManager
from workers.request import Request


class PrefixCache:
    def __init__(self, config: CacheConfig, block_manager: BlockManager, fingerprint: str) -> None:
        self._enabled = config.enable_prefix_caching
        self._unit = config.hash_block_size
        self._blocks = block_manager
        self._fingerprint = fingerprint
        # Tokens looked up, and those of them that were found.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def find(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks of the longest known prefix that lies within the first `num_tokens`. Takes nothing."""
        if not self._enabled:
            return []
        self._extend_hashes(request)
        return self._blocks.find(self._hash(request, i) for i in range(num_tokens // self._blocks.block_size))

    def publish(self, request: Request) -> None:
        """The blocks that its computed tokens have filled since the last call may be shared from now on."""
        num_full = request.num_computed_tokens // self._blocks.block_size
        if not self._enabled or num_full <= request.num_published_blocks:
            return
        self._extend_hashes(request)
        for i in range(request.num_published_blocks, num_full):
            self._blocks.publish(request.block_table[i], self._hash(request, i))
        request.num_published_blocks = num_full

    def count(self, request: Request, num_hit_tokens: int) -> None:
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_hit_tokens

    def _hash(self, request: Request, block: int) -> bytes:
        """The hash of a block is that of its last unit."""
        units = self._blocks.block_size // self._unit
        return request.unit_hashes[(block + 1) * units - 1]

    def _extend_hashes(self, request: Request) -> None:
        hashes = request.unit_hashes
        for start in range(len(hashes) * self._unit, request.num_tokens - self._unit + 1, self._unit):
            parent = hashes[-1] if hashes else self._root(request)
            unit = array("i", request.tokens(start, start + self._unit)).tobytes()
            hashes.append(xxhash.xxh3_128_digest(parent + unit))

    def _root(self, request: Request) -> bytes:
        return xxhash.xxh3_128_digest(f"{self._fingerprint}\0{request.cache_salt}".encode())
