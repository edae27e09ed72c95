"""What crosses between processes arrives as it left: every field, set to something that is not its default."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from protos import worker_pb2
from workers.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from workers.timeline import Timeline
from workers.wire import (
    output_from_pb,
    output_to_pb,
    params_from_pb,
    params_to_pb,
    request_from_pb,
    request_to_pb,
)

PARAMS = SamplingParams(
    temperature=0.1,
    top_p=0.2,
    top_k=3,
    seed=2**64 - 1,
    max_tokens=5,
    stop_token_ids=(6, 7),
    ignore_eos=True,
    min_p=0.3,
    repetition_penalty=1.1,
    presence_penalty=-0.4,
    frequency_penalty=0.7,
    logit_bias=((3, -100.0), (70000, 0.1)),
    min_tokens=2,
    logprobs=0,
    prompt_logprobs=20,
    n=3,
    grammar="start: /a/",
)
SCORES = TokenLogprobs(5, -0.5, 3, (1, 2), (-0.25, -0.375))


def require_all_changed(record: Any, default: Any, but: tuple[str, ...] = ()) -> None:
    same = [f.name for f in fields(record) if f.name not in but and getattr(record, f.name) == getattr(default, f.name)]
    assert not same, f"fields that the test does not set: {same}"


def test_sampling_params():
    require_all_changed(PARAMS, SamplingParams())
    message = worker_pb2.SamplingParams.FromString(params_to_pb(PARAMS).SerializeToString())
    assert params_from_pb(message) == PARAMS
    assert params_from_pb(params_to_pb(SamplingParams())) == SamplingParams()
    assert params_from_pb(worker_pb2.SamplingParams()) == SamplingParams()


def test_token_outputs():
    output = TokenOutput(
        "r", 3, (5, 6), FinishReason.STOP, Timeline(queued_s=1.0), "FrameError", "damaged",
        logprobs=(SCORES, SCORES), prompt_logprobs=(SCORES,), num_cached_tokens=16, choice=2,
    )  # fmt: skip
    require_all_changed(output, TokenOutput("", 0, ()), but=("router_id",))
    message = worker_pb2.TokenOutput.FromString(output_to_pb(output).SerializeToString())
    assert output_from_pb(message) == output
    assert output_from_pb(output_to_pb(TokenOutput("r", 0, (1,)))) == TokenOutput("r", 0, (1,))


def test_requests():
    request = Request("r", [1, 2], PARAMS, [3], router_id="router", cache_salt="salt", choice=2)
    got = request_from_pb(worker_pb2.Request.FromString(request_to_pb(request).SerializeToString()))
    names = ("request_id", "prompt_token_ids", "params", "output_token_ids", "router_id", "cache_salt", "choice")
    assert [getattr(got, name) for name in names] == [getattr(request, name) for name in names]
