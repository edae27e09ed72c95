"""What a GPU adds to a model runner: decode steps as graphs, and copies of KV beside the steps.

A step that samples nothing, a chunk of a prompt, is computed while its KV is already asked for: each read waits for the
layers that it reads, and no longer. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from workers.engine.batch import StepBatch
from workers.engine.cuda_graphs import DecodeGraphs, graph_capture
from workers.engine.executor import Buffer
from workers.engine.kv_staging import KVStaging
from workers.engine.layer_events import LayerEvents
from workers.errors import ConfigError
from workers.kv_transfer.slots import Slots
from workers.models.loader import Model

# Of the first GPUs that compute with it.
FP8_CAPABILITY = (8, 9)
_log = logging.getLogger(__name__)


class CudaPath:
    """Owns the graphs, the events of the steps and the staging of KV; the model and the pool are the runner's."""

    def __init__(self, model: Model, pool: torch.Tensor, graph_rows: int, max_model_len: int) -> None:
        """Makes graphs for batches of up to `graph_rows` requests, 0: none, which takes seconds. ConfigError for a pool
        whose numbers the GPU does not know."""
        _require_fp8(pool)
        self._model = model
        self._pool = pool
        self._staging = KVStaging(pool)
        self._events = LayerEvents(pool.shape[0], torch.cuda.Event)
        self._graphs: DecodeGraphs | None = None
        if graph_rows:
            max_blocks = -(-max_model_len // pool.shape[3])
            forward = partial(model.forward, kv_cache=pool)
            self._graphs = DecodeGraphs(forward, graph_rows, max_blocks, pool.device, graph_capture())
            _log.info("captured decode steps of up to %d requests", graph_rows)
        # Not before: what is recorded within a capture, nobody else can wait for.
        model.watch(self._events.layer_done)

    def forward(self, step: StepBatch) -> torch.Tensor:
        """As the model's; its logits are good until the next call."""
        logits = self._graphs.run(step) if self._graphs else None
        if logits is None:
            return self._model.forward(step, self._pool)
        self._events.all_done()
        return logits

    def read(self, slots: Slots, layer_start: int, layer_end: int, room: memoryview) -> None:
        """As KVPool.read, without a cast."""
        self._staging.read(slots, slice(layer_start, layer_end), room, self._events.of(layer_end))

    def write(self, slots: Slots, layer_start: int, layer_end: int, payload: Buffer) -> None:
        """As KVPool.write, behind all that steps launched so far may still write there."""
        self._staging.write(slots, slice(layer_start, layer_end), payload, self._events.of(self._pool.shape[0]))


def _require_fp8(pool: torch.Tensor) -> None:
    if pool.dtype is torch.uint8 and torch.cuda.get_device_capability(pool.device) < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype: fp8 needs a GPU of compute capability 8.9 or later, and {torch.cuda.get_device_name()} "
            "is an older one: use bf16",
            param="kv_cache_dtype",
        )
