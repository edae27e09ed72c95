"""vLLM on CPUs from a venv of its own, tuned: on all cores, or 1P1D over NIXL with a proxy in front."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from cluster.bench.compare.contestant import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODEL_NAME,
    Command,
    Contestant,
    free_ports,
)
from cluster.cores import deal_cores
from workers.errors import ConfigError

# Larger steps than its own default of 2,048 would allow make prompts no faster, and decodes wait for them.
_MAX_NUM_BATCHED_TOKENS = 512
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
_TCMALLOC = "libtcmalloc_minimal.so.4"


def contestants(venv: Path, hf_model: Path, precisions: Sequence[str]) -> Iterator[Contestant]:
    """1P1D only where nixl is installed beside it. Raises ConfigError when what makes it fast is missing."""
    preload = _preload(venv)
    for precision in precisions:
        if precision not in _DTYPES:
            continue
        serve = [str(venv / "bin/vllm"), "serve", str(hf_model), "--dtype", _DTYPES[precision], *_flags()]
        yield Contestant("vllm", "colocated", precision, partial(_colocated, serve, preload))
        if any(venv.glob("lib/python*/site-packages/nixl")):
            yield Contestant("vllm", "1P1D", precision, partial(_one_p_one_d, serve, preload))


def _flags() -> tuple[str, ...]:
    return (
        *("--host", "127.0.0.1", "--served-model-name", MODEL_NAME),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--max-num-batched-tokens", str(_MAX_NUM_BATCHED_TOKENS)),
    )


def _preload(venv: Path) -> str:
    tcmalloc = next(Path("/usr/lib").glob(f"*-linux-gnu/{_TCMALLOC}"), None)
    openmp = next(venv.glob("lib/libiomp5.so"), None)
    if tcmalloc is None:
        raise ConfigError(f"vLLM is not tuned without {_TCMALLOC}: apt-get install libtcmalloc-minimal4")
    if openmp is None:
        raise ConfigError(f"vLLM is not tuned without libiomp5.so: {venv}/bin/pip install intel-openmp")
    return f"{tcmalloc}:{openmp}"


def _env(preload: str, cores: Sequence[int], cache_gib: int) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": preload,
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0]),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _colocated(serve: Sequence[str], preload: str, folder: Path, port: int) -> list[Command]:
    cores = sorted(os.sched_getaffinity(0))
    return [Command([*serve, "--port", str(port)], _env(preload, cores, 2))]


def _one_p_one_d(serve: Sequence[str], preload: str, folder: Path, port: int) -> list[Command]:
    shares = deal_cores(sorted(os.sched_getaffinity(0)), 2)
    ports, side_ports = free_ports(2), free_ports(2)
    commands = []
    for cores, own_port, side_port in zip(shares, ports, side_ports, strict=True):
        pinned = ("taskset", "-c", ",".join(map(str, cores)))
        nixl = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "UCX_TLS": "tcp,sm,self"}
        flags = ("--port", str(own_port), "--kv-transfer-config", json.dumps(_NIXL))
        commands.append(Command([*pinned, *serve, *flags], {**_env(preload, cores, 1), **nixl}))
    proxy = [sys.executable, "-m", "cluster.bench.compare.nixl_proxy", *map(str, (port, *ports))]
    return [*commands, Command(proxy)]
