"""API keys of the native API: every call of whatever service needs one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from router.tenants import CALLER, KeyRing
from workers.errors import KVFerryError
from workers.rpc import abort_with

# To look is no request: `kvferry status` must not use up anybody's.
_LOOKS = ("GetStatus", "AuditRouter", "GetTrace", "GetActivity", "GetJob", "ListJobs", "JobResults")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            caller = self._keys.caller(str(metadata.get("authorization", "")))
            if handler_call_details.method.rpartition("/")[2] not in _LOOKS:
                caller.take_request()
        except KVFerryError as error:
            return _refusing(error)
        # Its handler runs in this call's task.
        CALLER.set(caller)
        return await continuation(handler_call_details)


def _refusing(error: KVFerryError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort_with(context, error)

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(refuse)
    return handler
