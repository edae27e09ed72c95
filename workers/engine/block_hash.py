"""Names of KV: chained hashes over token ids, the same wherever they are computed.

hash(i) = xxh3_128(hash(i - 1), token ids of unit i), hash(-1) = xxh3_128(salt). The salt tells apart what must never be
shared: models, quantisations and kernels (the layout's fingerprint), and the request's own cache_salt. Units have
hash_block_size tokens all over the cluster; every block_size is a multiple of it, and a block has its last unit's hash.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import xxhash

from workers.request import Request

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockHash:
    fingerprint: str
    # Tokens in a unit.
    unit: int

    def of_unit(self, request: Request, index: int) -> bytes:
        """Computes no more than what is missing up to there. The unit must be whole."""
        hashes = request.unit_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.unit
            parent = hashes[-1] if hashes else self._root(request)
            unit = array("i", request.tokens(start, start + self.unit)).tobytes()
            hashes.append(xxhash.xxh3_128_digest(parent + unit))
        return hashes[index]

    def _root(self, request: Request) -> bytes:
        return xxhash.xxh3_128_digest(f"{self.fingerprint}\0{request.cache_salt}".encode())
