"""kvferry's Python API: Client and AsyncClient, their jobs, and the errors that they raise."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.client import AsyncClient, AsyncJob, Client, Job
    from cluster.errors import (
        APIConnectionError,
        APIError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        ConflictError,
        InternalServerError,
        NotFoundError,
        PermissionDeniedError,
        RateLimitError,
    )

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncJob",
    "AuthenticationError",
    "BadRequestError",
    "Client",
    "ConflictError",
    "InternalServerError",
    "Job",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
]


def __getattr__(name: str) -> Any:
    """Loaded on first use, so that importing a neighbour costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("cluster.errors" if name.endswith("Error") else "cluster.client"), name)
