"""The errors that clients raise, also by the names that openai's package has for them: one tree, workers/errors.py."""

from __future__ import annotations

from workers.errors import (
    AbortedError,
    AuthenticationError,
    ConflictError,
    KVFerryError,
    NotFoundError,
    PermissionDeniedError,
)
from workers.errors import DeadlineError as APITimeoutError
from workers.errors import InvalidRequestError as BadRequestError
from workers.errors import KVFerryError as APIError
from workers.errors import KVFerryError as InternalServerError
from workers.errors import OverloadedError as RateLimitError
from workers.errors import UnavailableError as APIConnectionError

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AbortedError",
    "AuthenticationError",
    "BadRequestError",
    "ConflictError",
    "InternalServerError",
    "KVFerryError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
]
