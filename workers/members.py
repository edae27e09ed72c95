"""A server's calls are for processes of its own cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio


class MembersOnly(grpc.aio.ServerInterceptor):
    """Refuses every call of who is not of this cluster, whatever authority signed for it."""

    def __init__(self, member: str) -> None:
        self._member = member.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        return handler and self._guarded(handler)

    def _guarded(self, handler: Any) -> Any:
        """The same handler behind a look at who calls: an interceptor alone is not told."""
        kind = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        name, make = kind[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, name)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._require_member(context)
            return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._require_member(context)
            answers = behaviour(request, context)
            if hasattr(answers, "__aiter__"):
                async for one in answers:
                    yield one
            else:
                await answers

        return make(
            stream if handler.response_streaming else answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _require_member(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._member not in context.auth_context().get("x509_subject_alternative_name", ()):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"this is {self._member.decode()}; the certificate shown is not of it"
            )
