"""What paging saves: against a sum done by hand, and on real lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.lab.azure_trace import TraceRequest, read_azure_trace
from cluster.lab.memory_waste import SlotPool, measure, stretch

TRACE = Path(__file__).parents[4] / "shared/data/azure/AzureLLMInferenceTrace_conv.csv"


def test_the_waste_of_one_request_is_what_a_pencil_says():
    """16 prompt tokens in one step, then one more token: 29 ms and 0.05 ms a token."""
    prefill_s, decode_s = 0.0298, 0.02905
    found = measure([TraceRequest(0.0, 16, 2)], SlotPool(num_slots=64, block_size=16, max_model_len=64))
    held = 16 * decode_s
    assert found["paged"].waste == pytest.approx(1 - held / (16 * prefill_s + 32 * decode_s))
    assert found["contiguous"].waste == pytest.approx(1 - held / (64 * (prefill_s + decode_s)))
    # All of the first step, and one token in the second.
    assert found["paged"].waste_in_prefill == pytest.approx(
        (16 * prefill_s + decode_s) / (16 * prefill_s + 32 * decode_s)
    )


@pytest.mark.skipif(not TRACE.exists(), reason="needs shared/data/azure beside the project")
def test_paged_kv_wastes_under_4_percent_of_its_memory_and_contiguous_kv_most_of_it():
    pool = SlotPool()
    requests = stretch(read_azure_trace(TRACE), 300, seed=0, max_model_len=pool.max_model_len)
    assert len(requests) == 300
    found = measure(requests, pool)
    assert 0 < found["paged"].waste < 0.04
    assert found["contiguous"].waste > 0.5
    # Half a block or so of each request.
    assert found["paged"].waste - found["paged"].waste_in_prefill < 0.01
    assert found["paged"].mean_num_running > found["contiguous"].mean_num_running
