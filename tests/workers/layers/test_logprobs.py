from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.layers.logprobs import first_of_top, token_logprobs


def ranking(row: torch.Tensor) -> list[int]:
    """All ids, best first, equal ones by id."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 40])
@pytest.mark.parametrize("tied", [False, True])
def test_values_order_and_ranks_are_those_of_a_sorted_log_softmax(num_top: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(num_top)
    logits = torch.randn(150, 40, generator=generator) * 3
    if tied:
        logits = logits.round()
    token_ids = torch.randint(40, (150,), generator=generator).tolist()
    exact = torch.log_softmax(logits.double(), dim=-1)
    scores = token_logprobs(logits, token_ids, num_top)
    assert [one.token_id for one in scores] == token_ids
    for one, row, want in zip(scores, logits, exact, strict=True):
        order = ranking(row)
        assert one.logprob == pytest.approx(float(want[one.token_id]), abs=1e-5)
        assert one.rank == order.index(one.token_id) + 1
        assert list(one.top_token_ids) == order[:num_top]
        np.testing.assert_allclose(one.top_logprobs, want[order[:num_top]].numpy(), atol=1e-5)


def test_half_precision_is_scored_in_full() -> None:
    logits = torch.randn(3, 1000).bfloat16()
    scores = token_logprobs(logits, [1, 2, 3], 4)
    exact = torch.log_softmax(logits.double(), dim=-1)
    for one, row in zip(scores, exact, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-5)


def test_fewer_of_the_likeliest_are_the_first_of_more() -> None:
    logits = torch.randn(5, 30).round()
    more, fewer = token_logprobs(logits, [0, 1, 2, 3, 4], 9), token_logprobs(logits, [0, 1, 2, 3, 4], 4)
    assert [first_of_top(one, 4) for one in more] == fewer
