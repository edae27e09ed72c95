from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_ERROR: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs", "prompt_logprobs", "n", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    n: int
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "router_id", "prompt_token_ids", "output_token_ids", "params", "cache_salt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: SamplingParams
    cache_salt: str
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., router_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("queued_s", "prefill_queued_s", "prefill_s", "transfer_s", "transfer_unhidden_s", "decode_queued_s", "decode_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_UNHIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    prefill_queued_s: float
    prefill_s: float
    transfer_s: float
    transfer_unhidden_s: float
    decode_queued_s: float
    decode_s: float
    def __init__(self, queued_s: _Optional[float] = ..., prefill_queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., transfer_unhidden_s: _Optional[float] = ..., decode_queued_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "finish_reason", "timeline", "error_type", "error_message", "logprobs", "prompt_logprobs", "num_cached_tokens", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    timeline: Timeline
    error_type: str
    error_message: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    num_cached_tokens: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., error_type: _Optional[str] = ..., error_message: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant_id", "incarnation", "address", "lease_s", "start", "end")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    incarnation: str
    address: str
    lease_s: float
    start: int
    end: int
    def __init__(self, grant_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., lease_s: _Optional[float] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class PeerStats(_message.Message):
    __slots__ = ("incarnation", "transport", "address", "checksum", "why")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    transport: str
    address: str
    checksum: bool
    why: str
    def __init__(self, incarnation: _Optional[str] = ..., transport: _Optional[str] = ..., address: _Optional[str] = ..., checksum: _Optional[bool] = ..., why: _Optional[str] = ...) -> None: ...

class StartPhase(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Buckets(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class GpuLink(_message.Message):
    __slots__ = ("uuid", "path", "num_nvlinks")
    UUID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_NVLINKS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    path: str
    num_nvlinks: int
    def __init__(self, uuid: _Optional[str] = ..., path: _Optional[str] = ..., num_nvlinks: _Optional[int] = ...) -> None: ...

class GpuStats(_message.Message):
    __slots__ = ("index", "uuid", "name", "utilization", "memory_used_bytes", "memory_total_bytes", "power_w", "links")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    name: str
    utilization: float
    memory_used_bytes: int
    memory_total_bytes: int
    power_w: float
    links: _containers.RepeatedCompositeFieldContainer[GpuLink]
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., utilization: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., power_w: _Optional[float] = ..., links: _Optional[_Iterable[_Union[GpuLink, _Mapping]]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("name", "role", "incarnation", "node", "pid", "block_size", "blocks_total", "blocks_free", "blocks_cached", "blocks_reserved", "blocks_in_use", "blocks_quarantined", "num_running", "num_waiting", "num_waiting_for_kv", "num_queued_tokens", "max_num_batched_tokens", "max_num_running", "num_steps", "num_prompt_tokens_computed", "num_output_tokens", "num_preemptions", "kv_bytes_sent", "kv_bytes_received", "num_frames_overlapped", "num_frames_sent", "num_frames_received", "peers", "cpu_affinity", "fingerprint", "num_draft_tokens", "num_accepted_tokens", "replicates", "kv_bytes_replicated", "num_replicas_refused", "hash_block_size", "decode_step_s", "prompt_token_s", "steps_s", "quantization", "kernels", "start_phases", "num_prefix_queried_tokens", "num_prefix_hit_tokens", "num_hand_offs_started", "num_hand_offs_committed", "num_hand_offs_released", "hand_offs_failed", "num_grants", "num_grants_expired", "num_grants_refused", "send_failures", "receive_failures", "transfer_s", "transfer_unhidden_s", "gpus", "metrics_address")
    class KernelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class HandOffsFailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SendFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReceiveFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_KV_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_OVERLAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_SENT_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CPU_AFFINITY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICATES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_REPLICATED_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    HASH_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_S_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    START_PHASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HAND_OFFS_STARTED_FIELD_NUMBER: _ClassVar[int]
    NUM_HAND_OFFS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_HAND_OFFS_RELEASED_FIELD_NUMBER: _ClassVar[int]
    HAND_OFFS_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_GRANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_GRANTS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_GRANTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEND_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_UNHIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    incarnation: str
    node: str
    pid: int
    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_reserved: int
    blocks_in_use: int
    blocks_quarantined: int
    num_running: int
    num_waiting: int
    num_waiting_for_kv: int
    num_queued_tokens: int
    max_num_batched_tokens: int
    max_num_running: int
    num_steps: int
    num_prompt_tokens_computed: int
    num_output_tokens: int
    num_preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    num_frames_overlapped: int
    num_frames_sent: int
    num_frames_received: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerStats]
    cpu_affinity: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    num_draft_tokens: int
    num_accepted_tokens: int
    replicates: bool
    kv_bytes_replicated: int
    num_replicas_refused: int
    hash_block_size: int
    decode_step_s: float
    prompt_token_s: float
    steps_s: float
    quantization: str
    kernels: _containers.ScalarMap[str, int]
    start_phases: _containers.RepeatedCompositeFieldContainer[StartPhase]
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_hand_offs_started: int
    num_hand_offs_committed: int
    num_hand_offs_released: int
    hand_offs_failed: _containers.ScalarMap[str, int]
    num_grants: int
    num_grants_expired: int
    num_grants_refused: int
    send_failures: _containers.ScalarMap[str, int]
    receive_failures: _containers.ScalarMap[str, int]
    transfer_s: Buckets
    transfer_unhidden_s: Buckets
    gpus: _containers.RepeatedCompositeFieldContainer[GpuStats]
    metrics_address: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., block_size: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_reserved: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_for_kv: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_running: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prompt_tokens_computed: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., num_frames_overlapped: _Optional[int] = ..., num_frames_sent: _Optional[int] = ..., num_frames_received: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerStats, _Mapping]]] = ..., cpu_affinity: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., replicates: _Optional[bool] = ..., kv_bytes_replicated: _Optional[int] = ..., num_replicas_refused: _Optional[int] = ..., hash_block_size: _Optional[int] = ..., decode_step_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., steps_s: _Optional[float] = ..., quantization: _Optional[str] = ..., kernels: _Optional[_Mapping[str, int]] = ..., start_phases: _Optional[_Iterable[_Union[StartPhase, _Mapping]]] = ..., num_prefix_queried_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_hand_offs_started: _Optional[int] = ..., num_hand_offs_committed: _Optional[int] = ..., num_hand_offs_released: _Optional[int] = ..., hand_offs_failed: _Optional[_Mapping[str, int]] = ..., num_grants: _Optional[int] = ..., num_grants_expired: _Optional[int] = ..., num_grants_refused: _Optional[int] = ..., send_failures: _Optional[_Mapping[str, int]] = ..., receive_failures: _Optional[_Mapping[str, int]] = ..., transfer_s: _Optional[_Union[Buckets, _Mapping]] = ..., transfer_unhidden_s: _Optional[_Union[Buckets, _Mapping]] = ..., gpus: _Optional[_Iterable[_Union[GpuStats, _Mapping]]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: WorkerStats
    def __init__(self, stats: _Optional[_Union[WorkerStats, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request", "replica_address")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    replica_address: str
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., replica_address: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "grant")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    request: Request
    grant: Grant
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request", "replica_address")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    request: Request
    replica_address: str
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., replica_address: _Optional[str] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("router_id", "request_ids")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, router_id: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConnectPeerRequest(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ConnectPeerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamOutputsRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class StreamOutputsResponse(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ...) -> None: ...

class StreamKVEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamKVEventsResponse(_message.Message):
    __slots__ = ("incarnation", "number", "reset", "entered", "left")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    number: int
    reset: bool
    entered: bytes
    left: bytes
    def __init__(self, incarnation: _Optional[str] = ..., number: _Optional[int] = ..., reset: _Optional[bool] = ..., entered: _Optional[bytes] = ..., left: _Optional[bytes] = ...) -> None: ...

class Ownership(_message.Message):
    __slots__ = ("request_id", "router_id", "state", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_id: str
    state: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., router_id: _Optional[str] = ..., state: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AuditWorkerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditWorkerResponse(_message.Message):
    __slots__ = ("name", "incarnation", "blocks_total", "free_block_ids", "cached_block_ids", "owners", "settle_s", "contradiction")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SETTLE_S_FIELD_NUMBER: _ClassVar[int]
    CONTRADICTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    blocks_total: int
    free_block_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_block_ids: _containers.RepeatedScalarFieldContainer[int]
    owners: _containers.RepeatedCompositeFieldContainer[Ownership]
    settle_s: float
    contradiction: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., blocks_total: _Optional[int] = ..., free_block_ids: _Optional[_Iterable[int]] = ..., cached_block_ids: _Optional[_Iterable[int]] = ..., owners: _Optional[_Iterable[_Union[Ownership, _Mapping]]] = ..., settle_s: _Optional[float] = ..., contradiction: _Optional[str] = ...) -> None: ...
