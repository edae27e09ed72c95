"""A dense Llama of random weights over a pool of random KV, and steps of it: needs no checkpoint and no scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional

from tests.paged_case import Queried, Share
from workers.engine.batch import StepBatch
from workers.layers.block import PreNormLayer
from workers.layers.block_tables import block_tables
from workers.layers.embedding import Embedding
from workers.layers.mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.ranks import ALONE
from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention
from workers.layers.triton_attention import TritonPagedAttention
from workers.models.decoder import Decoder
from workers.models.rope import Rope

BLOCK_SIZE = 16


@dataclass(frozen=True)
class ModelShape:
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        """Numbers of the layers' matrices."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.num_layers * self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def kv_numbers(self) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


LLAMA_8B = ModelShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = ModelShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256)
TINY = ModelShape("tiny", 2, 32, 48, 2, 1, 16, 64)


class RandomModel:
    def __init__(self, shape: ModelShape, pool_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self.decoder = self._decoder()
        num_blocks = -(-pool_tokens // BLOCK_SIZE)
        pool = (shape.num_layers, 2, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.pool = torch.empty(pool, dtype=dtype, device=device).normal_(generator=self._generator)

    def forward(self, step: StepBatch) -> torch.Tensor:
        return self.decoder.forward(step, self.pool)

    def step(self, shares: Sequence[Share]) -> StepBatch:
        """Requests with one query first. A token is sampled after each, as far as the model is concerned."""
        requests = list(self._requests(shares))
        lengths = [n for _, n in shares]
        slots, positions = [], []
        for request in requests:
            for at in range(request.start, request.start + len(request.token_ids)):
                positions.append(at)
                slots.append(request.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        num_decodes = sum(n == 1 for n in lengths)
        return StepBatch(
            token_ids=self._numbers([i % self.shape.vocab_size for i in range(sum(lengths))]),
            positions=self._numbers(positions),
            slot_mapping=self._numbers(slots),
            plans={},
            sample_rows=torch.tensor(lengths, device=self.device).cumsum(0) - 1,
            samples=cast(Any, (None,) * len(shares)),
            sample_index=tuple(range(len(shares))),
            prompt_scores=(),
            tables=block_tables(cast(Any, requests), num_decodes, self.device),
        )

    def _requests(self, shares: Sequence[Share]) -> Iterator[Queried]:
        """Their blocks lie all over the pool."""
        free = torch.randperm(self.pool.shape[2], generator=torch.Generator().manual_seed(1)).tolist()
        for start, num_tokens in shares:
            table = [free.pop() for _ in range(-(-(start + num_tokens) // BLOCK_SIZE))]
            yield Queried(range(num_tokens), start, table)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def _decoder(self) -> Decoder:
        shape = self.shape
        rotary = RotaryEmbedding(Rope(theta=5e5, dim=shape.head_dim), self.device)
        kernel = TritonPagedAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        layers = [self._layer(rotary, kernel) for _ in range(shape.num_layers)]
        embedding = Embedding(self._matrix(shape.vocab_size, shape.hidden_size))
        head = self._linear(shape.vocab_size, shape.hidden_size)
        return Decoder(embedding, [rotary], layers, self._norm(), head, shape.vocab_size)

    def _layer(self, rotary: RotaryEmbedding, kernel: TritonPagedAttention) -> PreNormLayer:
        shape = self.shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        attention = SelfAttention(self._linear(q + 2 * kv, hidden), self._linear(hidden, q), rotary, kernel)
        mlp = GatedMLP(self._linear(2 * inner, hidden), self._linear(hidden, inner), functional.silu)
        return PreNormLayer(self._norm(), attention, self._norm(), mlp, ALONE)

    def _norm(self) -> RMSNorm:
        return RMSNorm(torch.ones(self.shape.hidden_size, dtype=self.dtype, device=self.device), 1e-5)

    def _linear(self, rows: int, columns: int) -> Any:
        """As Linear: what a GPU multiplies with, and nothing that would have to be repacked."""
        return partial(functional.linear, weight=self._matrix(rows, columns))

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty((rows, columns), dtype=self.dtype, device=self.device)
        return weight.normal_(std=columns**-0.5, generator=self._generator)
