"""Frequencies against the distribution asked for, draws against a naive inverse, and independence of batch mates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.workers.layers.rows import sample
from workers.random import uniform
from workers.request import SamplingParams

VOCAB = 40
NUM_DRAWS = 20_000


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def naive_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Token by token in plain Python: scale, min_p, top_k, softmax, top_p, renormalise."""
    scaled = logits.double().numpy() / params.temperature
    if params.min_p:
        likely = np.exp(scaled - scaled.max())
        scaled = np.where(likely >= params.min_p, scaled, -np.inf)
    if params.top_k:
        scaled = np.where(scaled >= np.sort(scaled)[::-1][: params.top_k][-1], scaled, -np.inf)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept: np.ndarray = np.zeros(len(probs))
    mass = 0.0
    for token in np.argsort(-probs, kind="stable"):
        if mass >= params.top_p:
            break
        kept[token] = probs[token]
        mass += probs[token]
    kept /= kept.sum()
    return kept


SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.1),
    SamplingParams(temperature=0.9, min_p=0.02, top_k=12, top_p=0.95),
]


@pytest.mark.parametrize("params", SETTINGS)
def test_frequencies_pass_chi_square(params: SamplingParams) -> None:
    logits = random_logits(1)
    tokens = sample(logits.expand(NUM_DRAWS, VOCAB), [params] * NUM_DRAWS, range(NUM_DRAWS))
    require_chi_square(tokens, naive_distribution(logits[0], params))


def require_chi_square(tokens: Sequence[int], probs: np.ndarray) -> None:
    """AssertionError unless `tokens` may be draws from `probs`."""
    want = probs * len(tokens)
    got = np.bincount(tokens, minlength=len(probs))
    assert got[want == 0].sum() == 0
    # Cells under 5 are too small for the test: pool them.
    small = want < 5
    cells = [(got[i], want[i]) for i in np.flatnonzero(~small)]
    if want[small].sum() > 5:
        cells.append((got[small].sum(), want[small].sum()))
    chi_square = sum((g - w) ** 2 / w for g, w in cells)
    freedom = len(cells) - 1
    # 4.3 standard deviations above the mean of the distribution.
    assert chi_square < freedom + 4.3 * (2 * freedom) ** 0.5 + 4


def test_draws_invert_the_cumulative_distribution_in_token_order() -> None:
    logits = random_logits(len(SETTINGS) * 20)
    params = [p for p in SETTINGS for _ in range(20)]
    positions = list(range(7, 7 + len(params)))
    for token, row, p, at in zip(sample(logits, params, positions), logits, params, positions, strict=True):
        cumulative = naive_distribution(row, p).cumsum()
        assert token == int(np.searchsorted(cumulative, uniform(0, 0, at), side="right"))


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    assert sample(logits, [SamplingParams(temperature=0.0)] * 2, [0, 0]) == [1, 0]


def test_rows_with_different_settings_share_a_step() -> None:
    params = [SamplingParams(temperature=0.0), *SETTINGS, SamplingParams(temperature=0.0), SamplingParams(seed=5)]
    logits = random_logits(len(params), vocab_size=1000)
    positions = list(range(30, 30 + len(params)))
    together = sample(logits, params, positions)
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(len(params))]
    assert together == alone


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(len(SETTINGS))
    before = logits.clone()
    sample(logits, SETTINGS, range(len(SETTINGS)))
    assert torch.equal(logits, before)


def test_a_nucleus_wider_than_the_candidates_is_exact() -> None:
    # Nearly flat: 0.95 of the mass is thousands of tokens.
    logits = random_logits(2, vocab_size=5000) * 0.01
    params = SamplingParams(top_p=0.95)
    for at in range(20):
        for token, row in zip(sample(logits, [params] * 2, [at, at]), logits, strict=True):
            cumulative = naive_distribution(row, params).cumsum()
            # Rounding may move the last of thousands of nearly equal tokens in or out.
            assert abs(token - int(np.searchsorted(cumulative, uniform(0, 0, at), side="right"))) <= 1


def test_a_tiny_temperature_is_greedy_and_a_tiny_top_p_too() -> None:
    logits = random_logits(10) * 20
    best = logits.argmax(dim=-1).tolist()
    assert sample(logits, [SamplingParams(temperature=1e-30)] * 10, range(10)) == best
    assert sample(logits, [SamplingParams(top_p=1e-9)] * 10, range(10)) == best
    assert sample(logits, [SamplingParams(top_k=1)] * 10, range(10)) == best


def test_uniform_depends_on_each_of_its_three_keys_and_nothing_else() -> None:
    keys = [(seed, choice, at) for seed in (0, 1, -1, 2**63, 2**64 - 2) for choice in (0, 1) for at in (0, 1, 2**32)]
    draws = {key: uniform(*key) for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert all(0 <= value < 1 for value in draws.values())
    assert all(uniform(*key) == value for key, value in reversed(draws.items()))
