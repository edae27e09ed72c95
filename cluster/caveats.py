"""What a config gives up that its user may not expect: told by `kvferry config check` and `kvferry up`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.worker_configs import worker_configs
from workers.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Finding:
    """`key`: of the config, dotted; empty: of no one in particular."""

    key: str
    message: str


def caveats(config: ClusterConfig) -> Iterator[Finding]:
    """Each in one line: when a stream has other tokens than one to which nothing happened."""
    if config.unequal_roles:
        yield Finding(
            "quantization",
            f"{config.unequal_roles}: a stream that goes on elsewhere keeps both, but while no decode worker answers, "
            "prefill workers decode, and streams are not exact",
        )
    workers = worker_configs(config)
    kinds = {worker.role: worker.quantization for worker in workers}
    others = sorted({kind for role, kind in kinds.items() if role != "colocated"} - {kinds.get("colocated", "")})
    if "colocated" in kinds and others:
        yield Finding(
            "quantization",
            f"colocated workers compute with quantization {kinds['colocated']} and others with {' and '.join(others)}: "
            "a stream that goes on at the other kind is not exact",
        )
    if rounding := dict.fromkeys(worker.role for worker in workers if _rounds(worker)):
        yield Finding(
            "",
            f"{' and '.join(rounding)} workers compute or keep KV in less than float32: a stream that goes on "
            "elsewhere or is preempted is exact but for rounding, which may now and then choose another token",
        )


def _rounds(worker: WorkerConfig) -> bool:
    """Whether it matters if positions are computed one by one or as a chunk."""
    exact = worker.dtype == "float32" or (worker.dtype == "auto" and worker.device == "cpu")
    return not exact or worker.quantization != "none" or worker.kv_cache_dtype not in ("auto", "float32")
