"""Bodies of OpenAI's requests, and what of them kvferry can do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from router.answer import TextOptions
from router.limits import check_best_of, check_num_logprobs
from router.openai_logprobs import LogprobsWanted
from router.openai_terms import SloBody, terms_of
from router.structured import OPENAI_FIELDS, openai_grammar
from workers.errors import InvalidRequestError
from workers.request import SamplingParams

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# Parameters that workers know by the same name.
_SAME_NAMES = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip

# Parameters not supported, with the values at which they change nothing.
_NO_OPS: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
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


class _Body(BaseModel):
    """null means the same as absent. Unknown parameters are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)
    default_max_tokens: ClassVar[int | None] = None

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
        _refuse_unsupported(body)
        try:
            parsed = cls.model_validate(body)
        except ValidationError as error:
            raise _first(error) from None
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
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

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


class CompletionBody(_Body):
    # OpenAI's, for /completions only.
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    # Answers to generate, of which the n best are shown.
    best_of: int | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        parsed = super().parse(body)
        if parsed.best_of is not None:
            check_best_of(parsed.best_of, parsed.n or 1, bool(parsed.stream))
        return parsed

    @property
    def echo_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        # The prompt is still checked like any other's.
        return 1 if self.echo_only else self.max_tokens

    def wanted(self) -> LogprobsWanted:
        return LogprobsWanted(self.logprobs, self.prompt_logprobs)

    def sampling_params(self) -> SamplingParams:
        params = super().sampling_params()
        if self.best_of is not None and self.best_of > params.n:
            params = replace(params, n=self.best_of, logprobs=params.logprobs or 0)
        if not self.echo or self.logprobs is None:
            return params
        # What is echoed has logprobs too.
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self) -> list[str | list[int]]:
        """Each has choices of its own."""
        match self.prompt:
            case str() as text:
                return [text]
            case [first, *_] as items if _is_token_id(first):
                return [_token_ids(items, "prompt")]
            case [str(), *_] | [list(), *_] as items:
                return [_prompt(item, at) for at, item in enumerate(items)]
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty; "
            f"got {_short(self.prompt)}",
            param="prompt",
        )


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    role: str
    content: Any = None


class ChatBody(_Body):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    # OpenAI has it for /completions only.
    best_of: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def wanted(self) -> LogprobsWanted:
        check_num_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs: true; set it, or leave top_logprobs out", param="top_logprobs"
            )
        return LogprobsWanted((self.top_logprobs or 0) if self.logprobs else None, self.prompt_logprobs)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def prompt(self) -> list[dict[str, str]]:
        if not self.messages:
            raise InvalidRequestError("messages is empty; give at least one message", param="messages")
        return [{"role": m.role, "content": _content(m.content, at)} for at, m in enumerate(self.messages)]


def _logit_bias(by_key: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in by_key:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(f"logit_bias has the key {_short(key)}; keys are token ids", param="logit_bias")
    return tuple(sorted({int(key): value for key, value in by_key.items()}.items()))


def _content(content: Any, at: int) -> str:
    """Its text; parts of text are joined by line ends."""
    match content:
        case str():
            return content
        case [_, *_] if all(_is_text_part(part) for part in content):
            return "\n".join(part["text"] for part in content)
    raise InvalidRequestError(
        f'messages[{at}].content must be a string or a list of {{"type": "text", "text": ...}}; got {_short(content)}',
        param="messages",
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(items: list[Any], where: str) -> list[int]:
    for at, item in enumerate(items):
        if not _is_token_id(item):
            raise InvalidRequestError(f"{where}[{at}] must be a token id; got {_short(item)}", param="prompt")
    return items


def _prompt(item: Any, at: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _token_ids(item, f"prompt[{at}]")
    raise InvalidRequestError(
        f"prompt[{at}] must be a string or a list of token ids; got {_short(item)}", param="prompt"
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, no_ops in _NO_OPS.items():
        value = body.get(name)
        if value is not None and not any(_same(value, no_op) for no_op in no_ops):
            mend = f"leave it out or send {json.dumps(no_ops[0])}" if no_ops else "leave it out"
            raise InvalidRequestError(f"{name} = {_short(value)} is not supported; {mend}", param=name)


def _same(value: Any, no_op: Any) -> bool:
    # To Python True is 1 and False is 0; to JSON they are not.
    return value == no_op and isinstance(value, bool) == isinstance(no_op, bool)


def _first(error: ValidationError) -> InvalidRequestError:
    detail = error.errors(include_url=False, include_context=False)[0]
    path = [str(step) for step in detail["loc"]]
    got = "" if detail["type"] == "missing" else f", got {_short(detail['input'])}"
    reason = detail["msg"][:1].lower() + detail["msg"][1:]
    return InvalidRequestError(f"{'.'.join(path)}: {reason}{got}", param=path[0])


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
