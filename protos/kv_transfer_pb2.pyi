from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVLayout(_message.Message):
    __slots__ = ("schema_version", "fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    def __init__(self, schema_version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("incarnation", "layout", "offers", "checksum")
    class OffersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    layout: KVLayout
    offers: _containers.ScalarMap[str, bytes]
    checksum: bool
    def __init__(self, incarnation: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., offers: _Optional[_Mapping[str, bytes]] = ..., checksum: _Optional[bool] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "is_fault")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FAULT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_fault: bool
    def __init__(self, reason: _Optional[str] = ..., is_fault: _Optional[bool] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("incarnation", "layout", "credits", "transports", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Refusal
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    layout: KVLayout
    credits: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.MessageMap[str, Refusal]
    def __init__(self, incarnation: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., credits: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., refused: _Optional[_Mapping[str, Refusal]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("grant_id", "incarnation", "first_token_ids", "num_frames", "num_bytes", "transfer_s", "transfer_unhidden_s")
    class FirstTokenIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_UNHIDDEN_S_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    incarnation: str
    first_token_ids: _containers.ScalarMap[int, int]
    num_frames: int
    num_bytes: int
    transfer_s: float
    transfer_unhidden_s: float
    def __init__(self, grant_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., first_token_ids: _Optional[_Mapping[int, int]] = ..., num_frames: _Optional[int] = ..., num_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transfer_unhidden_s: _Optional[float] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("grant_id", "incarnation", "reason")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    grant_id: int
    incarnation: str
    reason: str
    def __init__(self, grant_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("incarnation", "grant_ids")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GRANT_IDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    grant_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[str] = ..., grant_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lost_grant_ids",)
    LOST_GRANT_IDS_FIELD_NUMBER: _ClassVar[int]
    lost_grant_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lost_grant_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReserveReplicaRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _worker_pb2.Request
    def __init__(self, request: _Optional[_Union[_worker_pb2.Request, _Mapping]] = ...) -> None: ...

class ReserveReplicaResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _worker_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_worker_pb2.Grant, _Mapping]] = ...) -> None: ...
