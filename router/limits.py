"""What a request may ask of the served model; each refusal says what, where, and the mend."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.errors import InvalidRequestError
from workers.request import SamplingParams

MAX_NUM_STOPS = 4
_MAX_INT32 = 2**31 - 1
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
# Below it a division of logits overflows; vLLM's limit too.
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int
    vocab_size: int

    def check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise InvalidRequestError(f"{param} is empty; give at least one token", param=param)
        if len(token_ids) >= self.max_model_len:
            raise self.too_long(f"your {param} has {len(token_ids)} tokens, which leaves no room for an answer", param)
        for at, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param}[{at}] is token id {token_id}; the model's ids are 0 to {self.vocab_size - 1}", param=param
                )

    def too_long(self, what: str, param: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"This model's maximum context length is {self.max_model_len} tokens; {what}: shorten the {param}",
            param=param,
            code="context_length_exceeded",
        )

    def complete_params(
        self, params: SamplingParams, num_prompt_tokens: int, default_max_tokens: int | None, param: str
    ) -> SamplingParams:
        """Checked, and with max_tokens a number; `param` names the prompt's field."""
        check_sampling(params)
        self._check_stop_token_ids(params.stop_token_ids)
        room = self.max_model_len - num_prompt_tokens
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
        if max_tokens > room:
            raise self.too_long(
                f"you asked for {num_prompt_tokens + max_tokens} ({num_prompt_tokens} in the {param}, {max_tokens} in "
                f"max_tokens): lower max_tokens to {room}, or",
                param,
            )
        return replace(
            params,
            max_tokens=max_tokens,
            temperature=0.0 if params.temperature < _GREEDY_TEMPERATURE else float(params.temperature),
            top_k=max(params.top_k, 0),
            seed=None if params.seed is None else params.seed % 2**64,
        )

    def _check_stop_token_ids(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids has {token_id}; the model's ids are 0 to {self.vocab_size - 1}",
                    param="stop_token_ids",
                )


def check_sampling(params: SamplingParams) -> None:
    _require(
        math.isfinite(params.temperature) and params.temperature >= 0,
        "temperature",
        params.temperature,
        "a finite number of at least 0 (0 is greedy)",
    )
    _require(0 < params.top_p <= 1, "top_p", params.top_p, "above 0 and at most 1 (1 keeps all)")
    _require(-1 <= params.top_k <= _MAX_INT32, "top_k", params.top_k, "at least 1, or 0 or -1 to keep all")
    if params.max_tokens is not None:
        _require(params.max_tokens >= 1, "max_tokens", params.max_tokens, "at least 1")
    if params.seed is not None:
        _require(-(2**63) <= params.seed < 2**64, "seed", params.seed, "a 64-bit integer")


def check_stops(stops: Sequence[str]) -> None:
    _require(len(stops) <= MAX_NUM_STOPS, "stop", f"{len(stops)} strings", f"at most {MAX_NUM_STOPS} strings")
    _require("" not in stops, "stop", "an empty string", "strings of at least one character")


def valid_request_id(request_id: str) -> bool:
    return _REQUEST_ID.fullmatch(request_id) is not None


def check_request_id(request_id: str) -> None:
    if not valid_request_id(request_id):
        raise InvalidRequestError(
            f"request_id is {request_id[:40]!r}; it must be 1 to 128 visible ASCII characters", param="request_id"
        )


def _require(holds: bool, param: str, value: object, wanted: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{param} is {value}; it must be {wanted}", param=param)
