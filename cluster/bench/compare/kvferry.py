"""Ourselves, as `kvferry up` starts us: colocated on all cores, or 1P1D with half of them each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cluster.bench.compare.contestant import MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL_NAME, Command, Contestant

_MODES: Mapping[str, Mapping[str, Any]] = {
    "colocated": {"colocated": {"replicas": 1}, "prefill": {"replicas": 0}, "decode": {"replicas": 0}},
    "1P1D": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def contestants(model: str, precisions: Sequence[str], more: Mapping[str, Any]) -> Iterator[Contestant]:
    """`more`: keys of the config that differ from ours. A precision is fp32, bf16 or what `quantization` takes; P+D is
    P on the prefill and D on the decode worker."""
    for mode in _MODES:
        for precision in precisions:
            if "+" in precision and mode == "colocated":
                continue
            config = config_of(model, mode, precision, more)
            yield Contestant("kvferry", mode, precision, partial(_commands, config))


def config_of(model: str, mode: str, precision: str, more: Mapping[str, Any]) -> dict[str, Any]:
    shared = {
        "name": f"bench-{mode}",
        "model": model,
        "served_model_name": MODEL_NAME,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "transfer": {"transport": "auto"},
        **more,
    }
    roles = {role: dict(settings) for role, settings in _MODES[mode].items()}
    if "+" in precision:
        for role, one in zip(("prefill", "decode"), precision.split("+"), strict=True):
            roles[role] |= _settings(one)
        return {**shared, **roles}
    return {**shared, **roles, **_settings(precision)}


def _settings(precision: str) -> dict[str, str]:
    return {"dtype": _DTYPES[precision]} if precision in _DTYPES else {"quantization": precision}


def _commands(config: Mapping[str, Any], folder: Path, port: int) -> list[Command]:
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump({**config, "router": {"http_port": port, "grpc_port": 0}}), encoding="utf-8")
    return [Command([sys.executable, "-m", "cluster.cli", "up", str(path)])]
