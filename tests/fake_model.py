"""A model whose next token is a hash over every KV byte that it reads, so that lost, foreign, stale or misplaced KV
changes the answer; and the same model without any cache, as its oracle."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from workers.config import EngineConfig
from workers.engine.executor import Buffer, SampledToken, StepResult
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import Slots, slots_of
from workers.request import FinishReason, SamplingParams, TokenLogprobs

NUM_LAYERS, HEAD_DIM = 3, 4
VOCAB_SIZE = 97
EOS = 0
_PLACES = (np.arange(NUM_LAYERS * 2 * HEAD_DIM, dtype=np.uint64) * np.uint64(131)).reshape(
    NUM_LAYERS, 2, 1, 1, HEAD_DIM
)


class HashRunner:
    """Implements Runner. The pool's words are the bits of float32: [num_layers, 2, num_slots, num_kv_heads=1, 4]."""

    host_pool = None
    kernels: Mapping[str, int] = {}

    def __init__(self, config: EngineConfig, fingerprint: str = "hash") -> None:
        assert config.num_gpu_blocks_override is not None
        assert config.max_model_len is not None
        self.num_blocks = config.num_gpu_blocks_override
        self.max_model_len = config.max_model_len
        self.eos_token_ids = frozenset({EOS})
        self.layout = KVLayout(fingerprint, NUM_LAYERS, 1, HEAD_DIM, config.block_size, "float32")
        self.pool = np.zeros((NUM_LAYERS, 2, self.num_blocks * config.block_size, 1, HEAD_DIM), np.uint32)
        # Other weights make other KV.
        self.weights = weights_of(config.quantization)
        # What each step computed: (request id, start, number of tokens).
        self.steps: list[list[tuple[str, int, int]]] = []

    def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        self.steps.append([(r.request_id, r.start, len(r.token_ids)) for r in batch.requests])
        for source, target in batch.copies:
            self.pool[:, :, self._slots_of(target)] = self.pool[:, :, self._slots_of(source)]
        return [StepResult(self._compute(request), prompt_logprobs_of(request)) for request in batch.requests]

    def read_kv(
        self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None
    ) -> None:
        assert dtype in (None, self.layout.dtype), "its KV is bits that no cast leaves alone"
        room[:] = self.pool[layer_start:layer_end, :, slots].tobytes()

    def write_kv(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        shape = (layer_end - layer_start, 2, len(slots), 1, HEAD_DIM)
        self.pool[layer_start:layer_end, :, slots] = np.frombuffer(payload, np.uint32).reshape(shape)

    def _slots_of(self, block: int) -> slice:
        return slice(block * self.layout.block_size, (block + 1) * self.layout.block_size)

    def _compute(self, request: ScheduledRequest) -> tuple[SampledToken, ...]:
        end = request.start + len(request.token_ids)
        slots = slots_of(request.block_table, 0, end, self.layout.block_size)
        self.pool[:, :, slots[request.start :]] = kv_of(request.token_ids, request.start) ^ self.weights
        return tuple(
            sample(self.pool[:, :, slots[: s.position]], s.params, s.position, s.choice) for s in request.samples
        )


def weights_of(quantization: str) -> np.uint32:
    """What KV is mixed with; 0 for "none"."""
    return np.uint32(0 if quantization == "none" else xxhash.xxh32_intdigest(quantization.encode()))


def kv_of(token_ids: Sequence[int], start: int = 0) -> np.ndarray:
    """[num_layers, 2, num_tokens, 1, head_dim]: a function of (token id, position, place in it)."""
    tokens = np.asarray(token_ids, np.uint64)
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    words = (tokens * np.uint64(1_000_003) + positions * np.uint64(8_191))[:, None, None] + _PLACES
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.asarray(words >> np.uint64(32), np.uint32)


def sample(kv: np.ndarray, params: SamplingParams, position: int, choice: int = 0) -> SampledToken:
    """The token at `position`, after KV of [0, position); seed, choice and position count when it is drawn."""
    draw = b"" if params.greedy else struct.pack("<QII", (params.seed or 0) & (1 << 64) - 1, choice, position)
    digest = xxhash.xxh3_64_intdigest(kv.tobytes() + draw)
    token_id = digest % VOCAB_SIZE
    return SampledToken(token_id, None if params.logprobs is None else _logprob(token_id, digest))


def prompt_logprobs_of(request: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
    """Functions of token and position."""
    if (scores := request.prompt_scores) is None:
        return ()
    return tuple(_logprob(token, request.start + 1 + i) for i, token in enumerate(scores.token_ids))


def _logprob(token_id: int, number: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -(number >> 3 & 0xFFFF) / 4096, 1 + (number & 7))


def expected(prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> tuple[list[int], FinishReason]:
    """The whole answer, recomputed from all tokens for each one."""
    sampled, reason = expected_samples(prompt, params, choice)
    return [token.token_id for token in sampled], reason


def expected_samples(
    prompt: Sequence[int], params: SamplingParams, choice: int = 0
) -> tuple[list[SampledToken], FinishReason]:
    """The same with logprobs, where they are asked for."""
    assert params.max_tokens is not None
    sampled: list[SampledToken] = []
    while len(sampled) < params.max_tokens:
        so_far = [*prompt, *(token.token_id for token in sampled)]
        sampled.append(sample(kv_of(so_far), params, len(so_far), choice))
        last = sampled[-1].token_id
        if last in params.stop_token_ids or (last == EOS and not params.ignore_eos):
            return sampled, FinishReason.STOP
    return sampled, FinishReason.LENGTH


def expected_choices(prompt: Sequence[int], params: SamplingParams) -> dict[int, list[int]]:
    return {choice: expected_tokens(prompt, params, choice) for choice in range(params.n)}


def expected_tokens(prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
    return expected(prompt, params, choice)[0]
