from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_UNREACHABLE: _ClassVar[WorkerState]

class JobStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATUS_UNSPECIFIED: _ClassVar[JobStatus]
    JOB_STATUS_RUNNING: _ClassVar[JobStatus]
    JOB_STATUS_COMPLETED: _ClassVar[JobStatus]
    JOB_STATUS_CANCELLED: _ClassVar[JobStatus]
    JOB_STATUS_EXPIRED: _ClassVar[JobStatus]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_UNREACHABLE: WorkerState
JOB_STATUS_UNSPECIFIED: JobStatus
JOB_STATUS_RUNNING: JobStatus
JOB_STATUS_COMPLETED: JobStatus
JOB_STATUS_CANCELLED: JobStatus
JOB_STATUS_EXPIRED: JobStatus

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Strings(_message.Message):
    __slots__ = ("strings",)
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, strings: _Optional[_Iterable[str]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Strings
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Strings, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("ttft_ms", "tpot_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tpot_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "messages", "params", "stop", "include_stop_str_in_output", "skip_special_tokens", "cache_salt", "structured_output", "output_token_ids", "priority", "slo")
    class OutputTokenIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: TokenIds
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    messages: Messages
    params: _worker_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    cache_salt: str
    structured_output: StructuredOutput
    output_token_ids: _containers.MessageMap[int, TokenIds]
    priority: int
    slo: Slo
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., params: _Optional[_Union[_worker_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., output_token_ids: _Optional[_Mapping[int, TokenIds]] = ..., priority: _Optional[int] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_completion_tokens", "num_cached_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "text", "finish_reason", "usage", "timeline", "ttft_s", "tpot_s", "logprobs", "prompt_logprobs", "choice", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: _worker_pb2.FinishReason
    usage: Usage
    timeline: _worker_pb2.Timeline
    ttft_s: float
    tpot_s: float
    logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    choice: int
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[_worker_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timeline: _Optional[_Union[_worker_pb2.Timeline, _Mapping]] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("address", "state", "stats", "refused", "unfit", "draining")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: WorkerState
    stats: _worker_pb2.WorkerStats
    refused: str
    unfit: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., stats: _Optional[_Union[_worker_pb2.WorkerStats, _Mapping]] = ..., refused: _Optional[str] = ..., unfit: _Optional[_Iterable[str]] = ..., draining: _Optional[bool] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("name", "incarnation", "pid", "num_queued", "num_running", "policy", "num_indexed_blocks", "start_phases")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    START_PHASES_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    pid: int
    num_queued: int
    num_running: int
    policy: str
    num_indexed_blocks: int
    start_phases: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StartPhase]
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., policy: _Optional[str] = ..., num_indexed_blocks: _Optional[int] = ..., start_phases: _Optional[_Iterable[_Union[_worker_pb2.StartPhase, _Mapping]]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("name", "ready", "http_endpoint", "grpc_endpoint", "served_model_names", "routers", "workers", "start_phases", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HTTP_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    GRPC_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    START_PHASES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: bool
    http_endpoint: str
    grpc_endpoint: str
    served_model_names: _containers.RepeatedScalarFieldContainer[str]
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    start_phases: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StartPhase]
    reason: str
    def __init__(self, name: _Optional[str] = ..., ready: _Optional[bool] = ..., http_endpoint: _Optional[str] = ..., grpc_endpoint: _Optional[str] = ..., served_model_names: _Optional[_Iterable[str]] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., start_phases: _Optional[_Iterable[_Union[_worker_pb2.StartPhase, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("request_id", "prefill_address", "decode_address")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill_address: str
    decode_address: str
    def __init__(self, request_id: _Optional[str] = ..., prefill_address: _Optional[str] = ..., decode_address: _Optional[str] = ...) -> None: ...

class WorkerAudit(_message.Message):
    __slots__ = ("address", "audit", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    audit: _worker_pb2.AuditWorkerResponse
    error: str
    def __init__(self, address: _Optional[str] = ..., audit: _Optional[_Union[_worker_pb2.AuditWorkerResponse, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class AuditRouterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditRouterResponse(_message.Message):
    __slots__ = ("incarnation", "workers", "attempts")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAudit]
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    def __init__(self, incarnation: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerAudit, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ...) -> None: ...

class Try(_message.Message):
    __slots__ = ("began_s", "elapsed_s", "choices", "prefill", "decode", "num_tokens", "error", "timeline", "running")
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    began_s: float
    elapsed_s: float
    choices: _containers.RepeatedScalarFieldContainer[int]
    prefill: str
    decode: str
    num_tokens: int
    error: str
    timeline: _worker_pb2.Timeline
    running: bool
    def __init__(self, began_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., choices: _Optional[_Iterable[int]] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., num_tokens: _Optional[int] = ..., error: _Optional[str] = ..., timeline: _Optional[_Union[_worker_pb2.Timeline, _Mapping]] = ..., running: _Optional[bool] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("request_id", "num_prompt_tokens", "arrived_unix_s", "elapsed_s", "outcome", "num_tries", "tries", "num_tokens", "ttft_s", "tpot_s", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIES_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_prompt_tokens: int
    arrived_unix_s: float
    elapsed_s: float
    outcome: str
    num_tries: int
    tries: _containers.RepeatedCompositeFieldContainer[Try]
    num_tokens: int
    ttft_s: float
    tpot_s: float
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., arrived_unix_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., outcome: _Optional[str] = ..., num_tries: _Optional[int] = ..., tries: _Optional[_Iterable[_Union[Try, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("traces",)
    TRACES_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedCompositeFieldContainer[Trace]
    def __init__(self, traces: _Optional[_Iterable[_Union[Trace, _Mapping]]] = ...) -> None: ...

class Spread(_message.Message):
    __slots__ = ("count", "p50_s", "p99_s")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_s: float
    p99_s: float
    def __init__(self, count: _Optional[int] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class GetActivityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetActivityResponse(_message.Message):
    __slots__ = ("now_unix_s", "traces", "ttft", "tpot")
    NOW_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    now_unix_s: float
    traces: _containers.RepeatedCompositeFieldContainer[Trace]
    ttft: Spread
    tpot: Spread
    def __init__(self, now_unix_s: _Optional[float] = ..., traces: _Optional[_Iterable[_Union[Trace, _Mapping]]] = ..., ttft: _Optional[_Union[Spread, _Mapping]] = ..., tpot: _Optional[_Union[Spread, _Mapping]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "status", "num_prompts", "num_answered", "num_failed", "usage", "timeline", "created_s", "finished_s", "expires_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    status: JobStatus
    num_prompts: int
    num_answered: int
    num_failed: int
    usage: Usage
    timeline: _worker_pb2.Timeline
    created_s: float
    finished_s: float
    expires_s: float
    def __init__(self, job_id: _Optional[str] = ..., status: _Optional[_Union[JobStatus, str]] = ..., num_prompts: _Optional[int] = ..., num_answered: _Optional[int] = ..., num_failed: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timeline: _Optional[_Union[_worker_pb2.Timeline, _Mapping]] = ..., created_s: _Optional[float] = ..., finished_s: _Optional[float] = ..., expires_s: _Optional[float] = ...) -> None: ...

class JobError(_message.Message):
    __slots__ = ("type", "message", "param", "code")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    param: str
    code: str
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class JobResult(_message.Message):
    __slots__ = ("place", "index", "choices", "error")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    place: int
    index: int
    choices: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    error: JobError
    def __init__(self, place: _Optional[int] = ..., index: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ..., error: _Optional[_Union[JobError, _Mapping]] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("job_id", "requests")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    requests: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    def __init__(self, job_id: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ...) -> None: ...

class SubmitJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("limit", "after")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after: str
    def __init__(self, limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DeleteJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobResultsRequest(_message.Message):
    __slots__ = ("job_id", "start")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    start: int
    def __init__(self, job_id: _Optional[str] = ..., start: _Optional[int] = ...) -> None: ...

class JobResultsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[JobResult]
    def __init__(self, results: _Optional[_Iterable[_Union[JobResult, _Mapping]]] = ...) -> None: ...
