"""Where the time of real requests went, as OpenAI's client, the native client and the command line see it."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from cluster.client import Client
from tests.e2e.clusters import Running
from workers.timeline import Timeline

pytestmark = pytest.mark.ray

# Messages between processes, and what the router does itself. Other work on the machine may hold these up.
SLACK_S, SLACK_SHARE = 0.1, 0.25
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def test_the_parts_add_up_to_what_the_client_waited(one_p_one_d: Running):
    with openai.OpenAI(base_url=f"{one_p_one_d.http}/v1", api_key="none") as api:
        how: dict[str, Any] = {"extra_headers": {"X-Kvferry-Timeline": "1", "X-Request-Id": "explained"}}
        for stream in (False, True):
            began_s = time.perf_counter()
            answer: Any = api.completions.create(
                model=api.models.list().data[0].id, prompt=PROMPT, max_tokens=16, stream=stream, **how
            )
            told = list(answer)[-1] if stream else answer
            passed_s = time.perf_counter() - began_s
            timeline = Timeline(**told.model_extra["kvferry"]["timeline"])
            assert passed_s - SLACK_S - SLACK_SHARE * passed_s < timeline.total_s < passed_s
            assert min(timeline.prefill_s, timeline.transfer_s, timeline.decode_s) > 0
    shown = one_p_one_d.cluster.kvferry("trace", "explained", "--target", one_p_one_d.grpc)
    assert shown.returncode == 0
    assert shown.stdout.startswith("explained: length, ")
    assert all(phase in shown.stdout for phase in ("prefill-0", "decode-0", "transfer_unhidden", "decode"))
    with Client(one_p_one_d.grpc) as client:
        completion = client.generate(PROMPT, max_tokens=4, request_id="native")
        [trace] = client.trace("native")
    assert trace.outcome == completion.finish_reason.value
    assert trace.elapsed_s == pytest.approx(completion.timeline.total_s, abs=SLACK_S)
