"""Routing policies: pure functions of what the router knows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import Load, least_loaded_decode, least_loaded_prefill

loads = st.lists(st.builds(Load, st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)), max_size=8)


@given(loads)
def test_every_candidate_is_ranked_once_by_every_policy(candidates):
    for policy in (least_loaded_prefill, least_loaded_decode):
        assert sorted(policy(candidates)) == list(range(len(candidates)))


@given(loads)
def test_prefill_goes_where_fewest_tokens_wait(candidates):
    queued = [candidates[i].num_queued_tokens for i in least_loaded_prefill(candidates)]
    assert queued == sorted(queued)


@given(loads)
def test_decode_goes_to_the_smallest_batch_and_then_to_the_emptiest_pool(candidates):
    ranked = [candidates[i] for i in least_loaded_decode(candidates)]
    for better, worse in itertools.pairwise(ranked):
        assert better.num_requests <= worse.num_requests
        assert better.num_requests < worse.num_requests or better.blocks_free >= worse.blocks_free


@pytest.mark.parametrize("policy", [least_loaded_prefill, least_loaded_decode])
def test_among_equals_the_order_stays(policy):
    assert policy([Load(1, 1, 1)] * 4) == [0, 1, 2, 3]
