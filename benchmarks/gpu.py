"""Checks and times everything that kvferry does on a GPU, in under five minutes and with random weights.

    python benchmarks/gpu.py                                                   on a machine with a GPU
    TRITON_INTERPRET=1 python benchmarks/gpu.py --device cpu --tiny            whether it runs at all

Needs torch, Triton, numpy and grpcio: neither ray nor pydantic, nor anything to download. One JSON object a line; those
with `ok` false fail the run. A floor is bytes over the rate of a copy, or operations over the rate of a matrix product,
both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch.nn import functional

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_checks import BF16, attend, graph_check, kernel_checks, staging_check
from benchmarks.gpu_clock import Rates, measure_rates, seconds
from benchmarks.gpu_hand_off import hand_off_rows
from benchmarks.gpu_model import BLOCK_SIZE, LLAMA_1B, LLAMA_8B, TINY, RandomModel
from tests.paged_case import Shape, make_case
from workers.engine.cuda_graphs import Capture, DecodeGraphs, graph_capture

Row = dict[str, object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that an interpreter gets through in seconds")
    options = parser.parse_args()
    with torch.inference_mode():
        return GpuBenchmark(torch.device(options.device), options.tiny).run()


class GpuBenchmark:
    def __init__(self, device: torch.device, tiny: bool) -> None:
        self._device = device
        self._tiny = tiny
        self._dtype = torch.float32 if device.type == "cpu" else BF16
        self._num_failed = 0
        self._started = time.monotonic()

    def run(self) -> int:
        """The number of the process's exit: 1 when a check failed, or a part did not run."""
        self._print([self._machine()])
        self._part("kernels", lambda: kernel_checks(self._device, self._tiny))
        rates = measure_rates(self._device, self._dtype, self._tiny)
        self._print([{name: value / 1e12 for name, value in vars(rates).items()} | {"unit": "T/s"}])
        self._part("attention", lambda: self._attention(rates))
        model = self._model()
        self._part("graphs", lambda: [graph_check(model, self._capture(), 40 if self._tiny else 3000)])
        self._part("staging", lambda: [staging_check(model.pool, 7 if self._tiny else 1000)])
        self._part("decode", lambda: self._decode(model, rates))
        self._part("prefill", lambda: self._prefill(model, rates))
        self._part("hand-off", lambda: hand_off_rows(model, 24 if self._tiny else 2048))
        self._print([{"seconds": time.monotonic() - self._started, "failed": self._num_failed}])
        return 1 if self._num_failed else 0

    def _part(self, name: str, rows: Callable[[], Iterable[Row]]) -> None:
        try:
            self._print(rows())
        except Exception:  # noqa: BLE001 - a GPU is lent for minutes: the other parts' figures count all the same
            self._num_failed += 1
            print(f"{name} did not run:\n{traceback.format_exc()}", file=sys.stderr, flush=True)

    def _print(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._num_failed += row.get("ok") is False
            print(json.dumps({key: _short(value) for key, value in row.items()}), flush=True)

    def _machine(self) -> Row:
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "cpu"
        return {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}

    def _model(self) -> RandomModel:
        if self._tiny:
            return RandomModel(TINY, 512, self._dtype, self._device)
        free, _ = torch.cuda.mem_get_info()
        shape = LLAMA_8B if free > 60e9 else LLAMA_1B
        model = RandomModel(shape, 160 * 1024, self._dtype, self._device)
        self._print([{"model": shape.name, "weights_gb": 2 * (shape.layer_weights + shape.head_weights) / 1e9}])
        return model

    def _capture(self) -> Capture:
        """For graphs that share their memory with no others."""
        return graph_capture() if self._device.type == "cuda" else lambda compute: compute

    def _attention(self, rates: Rates) -> Iterator[Row]:
        """One layer's kernel by itself, with the keys that it stores; torch's own attention beside it.

        Contexts are larger than the caches of a GPU.
        """
        shape = Shape(2, 1, 16) if self._tiny else Shape(32, 8, 128, dtype=BF16)
        for batch, context in [(2, 20)] if self._tiny else [(4, 8192), (16, 4096), (64, 2048)]:
            case = make_case(shape, [(context - 1, 1)] * batch, str(self._device))
            num_bytes = batch * context * 2 * shape.num_kv_heads * shape.head_dim * case.kv_cache.itemsize
            took = seconds(lambda case=case: attend(case), self._device)  # type: ignore[misc]
            yield _timed("attention_decode", took, num_bytes / rates.memory, batch=batch, context=context)
        for context in [20] if self._tiny else [2048, 8192]:
            case = make_case(shape, [(0, context)], str(self._device))
            # q k^T and its product with v, of one half of the square.
            floor = 2 * context**2 * shape.num_heads * shape.head_dim / rates.matrix
            took = seconds(lambda case=case: attend(case), self._device, 5)  # type: ignore[misc]
            q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (case.q, case.k, case.v))
            torchs = seconds(lambda q=q, k=k, v=v: _sdpa(q, k, v), self._device, 5)  # type: ignore[misc]
            yield _timed("attention_prefill", took, floor, tokens=context, sdpa_ms=torchs * 1e3)

    def _decode(self, model: RandomModel, rates: Rates) -> Iterator[Row]:
        """A step with one token of each request; its floor is one reading of the weights and of all KV."""
        shape, size = model.shape, self._dtype.itemsize
        shapes = [(2, 20)] if self._tiny else [(1, 1024), (8, 1024), (64, 2048)]
        max_blocks = -(-max(context for _, context in shapes) // BLOCK_SIZE) + 1
        graphs = DecodeGraphs(model.forward, max(b for b, _ in shapes), max_blocks, self._device, self._capture())
        for batch, context in shapes:
            step = model.step([(context - 1, 1)] * batch)
            kv_bytes = batch * context * shape.kv_numbers * size
            floor = (size * (shape.layer_weights + shape.head_weights) + kv_bytes) / rates.memory
            launched = seconds(lambda step=step: model.forward(step), self._device)  # type: ignore[misc]
            took = seconds(lambda step=step: graphs.run(step), self._device)  # type: ignore[misc]
            yield _timed("decode", took, floor, batch=batch, context=context, without_graph_ms=launched * 1e3)

    def _prefill(self, model: RandomModel, rates: Rates) -> Iterator[Row]:
        """A step with a prompt, or a chunk behind others; its floor is two operations a weight and token, and
        attention's."""
        shape = model.shape
        for start, num_tokens in [(8, 20)] if self._tiny else [(0, 512), (0, 2048), (0, 8192), (6144, 2048)]:
            step = model.step([(start, num_tokens)])
            pairs = num_tokens * start + num_tokens**2 / 2
            operations = 2.0 * num_tokens * shape.layer_weights + 2 * shape.head_weights
            operations += 4 * pairs * shape.num_layers * shape.num_heads * shape.head_dim
            took = seconds(lambda step=step: model.forward(step), self._device, 5)  # type: ignore[misc]
            yield _timed("prefill", took, operations / rates.matrix, start=start, tokens=num_tokens)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _timed(what: str, took: float, floor: float, **of: object) -> Row:
    return {"time": what, **of, "ms": took * 1e3, "floor_ms": floor * 1e3, "ratio": took / floor}


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
