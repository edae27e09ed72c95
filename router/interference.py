"""Conditional disaggregation: what a decode worker computes itself because to hand it over would not pay."""

from __future__ import annotations

import math

from protos.worker_pb2 import WorkerStats


def interference(num_prompt_tokens: int, decode: WorkerStats, prefill: WorkerStats) -> float:
    """How long a decode worker's running requests wait while it computes so many prompt tokens, in steps of theirs.

    By what it has measured, or for prompts its prefill worker, of the same model. Infinite before there is a measure.
    """
    prompt_token_s = decode.prompt_token_s or prefill.prompt_token_s
    if not (decode.decode_step_s and prompt_token_s):
        return math.inf
    return num_prompt_tokens * prompt_token_s / decode.decode_step_s
