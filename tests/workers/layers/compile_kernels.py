"""Compiles the kernels for a GPU that need not be here; a program, since Triton interprets or compiles, not both.

    python -m tests.workers.layers.compile_kernels ARCHITECTURE     90: Hopper

Prints a JSON object a kernel: its name and the bytes of shared memory that it takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.layers import triton_decode, triton_kv, triton_prefill
from workers.layers.block_tables import QUERY_TILE
from workers.layers.kv_codec import pool_width
from workers.layers.triton_shape import Heads

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.uint8
_TYPES = {BF16: "*bf16", FP32: "*fp32", FP8: "*u8"}
# (q's dtype, the pool's, head_dim, window, softcap)
CASES = [
    (BF16, BF16, 128, None, None),
    (BF16, BF16, 80, None, None),
    (FP32, FP32, 128, None, None),
    (BF16, BF16, 256, 100, 30.0),
    (BF16, FP8, 128, None, None),
]
# Pointers of other types than q's; what ends in _ptr and is not here is as `q_ptr`.
_POINTERS = {
    **dict.fromkeys(("partial_ptr", "largest_ptr", "total_ptr"), "*fp32"),
    **dict.fromkeys(("tables_ptr", "lens_ptr", "query_starts_ptr", "tile_requests_ptr", "tile_starts_ptr"), "*i32"),
    "slots_ptr": "*i64",
}


def compiled(kernel: Any, target: GPUTarget, pointers: dict[str, str], constants: dict[str, Any]) -> dict[str, object]:
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = pointers.get(name) or _POINTERS.get(name) or pointers["q_ptr"]
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i32"
    # As PyTorch allocates: what a launch would find out.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    made = triton.compile(ASTSource(kernel, types, constants, aligned), target=target, options=options)
    return {"kernel": kernel.__name__, "shared": made.metadata.shared, "cubin": len(made.asm["cubin"])}


def attention_kernels(target: GPUTarget) -> Iterator[dict[str, object]]:
    for dtype, pool, head_dim, window, softcap in CASES:
        heads = Heads(8, 2, head_dim, head_dim**-0.5, window, softcap)
        shared = heads.constants(torch.empty((2, 1, 16, 2, pool_width(pool, head_dim)), dtype=pool))
        scales = _TYPES[FP32 if pool is FP8 else pool]
        pointers = {"q_ptr": _TYPES[dtype], "kv_ptr": _TYPES[pool], "scale_ptr": scales}
        keys = triton_decode.key_tile(dtype)
        decode = {**shared, "GROUP_ROWS": 16, "KEY_TILE": keys, "SPLIT": 256, "num_warps": 4, "num_stages": 3}
        yield compiled(triton_decode._attend_to_splits, target, pointers, decode)
        join = {"HEAD_DIM": head_dim, "DIMS": heads.dims, "WINDOW": window or 0, "SPLIT": 256, "SPLIT_TILE": 16}
        yield compiled(triton_decode._join_splits, target, pointers, join)
        prefill = {**shared, "QUERY_TILE": QUERY_TILE, **triton_prefill.prefill_tile(dtype, heads.dims)}
        yield compiled(triton_prefill._attend, target, pointers, prefill)


def copy_kernels(target: GPUTarget) -> Iterator[dict[str, object]]:
    yield compiled(triton_kv._store, target, {"q_ptr": "*bf16"}, {"SIZE": 320, "TILE": 512})
    for to_pool in (True, False):
        constants = {"SIZE": 160, "TILE": 256, "SLOT_TILE": 4, "TO_POOL": to_pool}
        yield compiled(triton_kv._copy, target, {"q_ptr": "*i32"}, constants)


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for made in (*attention_kernels(target), *copy_kernels(target)):
        print(json.dumps(made))


if __name__ == "__main__":
    main()
