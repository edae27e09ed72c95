"""What bodies of requests have in common, and which parameters kvferry cannot follow."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from router.answer import TextOptions
from router.openai.logprobs import LogprobsWanted
from router.openai.terms import SloBody, terms_of
from router.openai.wire import StreamUsage
from router.structured import OPENAI_FIELDS, openai_grammar
from workers.errors import InvalidRequestError
from workers.request import SamplingParams

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# Parameters that workers know by the same name.
_SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip

NoOps = dict[str, tuple[Any, ...]]
NO_OPS: NoOps = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "use_beam_search": (False,),
    "store": (False,),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    # With every piece, what its choice has used so far; vLLM's.
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """null means the same as absent. Unknown parameters are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)
    default_max_tokens: ClassVar[int | None] = None
    # Parameters not supported, with the values at which they change nothing.
    no_ops: ClassVar[NoOps] = NO_OPS

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # By token id, which is a string in JSON.
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    # Lower goes first, as vLLM's.
    priority: int | None = None
    slo: SloBody | None = None
    # What the answer must match (router/structured.py).
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Raises InvalidRequestError whose param is the field at fault."""
        refuse_unsupported(body, cls.no_ops)
        parsed = validated(cls, body)
        if parsed.stream_options is not None and not parsed.stream:
            raise InvalidRequestError(
                "stream_options needs stream: true; set it, or leave stream_options out", param="stream_options"
            )
        if parsed.prompt_logprobs is not None and parsed.stream:
            raise InvalidRequestError(
                "prompt_logprobs does not go with stream: true; leave out either", param="prompt_logprobs"
            )
        return parsed

    @property
    def usage_wanted(self) -> StreamUsage:
        if self.stream_options is None or not self.stream_options.include_usage:
            return StreamUsage.NONE
        return StreamUsage.EVERY if self.stream_options.continuous_usage_stats else StreamUsage.LAST

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def options(self) -> TextOptions:
        return TextOptions(
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            cache_salt=self.cache_salt or "",
            default_max_tokens=self.default_max_tokens,
            terms=terms_of(self.priority, self.slo),
        )

    def wanted(self) -> LogprobsWanted:
        """The logprobs that the answer shows."""
        return LogprobsWanted(None, self.prompt_logprobs)

    def sampling_params(self) -> SamplingParams:
        given = {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        wanted = self.wanted()
        return SamplingParams(
            max_tokens=self.token_limit,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_logit_bias(self.logit_bias or {}),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            grammar=openai_grammar({name: getattr(self, name) for name in OPENAI_FIELDS}),
            **given,
        )


def _logit_bias(by_key: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in by_key:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(f"logit_bias has the key {short(key)}; keys are token ids", param="logit_bias")
    return tuple(sorted({int(key): value for key, value in by_key.items()}.items()))


def refuse_unsupported(body: dict[str, Any], parameters: NoOps) -> None:
    for name, no_ops in parameters.items():
        value = body.get(name)
        if value is not None and not any(_same(value, no_op) for no_op in no_ops):
            mend = f"leave it out or send {json.dumps(no_ops[0])}" if no_ops else "leave it out"
            raise InvalidRequestError(f"{name} = {short(value)} is not supported; {mend}", param=name)


def _same(value: Any, no_op: Any) -> bool:
    # To Python True is 1 and False is 0; to JSON they are not.
    return value == no_op and isinstance(value, bool) == isinstance(no_op, bool)


M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], body: dict[str, Any], param: str | None = None) -> M:
    """InvalidRequestError whose param is the field at fault, unless it is given."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error, param) from None


def _first_problem(error: ValidationError, param: str | None) -> InvalidRequestError:
    detail = error.errors(include_url=False, include_context=False)[0]
    path = [str(step) for step in detail["loc"]]
    got = "" if detail["type"] == "missing" else f", got {short(detail['input'])}"
    reason = detail["msg"][:1].lower() + detail["msg"][1:]
    return InvalidRequestError(f"{'.'.join(path)}: {reason}{got}", param=param or path[0])


def short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
