"""A model over a paged pool, one step at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.workers.scheduled import scheduled
from workers.config import Quantization
from workers.engine.batch import build_batch
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.models.architecture import read_architecture
from workers.models.loader import load_model, open_weights
from workers.request import SamplingParams

BLOCK_SIZE = 16
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
PROMPT_LENGTHS = (1, 15, 16, 17, 200)


class Paged:
    """A model with a pool whose blocks are dealt out in a shuffled order; garbage in the free ones."""

    def __init__(
        self, path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, quantization: Quantization = "none"
    ) -> None:
        self.config = read_architecture(path)
        self.dtype = dtype
        with torch.inference_mode():
            weights = open_weights(path, self.config)
            self.model = load_model(self.config, weights, dtype, CPU, quantization=quantization)
        shape = (self.config.num_layers, 2, 128, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_dim)
        self.kv_cache = torch.full(shape, 1e3, dtype=dtype)
        self._free = iter(torch.randperm(128, generator=torch.Generator().manual_seed(seed)).tolist())

    def table(self, num_tokens: int) -> list[int]:
        return list(itertools.islice(self._free, -(-num_tokens // BLOCK_SIZE)))

    def step(self, *requests: ScheduledRequest) -> list[torch.Tensor]:
        """Logits of each request's last token."""
        output = SchedulerOutput(requests, sum(len(r.token_ids) for r in requests))
        batch = build_batch(output, BLOCK_SIZE, self.dtype, CPU, self.config.windows)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.kv_cache)
        by_request = dict(zip(batch.sample_index, logits, strict=True))
        return [by_request[i] for i in range(len(requests))]

    def chunked(self, ids: Sequence[int], size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(end, logits of the token before end) for each chunk of at most `size` tokens."""
        table = self.table(len(ids))
        for start in range(0, len(ids), size):
            end = min(start + size, len(ids))
            yield end, self.step(share(ids, start, end, table))[0]


def share(ids: Sequence[int], start: int, end: int, table: Sequence[int]) -> ScheduledRequest:
    return scheduled("r", ids[start:end], start, table, GREEDY)


def prompt(length: int, seed: int = 1, vocab_size: int = 256) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (got - want).abs().max().item() < tolerance
