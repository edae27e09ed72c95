"""A model and its KV pool on one device: the synchronous half of an engine."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.config import EngineConfig, Quantization
from workers.engine.batch import StepBatch, build_batch
from workers.engine.executor import Buffer, SampledToken, StepResult
from workers.engine.grammar import Allowed, Grammars
from workers.engine.kv_pool import KVPool
from workers.engine.scheduler import SchedulerOutput
from workers.engine.sizes import compute_dtype, kv_cache_dtype, max_model_len, num_pool_blocks
from workers.errors import ConfigError, KVFerryError
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import Slots
from workers.layers import compiled
from workers.layers.logprobs import first_of_top, token_logprobs
from workers.layers.ranks import ALONE, Ranks
from workers.layers.sampler import sample
from workers.models.architecture import ArchitectureConfig, read_architecture
from workers.models.loader import load_model, open_weights
from workers.models.resolve import resolve_model
from workers.models.shard import kv_heads_of, require_divisible
from workers.models.shared_weights import once_per_host
from workers.models.stored import weight_files
from workers.models.weights import Weights
from workers.request import TokenLogprobs
from workers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from workers.engine.cuda_path import CudaPath

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SAMPLE_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class ModelRunner:
    """Implements Runner: computes steps, and copies KV in and out of the pool.

    As one of several ranks it has a part of the model, and the KV of its own KV heads: `layout` is the whole model's,
    the KV that is read and written here is that of `kv_heads`.
    """

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, ranks: Ranks = ALONE, share_pool: bool = False) -> None:
        device = _device(config, ranks)
        torch.set_num_threads(max(1, (config.num_threads or len(os.sched_getaffinity(0))) // ranks.size))
        path = resolve_model(config.model)
        architecture = read_architecture(path)
        require_divisible(architecture, ranks.size)
        weights = open_weights(path, architecture)
        weights.require_quantisable(config.quantization)
        dtype = _dtype(config, config.quantization, weights)
        self.max_model_len = max_model_len(config, architecture)
        self.eos_token_ids = architecture.eos_token_ids
        self.layout = KVLayout(
            fingerprint=_fingerprint(config, architecture, weights, path),
            num_layers=architecture.num_layers,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            block_size=config.block_size,
            dtype=kv_cache_dtype(config, _DTYPE_NAMES[dtype], architecture),
        )
        self.kv_heads = kv_heads_of(architecture.num_kv_heads, ranks.rank, ranks.size)
        own = replace(self.layout, num_kv_heads=len(self.kv_heads))
        self.num_blocks = num_pool_blocks(config, own.token_bytes * ranks.size, self.max_model_len)
        build = partial(load_model, architecture, weights, dtype, device, ranks, config.quantization)
        is_shared = device.type == "cpu" and ranks.size == 1
        self._model = once_per_host(_model_key(config, architecture, dtype, path), build) if is_shared else build()
        self.kernels = self._model.kernels
        self._pool = KVPool(own, self.num_blocks, device, share_pool)
        self.host_pool = self._pool if device.type == "cpu" and ranks.size == 1 else None
        self._cuda: CudaPath | None = None
        if device.type == "cuda":
            # A mixture asks the GPU which experts to run, and ranks wait for each other: not for a graph.
            graphed = architecture.experts is None and ranks.size == 1
            self._cuda = self._cuda_path(config.max_num_seqs if graphed else 0)
        self._dtype, self._device = dtype, device
        self._windows = frozenset(architecture.windows)
        in_place = compiled.pages(dtype, self._pool.tensor.dtype, architecture.head_dim, device)
        self._grouped = not in_place or architecture.attention_softcap is not None
        self._grammars = Grammars(lambda: load_tokenizer(path), architecture.vocab_size, self.eos_token_ids)
        shape = (path.name, _DTYPE_NAMES[dtype], self.num_blocks, config.block_size, self.layout.dtype)
        _log.info("loaded %s in %s: %d KV blocks of %d in %s", *shape)
        _log.info("quantization %s: matrices by kernel %s", config.quantization, dict(self.kernels))

    def _cuda_path(self, graph_rows: int) -> CudaPath:
        # It needs Triton.
        from workers.engine.cuda_path import CudaPath

        return CudaPath(self._model, self._pool.tensor, graph_rows, self.max_model_len)

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput) -> list[StepResult]:
        """Compute one step; one result for each request, in their order."""
        if batch.copies:
            self._pool.copy(batch.copies)
        step = build_batch(batch, self.layout.block_size, self._dtype, self._device, self._windows, self._grouped)
        # What grammars allow is found out while the model computes.
        allowing = self._grammars.begin([batch.requests[i].request_id for i in step.sample_index], step.samples)
        logits = self._cuda.forward(step) if self._cuda else self._model.forward(step, self._pool.tensor)
        allowed = allowing.result() if allowing else {}
        tokens: list[list[SampledToken]] = [[] for _ in batch.requests]
        sampled = self._sample(step, logits[: len(step.samples)], allowed)
        for i, token in zip(step.sample_index, sampled, strict=True):
            tokens[i].append(token)
        results = [StepResult(tuple(one)) for one in tokens]
        for i, prompt_logprobs in _score_prompts(step, logits[len(step.samples) :]):
            results[i] = replace(results[i], prompt_logprobs=prompt_logprobs)
        for row, why_not in allowed.items():
            if isinstance(why_not, KVFerryError):
                results[step.sample_index[row]] = StepResult(error=why_not)
        return results

    def _sample(self, step: StepBatch, logits: torch.Tensor, allowed: Mapping[int, Allowed]) -> Iterator[SampledToken]:
        params = [one.params for one in step.samples]
        masks = {row: mask for row, mask in allowed.items() if isinstance(mask, np.ndarray)}
        tokens = sample(logits, step.samples, self.eos_token_ids, masks)
        shown = [row for row, p in enumerate(params) if p.logprobs is not None]
        num_top = max((params[row].logprobs or 0 for row in shown), default=0)
        scores = iter(token_logprobs(logits[shown], [tokens[row] for row in shown], num_top) if shown else ())
        for token, p in zip(tokens, params, strict=True):
            yield SampledToken(token, None if p.logprobs is None else first_of_top(next(scores), p.logprobs))

    def read_kv(
        self, slots: Slots, layer_start: int, layer_end: int, room: memoryview, dtype: str | None = None
    ) -> None:
        if self._cuda and dtype in (None, self.layout.dtype):
            self._cuda.read(slots, layer_start, layer_end, room)
        else:
            self._pool.read(slots, layer_start, layer_end, room, dtype)

    def write_kv(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        (self._cuda or self._pool).write(slots, layer_start, layer_end, payload)


def _score_prompts(step: StepBatch, logits: torch.Tensor) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
    row = 0
    for i, scores in step.prompt_scores:
        end = row + len(scores.token_ids)
        yield i, tuple(token_logprobs(logits[row:end], scores.token_ids, scores.num_top))
        row = end


def _device(config: EngineConfig, ranks: Ranks) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda but this machine offers none to torch; set device: cpu", param="device")
    if ranks.size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size {ranks.size} needs as many GPUs; torch finds {torch.cuda.device_count()}",
            param="tensor_parallel_size",
        )
    return torch.device("cuda", ranks.rank) if ranks.size > 1 else torch.device("cuda")


def _dtype(config: EngineConfig, quantization: Quantization, weights: Weights) -> torch.dtype:
    return _DTYPES[compute_dtype(config, quantization, _DTYPE_NAMES[weights.dtype])]


def _model_key(config: EngineConfig, architecture: ArchitectureConfig, dtype: torch.dtype, path: Path) -> str:
    """Equal for models on one host that are the same in memory."""
    files = [(str(file.resolve()), *_version(file)) for file in weight_files(path)]
    return repr((files, vars(architecture), str(dtype), config.quantization, compiled.kind(dtype)))


def _version(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _fingerprint(config: EngineConfig, architecture: ArchitectureConfig, weights: Weights, path: Path) -> str:
    """Of what computes the KV of prompts: equal for equal weights computed alike, wherever they lie.

    Files are sampled instead of read whole.
    """
    quantization = config.prompt_quantization
    dtype = _dtype(config, quantization, weights)
    kernels = compiled.kind(dtype) if config.device == "cpu" else config.device
    computed = (str(dtype), weights.quantisation, quantization, kernels)
    shape = sorted((key, value) for key, value in vars(architecture).items() if not key.endswith(("_ids", "_id")))
    digest = hashlib.sha256(repr((shape, *computed)).encode())
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
