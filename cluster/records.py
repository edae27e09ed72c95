"""What goes into a request of the native API and what comes out, to and from its protobuf form."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from protos import router_pb2 as pb
from protos import worker_pb2
from workers.errors import InvalidRequestError
from workers.request import FinishReason, TokenLogprobs
from workers.timeline import Timeline
from workers.wire import logprobs_from_pb, reason_from_pb, timeline_from_pb

# A string, token ids, or the messages of a chat, each {"role": ..., "content": ...}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Sampling(TypedDict, total=False):
    """How to choose tokens; what is not given takes the router's default. temperature 0 is greedy."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    # Token id -> what is added to its logit.
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    # How many of the likeliest tokens to show beside each output or prompt token, 0 included; None: nothing.
    logprobs: int | None
    prompt_logprobs: int | None
    # Answers to give, each with random numbers of its own.
    n: int | None


class Slo(TypedDict, total=False):
    ttft_ms: float | None
    tpot_ms: float | None


class Options(Sampling, total=False):
    # What ends the answer, and whether it is shown too.
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool | None
    # Requests of different salts never share KV.
    cache_salt: str
    # What the answer must match, one of: a JSON Schema, any JSON object, a regular expression, one of some strings, a
    # grammar in Lark's notation.
    json_schema: Mapping[str, object] | str | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    # Lower goes first.
    priority: int
    # In milliseconds; what is predicted to miss it is refused at once (OverloadedError).
    slo: Slo | None
    # Empty: the only model served.
    model: str
    # Empty: the router chooses one.
    request_id: str
    # None: as long as it takes.
    timeout_s: float | None


_CONSTRAINTS = tuple(field.name for field in pb.StructuredOutput.DESCRIPTOR.fields)


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    # Prompt tokens that were not computed because their KV was known.
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: output tokens [index, index + len(token_ids)). Its last has all that follows `text`, but
    for the logprobs: one for each token, and on the piece with index 0 those of the prompt's tokens from the second on.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timeline: Timeline | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Which of the n answers it belongs to.
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timeline: Timeline
    ttft_s: float
    tpot_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Where n > 1: all answers, each with the usage of its own tokens. The fields above are the first's.
    choices: tuple[Completion, ...] = ()


def build_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Raises InvalidRequestError for a prompt or a parameter that cannot be sent."""
    known = Options.__optional_keys__
    if unknown := options.keys() - known:
        raise InvalidRequestError(f"unknown parameter {min(unknown)!r}; known: {', '.join(sorted(known))}")
    fields = {key: value for key, value in options.items() if key in Sampling.__annotations__ and value is not None}
    try:
        request = pb.GenerateRequest(
            request_id=options.get("request_id", ""),
            model=options.get("model", ""),
            params=worker_pb2.SamplingParams(**fields),  # type: ignore[arg-type]
            stop=[stop] if isinstance(stop := options.get("stop", ()), str) else stop,
            include_stop_str_in_output=options.get("include_stop_str_in_output", False),
            skip_special_tokens=options.get("skip_special_tokens"),
            cache_salt=options.get("cache_salt", ""),
            structured_output=_structured_output(options),
            priority=options.get("priority", 0),
            slo=pb.Slo(**slo) if (slo := options.get("slo")) else None,
        )
        _set_prompt(request, prompt)
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"the request cannot be sent: {exc}") from None
    return request


def _structured_output(options: Options) -> pb.StructuredOutput | None:
    given = {key: value for key in _CONSTRAINTS if (value := options.get(key))}
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} do not go together; give one of them", param=min(given))
    match given:
        case {"json_schema": Mapping() as schema}:
            return pb.StructuredOutput(json_schema=json.dumps(schema))
        case {"choice": choice}:
            return pb.StructuredOutput(choice=pb.Strings(strings=choice))  # type: ignore[arg-type]
    return pb.StructuredOutput(**given) if given else None  # type: ignore[arg-type]


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt):
        request.token_ids.token_ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    elif all(isinstance(item, Mapping) for item in prompt):
        request.messages.messages.extend(pb.ChatMessage(**item) for item in prompt)  # type: ignore[arg-type]
    else:
        raise TypeError("prompt must be text, token ids, or chat messages {'role': ..., 'content': ...}")


def chunk_from_pb(message: pb.GenerateResponse) -> Chunk:
    chunk = Chunk(
        message.request_id,
        message.index,
        tuple(message.token_ids),
        message.text,
        logprobs=logprobs_from_pb(message.logprobs),
        prompt_logprobs=logprobs_from_pb(message.prompt_logprobs),
        choice=message.choice,
    )
    reason = reason_from_pb(message.finish_reason)
    if reason is None:
        return chunk
    usage = message.usage
    return replace(
        chunk,
        finish_reason=reason,
        usage=Usage(usage.num_prompt_tokens, usage.num_completion_tokens, usage.num_cached_tokens),
        timeline=timeline_from_pb(message.timeline),
        ttft_s=message.ttft_s,
        tpot_s=message.tpot_s,
    )


def completion_of(chunks: Sequence[Chunk]) -> Completion:
    """The whole answers of a stream that was read to its end."""
    by_choice: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_choice[chunk.choice].append(chunk)
    answers = tuple(_answer_of(own) for _, own in sorted(by_choice.items()))
    return replace(answers[0], choices=answers) if len(answers) > 1 else answers[0]


def _answer_of(chunks: Sequence[Chunk]) -> Completion:
    last = chunks[-1]
    assert last.finish_reason
    assert last.usage
    assert last.timeline
    return Completion(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timeline=last.timeline,
        ttft_s=last.ttft_s or 0.0,
        tpot_s=last.tpot_s or 0.0,
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
