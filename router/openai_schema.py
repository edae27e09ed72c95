"""Bodies of OpenAI's requests, and what of them kvferry can do."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from workers.errors import InvalidRequestError
from workers.request import SamplingParams

# Parameters not supported, with the values at which they change nothing.
_NO_OPS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
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
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
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
        return parsed

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling_params(self) -> SamplingParams:
        names = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(max_tokens=self.token_limit, stop_token_ids=tuple(self.stop_token_ids or ()), **given)


class CompletionBody(_Body):
    # OpenAI's, for /completions only.
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any = None
    echo: bool | None = None

    @property
    def echo_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        # The prompt is still checked like any other's.
        return 1 if self.echo_only else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """One for each choice."""
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

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def prompt(self) -> list[dict[str, str]]:
        if not self.messages:
            raise InvalidRequestError("messages is empty; give at least one message", param="messages")
        return [{"role": m.role, "content": _content(m.content, at)} for at, m in enumerate(self.messages)]


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
