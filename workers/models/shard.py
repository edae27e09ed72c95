"""Which part of a model each rank has. Neither torch nor ray here.

Attention is cut by heads and feed-forwards by their inner size (Shoeybi et al. 2019); embedding, norms, routers of
experts and head are whole on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from workers.errors import ConfigError
from workers.models.architecture import ArchitectureConfig


def share(total: int, rank: int, size: int) -> range:
    """Of things that can be divided among all ranks."""
    return range(rank * total // size, (rank + 1) * total // size)


def kv_heads_of(total: int, rank: int, size: int) -> range:
    """The KV heads of a rank's attention heads: where there are fewer than ranks, several ranks have the same."""
    first = rank * total // size
    return range(first, first + max(1, total // size))


def shard_of(config: ArchitectureConfig, rank: int, size: int) -> ArchitectureConfig:
    """The smaller model that one rank computes; its heads' and feed-forwards' outputs add up to the whole's."""
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=len(kv_heads_of(config.num_kv_heads, rank, size)),
        intermediate_size=config.intermediate_size // size,
        experts=experts and replace(experts, intermediate_size=experts.intermediate_size // size),
    )


def require_divisible(config: ArchitectureConfig, size: int) -> None:
    """Raise ConfigError, with the numbers, when the model cannot be cut into `size` parts."""
    if reason := _why_not(config, size):
        possible = [str(s) for s in range(1, config.num_heads + 1) if not _why_not(config, s)]
        raise ConfigError(
            f"{reason} cannot be divided by tensor_parallel_size {size}; this model can have {', '.join(possible)}",
            param="tensor_parallel_size",
        )


def _why_not(config: ArchitectureConfig, size: int) -> str | None:
    if config.num_heads % size:
        return f"{config.num_heads} attention heads"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"{config.num_kv_heads} KV heads"
    inner = [] if config.experts is None else [config.experts.intermediate_size]
    if config.experts is None or config.experts.dense_layers:
        inner.append(config.intermediate_size)
    return next((f"a feed-forward of {width}" for width in inner if width % size), None)
