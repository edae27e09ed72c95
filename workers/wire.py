"""Records to and from their protobuf form."""

from __future__ import annotations

from collections.abc import Iterable

from protos import worker_pb2 as pb
from workers.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from workers.timeline import Timeline

_SCALAR_PARAMS = tuple(name for name in SamplingParams.__slots__ if name not in ("stop_token_ids", "logit_bias"))

_REASON_TO_PB: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_REASON_FROM_PB = {value: reason for reason, value in _REASON_TO_PB.items()}


def reason_to_pb(reason: FinishReason | None) -> pb.FinishReason:
    return _REASON_TO_PB[reason]


def reason_from_pb(value: pb.FinishReason) -> FinishReason | None:
    return _REASON_FROM_PB[value]


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    scalars = {name: getattr(params, name) for name in _SCALAR_PARAMS}
    return pb.SamplingParams(stop_token_ids=params.stop_token_ids, logit_bias=dict(params.logit_bias), **scalars)


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Unset fields take SamplingParams' defaults."""
    given = {name: getattr(message, name) for name in _SCALAR_PARAMS if message.HasField(name)}
    return SamplingParams(
        stop_token_ids=tuple(message.stop_token_ids), logit_bias=tuple(sorted(message.logit_bias.items())), **given
    )


def request_to_pb(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        router_id=request.router_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        params=params_to_pb(request.params),
        cache_salt=request.cache_salt,
        choice=request.choice,
    )


def request_from_pb(message: pb.Request, replica_address: str = "") -> Request:
    return Request(
        request_id=message.request_id,
        router_id=message.router_id,
        prompt_token_ids=list(message.prompt_token_ids),
        output_token_ids=list(message.output_token_ids),
        params=params_from_pb(message.params),
        cache_salt=message.cache_salt,
        choice=message.choice,
        replica_address=replica_address,
    )


def timeline_to_pb(timeline: Timeline) -> pb.Timeline:
    return pb.Timeline(**{name: getattr(timeline, name) for name in Timeline.__slots__})


def timeline_from_pb(message: pb.Timeline) -> Timeline:
    return Timeline(**{name: getattr(message, name) for name in Timeline.__slots__})


def logprobs_to_pb(logprobs: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [pb.TokenLogprobs(**{name: getattr(one, name) for name in TokenLogprobs.__slots__}) for one in logprobs]


def logprobs_from_pb(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(one.token_id, one.logprob, one.rank, tuple(one.top_token_ids), tuple(one.top_logprobs))
        for one in messages
    )


def output_to_pb(output: TokenOutput) -> pb.TokenOutput:
    return pb.TokenOutput(
        request_id=output.request_id,
        index=output.index,
        token_ids=output.token_ids,
        finish_reason=reason_to_pb(output.finish_reason),
        timeline=timeline_to_pb(output.timeline) if output.timeline else None,
        error_type=output.error_type,
        error_message=output.error_message,
        logprobs=logprobs_to_pb(output.logprobs),
        prompt_logprobs=logprobs_to_pb(output.prompt_logprobs),
        num_cached_tokens=output.num_cached_tokens,
        choice=output.choice,
    )


def output_from_pb(message: pb.TokenOutput) -> TokenOutput:
    # There is one for each token: what is seldom there is not looked for twice.
    output = TokenOutput(
        message.request_id,
        message.index,
        tuple(message.token_ids),
        reason_from_pb(message.finish_reason),
        num_cached_tokens=message.num_cached_tokens,
        choice=message.choice,
    )
    if message.HasField("timeline"):
        output.timeline = timeline_from_pb(message.timeline)
    if message.error_type:
        output.error_type, output.error_message = message.error_type, message.error_message
    if message.logprobs:
        output.logprobs = logprobs_from_pb(message.logprobs)
    if message.prompt_logprobs:
        output.prompt_logprobs = logprobs_from_pb(message.prompt_logprobs)
    return output
