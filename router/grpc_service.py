"""The native API over a TextService."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import grpc.aio

from protos import router_pb2, router_pb2_grpc
from router.activity import activity_of, visible_tenant
from router.answer import TextChunk, TextOptions, TextRequest
from router.jobs.tenant import calling_tenant
from router.structured import native_grammar
from router.tenants import require_admin
from router.text import Prompt, TextService, new_request_id
from router.traces import TRACEPARENT, Traces
from workers.chat_template import Chat
from workers.errors import InvalidRequestError, KVFerryError
from workers.request import Slo, Terms
from workers.rpc import ACCEPTED_KEY, abort_with, typed_errors
from workers.wire import logprobs_to_pb, params_from_pb, reason_to_pb, timeline_to_pb

logger = logging.getLogger(__name__)

GenerateContext = grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse]
AuditContext = grpc.aio.ServicerContext[router_pb2.AuditRouterRequest, router_pb2.AuditRouterResponse]
TraceContext = grpc.aio.ServicerContext[router_pb2.GetTraceRequest, router_pb2.GetTraceResponse]
ActivityContext = grpc.aio.ServicerContext[router_pb2.GetActivityRequest, router_pb2.GetActivityResponse]
StatusContext = grpc.aio.ServicerContext[router_pb2.GetStatusRequest, router_pb2.GetStatusResponse]


class RouterService(router_pb2_grpc.RouterServiceServicer):
    def __init__(
        self,
        text: TextService,
        status: Callable[[], router_pb2.GetStatusResponse],
        audit: Callable[[], Awaitable[router_pb2.AuditRouterResponse]],
        traces: Traces,
    ) -> None:
        self._text = text
        self._status = status
        self._audit = audit
        self._traces = traces

    # Writes rather than yields: a cancelled call then ends inside this coroutine, which aborts the request at once.
    async def Generate(self, request: router_pb2.GenerateRequest, context: GenerateContext) -> None:  # type: ignore[override]
        TRACEPARENT.set(_traceparent(context))
        try:
            prepared = await prepare(self._text, request)
            await context.send_initial_metadata(((ACCEPTED_KEY, "1"),))
            async with aclosing(self._text.stream(prepared)) as chunks:
                async for chunk in chunks:
                    await context.write(response_of(prepared.request_id, chunk))
        except KVFerryError as error:
            await abort_with(context, error)
        except Exception:
            extra = {"request_id": request.request_id}
            logger.exception("%s: internal error", request.request_id, extra=extra)
            await abort_with(context, KVFerryError("internal error; the router's log has the reason"))

    async def GetStatus(
        self, request: router_pb2.GetStatusRequest, context: StatusContext
    ) -> router_pb2.GetStatusResponse:
        return self._status()

    @typed_errors
    async def AuditRouter(
        self, request: router_pb2.AuditRouterRequest, context: AuditContext
    ) -> router_pb2.AuditRouterResponse:
        require_admin()
        return await self._audit()

    @typed_errors
    async def GetTrace(self, request: router_pb2.GetTraceRequest, context: TraceContext) -> router_pb2.GetTraceResponse:
        return router_pb2.GetTraceResponse(traces=self._traces.tell(request.request_id, calling_tenant()))

    async def GetActivity(
        self, request: router_pb2.GetActivityRequest, context: ActivityContext
    ) -> router_pb2.GetActivityResponse:
        return activity_of(self._traces, visible_tenant())


def _traceparent(context: GenerateContext) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == "traceparent"), "")


async def prepare(text: TextService, request: router_pb2.GenerateRequest) -> TextRequest:
    """Raises KVFerryError, before any work."""
    text.model_name(request.model)
    request_id = request.request_id or new_request_id("gen")
    params = replace(params_from_pb(request.params), grammar=native_grammar(request))
    return await text.prepared(_prompt(request), params, request_id, _options(request))


def _options(request: router_pb2.GenerateRequest) -> TextOptions:
    return TextOptions(
        stops=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        cache_salt=request.cache_salt,
        so_far={choice: held.token_ids for choice, held in sorted(request.output_token_ids.items())},
        terms=Terms(priority=request.priority, slo=_slo(request.slo) if request.HasField("slo") else None),
    )


def _slo(slo: router_pb2.Slo) -> Slo:
    return Slo(*(getattr(slo, name) if slo.HasField(name) else None for name in ("ttft_ms", "tpot_ms")))


def _prompt(request: router_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.token_ids)
        case "messages" if request.messages.messages:
            return Chat([{"role": one.role, "content": one.content} for one in request.messages.messages])
        case "messages":
            raise InvalidRequestError("messages is empty; give at least one message", param="messages")
        case _:
            raise InvalidRequestError("no prompt; set text, token_ids or messages", param="prompt")


def response_of(request_id: str, chunk: TextChunk) -> router_pb2.GenerateResponse:
    response = router_pb2.GenerateResponse(
        request_id=request_id,
        index=chunk.index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=logprobs_to_pb(chunk.logprobs),
        prompt_logprobs=logprobs_to_pb(chunk.prompt_logprobs),
        choice=chunk.choice,
        seed=chunk.seed,
    )
    if chunk.finish_reason is None:
        return response
    response.finish_reason = reason_to_pb(chunk.finish_reason)
    response.usage.num_prompt_tokens = chunk.num_prompt_tokens
    response.usage.num_completion_tokens = chunk.num_completion_tokens
    response.usage.num_cached_tokens = chunk.num_cached_tokens
    response.ttft_s, response.tpot_s = chunk.ttft_s, chunk.tpot_s
    if chunk.timeline is not None:
        response.timeline.CopyFrom(timeline_to_pb(chunk.timeline))
    return response
