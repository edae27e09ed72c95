"""What a request may ask of the served model; each refusal says what, where, and the mend."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workers.errors import InvalidRequestError
from workers.request import SamplingParams, Terms

MAX_NUM_STOPS = 4
# vLLM's, and OpenAI's for chats.
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
# OpenAI's, for n.
MAX_CHOICES = 128
MAX_SALT_CHARS = 512
_MAX_INT32 = 2**31 - 1
_SO_FAR = "output_token_ids"
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
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias])
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
        _require(
            0 <= params.min_tokens <= max_tokens, "min_tokens", params.min_tokens, f"0 to max_tokens ({max_tokens})"
        )
        return replace(
            params,
            max_tokens=max_tokens,
            temperature=0.0 if params.temperature < _GREEDY_TEMPERATURE else float(params.temperature),
            top_k=max(params.top_k, 0),
            seed=None if params.seed is None else params.seed % 2**64,
        )

    def check_so_far(self, so_far: Mapping[int, Sequence[int]], params: SamplingParams) -> None:
        """`params`: complete."""
        assert params.max_tokens is not None
        for choice, token_ids in so_far.items():
            _require(0 <= choice < params.n, _SO_FAR, f"of choice {choice}", f"of choices 0 to {params.n - 1}")
            self._check_token_ids(_SO_FAR, token_ids)
            _require(
                len(token_ids) < params.max_tokens,
                _SO_FAR,
                f"{len(token_ids)} tokens of choice {choice}",
                f"fewer than max_tokens ({params.max_tokens}): leave out choices that have ended",
            )
        if any(so_far.values()) and params.seed is None:
            raise InvalidRequestError(f"{_SO_FAR} need the seed that came with them; give it", param="seed")

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param} has {token_id}; the model's ids are 0 to {self.vocab_size - 1}", param=param
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
    _require(1 <= params.n <= MAX_CHOICES, "n", params.n, f"1 to {MAX_CHOICES}")
    if params.grammar:
        _require(not params.ignore_eos, "ignore_eos", True, "false with structured output, which EOS ends")
    _check_penalties(params)
    _require(0 <= params.min_p <= 1, "min_p", params.min_p, "0 (keeps all) to 1")
    for token_id, bias in params.logit_bias:
        _require(-MAX_BIAS <= bias <= MAX_BIAS, "logit_bias", f"{bias} for token {token_id}", "-100 to 100")
    check_num_logprobs("logprobs", params.logprobs)
    check_num_logprobs("prompt_logprobs", params.prompt_logprobs)
    if params.seed is not None:
        _require(-(2**63) <= params.seed < 2**64, "seed", params.seed, "a 64-bit integer")


def _check_penalties(params: SamplingParams) -> None:
    penalty = params.repetition_penalty
    _require(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "above 0 (1 changes nothing)")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        _require(-2 <= value <= 2, name, value, "-2 to 2 (0 changes nothing)")


def check_num_logprobs(param: str, count: int | None) -> None:
    if count is not None:
        _require(0 <= count <= MAX_LOGPROBS, param, count, f"0 to {MAX_LOGPROBS}")


def check_best_of(best_of: int, n: int, stream: bool) -> None:
    _require(n <= best_of <= MAX_CHOICES, "best_of", best_of, f"n ({n}) to {MAX_CHOICES}")
    if best_of > n and stream:
        raise InvalidRequestError(
            "best_of over n does not go with stream: true, since the best are known at the end; leave out either",
            param="best_of",
        )


def check_num_answers(num_prompts: int, n: int) -> None:
    """`n`: of each prompt."""
    if num_prompts > 1 and n > 1 and num_prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {n} answers each are {num_prompts * n}; at most {MAX_CHOICES}: lower n",
            param="n",
        )


def check_terms(terms: Terms) -> None:
    _require(-(2**31) <= terms.priority < 2**31, "priority", terms.priority, "a 32-bit integer (lower goes first)")
    for name in ("ttft_ms", "tpot_ms") if terms.slo else ():
        limit_ms = getattr(terms.slo, name)
        holds = limit_ms is None or (math.isfinite(limit_ms) and limit_ms > 0)
        _require(holds, f"slo.{name}", limit_ms, "above 0")


def check_cache_salt(salt: str) -> None:
    is_text = not any("\ud800" <= char <= "\udfff" for char in salt)
    _require(
        is_text and len(salt) <= MAX_SALT_CHARS, "cache_salt", f"{salt[:40]!r}", f"up to {MAX_SALT_CHARS} characters"
    )


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
