"""What a worker's model and KV pool are to be, and take of memory: of its config and the checkpoint's headers alone.

Neither torch nor ray here: it is asked before anything is started, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.config import CacheConfig, EngineConfig, ModelConfig, Quantization
from workers.errors import ConfigError
from workers.kv_transfer.layout import DTYPE_BYTES, KVLayout
from workers.layers.groups import GROUP
from workers.models.architecture import ArchitectureConfig
from workers.models.shard import kv_heads_of
from workers.models.stored import Stored, checkpoint_dtype

# Of a matrix, for each weight.
_BYTES_OF_BITS = {4: 0.5 + 4 / GROUP, 8: 1.0}
_BITS = {"int4": 4, "int8": 8, "int8_dynamic": 8}
_HEAD = 8  # Bits, where it is the embedding again.


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of a worker, all its ranks together."""

    weight_bytes: int
    kv_bytes: int
    num_blocks: int
    # Tokens of a request at most, and how many such requests the pool holds at once.
    max_model_len: int
    num_full_requests: float

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def footprint(config: EngineConfig, architecture: ArchitectureConfig, stored: Sequence[Stored]) -> Footprint:
    """Raises ConfigError when such a worker cannot be."""
    dtype = compute_dtype(config, config.quantization, checkpoint_dtype(stored))
    longest = max_model_len(config, architecture)
    # As each rank has it: a KV head is on several of them where there are fewer heads than ranks.
    ranks = config.tensor_parallel_size
    heads = len(kv_heads_of(architecture.num_kv_heads, 0, ranks)) * ranks
    layout = KVLayout(
        fingerprint="",
        num_layers=architecture.num_layers,
        num_kv_heads=heads,
        head_dim=architecture.head_dim,
        block_size=config.block_size,
        dtype=kv_cache_dtype(config, dtype, architecture),
    )
    num_blocks = num_pool_blocks(config, layout.token_bytes, longest)
    num_tokens = num_blocks * config.block_size
    return Footprint(
        weight_bytes=_weight_bytes(config, dtype, architecture, stored),
        kv_bytes=num_tokens * layout.token_bytes,
        num_blocks=num_blocks,
        max_model_len=longest,
        num_full_requests=num_tokens / longest,
    )


def _weight_bytes(config: EngineConfig, dtype: str, architecture: ArchitectureConfig, stored: Sequence[Stored]) -> int:
    dense = DTYPE_BYTES[dtype]
    total = 0.0
    for tensor in stored:
        bits = tensor.bits if config.quantization == "native" else _BITS.get(config.quantization)
        is_dense = bits is None or tensor.is_embedding or len(tensor.shape) == 1
        total += tensor.num_weights * (dense if is_dense else _BYTES_OF_BITS[bits or 8])
        if tensor.is_embedding and architecture.tie_word_embeddings and config.device == "cpu":
            # A head's kernel keeps it in an order of its own.
            total += tensor.num_weights * (dense if bits is None else _BYTES_OF_BITS[_HEAD])
    return int(total)


def compute_dtype(config: EngineConfig, quantization: Quantization, checkpoint: str) -> str:
    """`checkpoint`: its own."""
    if config.dtype != "auto":
        return config.dtype
    if quantization != "none":
        return "bfloat16"
    return "float32" if config.device == "cpu" else checkpoint


def kv_cache_dtype(config: CacheConfig, dtype: str, architecture: ArchitectureConfig) -> str:
    """`dtype`: the model's."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype == "float8_e4m3" and architecture.head_dim % 4:
        raise ConfigError(
            f"kv_cache_dtype: fp8 needs heads of a multiple of 4 numbers; this model's have {architecture.head_dim}: "
            "use bf16",
            param="kv_cache_dtype",
        )
    return config.kv_cache_dtype


def max_model_len(config: ModelConfig, architecture: ArchitectureConfig) -> int:
    limit = architecture.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {limit} tokens that the checkpoint was made for; "
            f"set it to {limit} or less",
            param="max_model_len",
        )
    return config.max_model_len or limit


def num_pool_blocks(config: CacheConfig, token_bytes: int, max_model_len: int) -> int:
    """Blocks of the pool, for KV of so many bytes a token. ConfigError when they cannot hold one request of
    max_model_len tokens."""
    block_bytes = token_bytes * config.block_size
    num_blocks = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // block_bytes
    needed = -(-max_model_len // config.block_size)
    if num_blocks >= needed:
        return num_blocks
    key, least = "kv_cache_memory_bytes", needed * block_bytes
    if config.num_gpu_blocks_override:
        key, least = "num_gpu_blocks_override", needed
    raise ConfigError(
        f"the KV pool's {num_blocks} blocks hold {num_blocks * config.block_size} tokens, fewer than one request of "
        f"max_model_len {max_model_len}; raise {key} to {least} or lower max_model_len",
        param=key,
    )
