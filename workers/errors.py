"""Everything that can go wrong for a reason outside our own code, each mapped once to gRPC and HTTP.

KVFerryError                     INTERNAL             500
  ConfigError                    INVALID_ARGUMENT     400   a config, model or machine that cannot work
  InvalidRequestError            INVALID_ARGUMENT     400   the request is at fault; `param` names the field
  AuthenticationError            UNAUTHENTICATED      401   no API key, or a wrong one
  PermissionDeniedError          PERMISSION_DENIED    403   a good API key, but not for this
  NotFoundError                  NOT_FOUND            404   no such model or job
  ConflictError                  ALREADY_EXISTS       409   the id is another's, or was taken over by its repetition
  OverloadedError                RESOURCE_EXHAUSTED   429   no room now; retry after `retry_after_s`
  UnavailableError               UNAVAILABLE          503   no worker or router answers
  DeadlineError                  DEADLINE_EXCEEDED    504   a wait reached its end
  AbortedError                   CANCELLED            499   the client, or a stop, ended it
  StaleGrantError                FAILED_PRECONDITION  500   a grant that is no more, or of another incarnation
  LayoutMismatchError            FAILED_PRECONDITION  503   two pools that cannot exchange KV; `param` names the field
  FrameError                     DATA_LOSS            500   a KV frame damaged, foreign, missing or repeated
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class KVFerryError(Exception):
    """Root of the tree: what is wrong, where, and the mend, in one line."""

    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    # The `type` of OpenAI's error object.
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(KVFerryError):
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"


class InvalidRequestError(KVFerryError):
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"


class AuthenticationError(KVFerryError):
    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "invalid_request_error"


class PermissionDeniedError(KVFerryError):
    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "invalid_request_error"


class NotFoundError(KVFerryError):
    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_type = "invalid_request_error"


class ConflictError(KVFerryError):
    grpc_code = grpc.StatusCode.ALREADY_EXISTS
    http_status = 409
    openai_type = "invalid_request_error"


class OverloadedError(KVFerryError):
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    openai_type = "rate_limit_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class UnavailableError(KVFerryError):
    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineError(KVFerryError):
    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class AbortedError(KVFerryError):
    grpc_code = grpc.StatusCode.CANCELLED
    http_status = 499


class StaleGrantError(KVFerryError):
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION


class LayoutMismatchError(KVFerryError):
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 503


class FrameError(KVFerryError):
    grpc_code = grpc.StatusCode.DATA_LOSS


_ALL: tuple[type[KVFerryError], ...] = (
    KVFerryError,
    ConfigError,
    InvalidRequestError,
    AuthenticationError,
    PermissionDeniedError,
    NotFoundError,
    ConflictError,
    OverloadedError,
    UnavailableError,
    DeadlineError,
    AbortedError,
    StaleGrantError,
    LayoutMismatchError,
    FrameError,
)
BY_NAME: dict[str, type[KVFerryError]] = {cls.__name__: cls for cls in _ALL}
