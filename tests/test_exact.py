"""The comparator refuses what it must, and takes for a tie only what is one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.exact import Comparator, Logits, distribution
from workers.random import uniform
from workers.request import SamplingParams

VOCAB = 30
EOS = 29
PROMPT = [3, 1, 4]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=8, seed=5, max_tokens=12)
both = pytest.mark.parametrize("params", [GREEDY, SAMPLED])


class Table:
    """A model whose logits are a hash of all that came before; `near` puts a second token `gap` under the best."""

    def __init__(self, near: tuple[int, float] | None = None) -> None:
        self._near = near
        self.num_calls = 0

    def logits(self, token_ids: Sequence[int], num_last: int) -> Logits:
        self.num_calls += 1
        ends = range(len(token_ids) - num_last + 1, len(token_ids) + 1)
        return np.stack([self.row(token_ids[:end]) for end in ends])

    def row(self, prefix: Sequence[int]) -> Logits:
        row = np.random.default_rng(list(prefix)).normal(size=VOCAB) * 3
        row[EOS] = -20.0
        if self._near and len(prefix) == self._near[0]:
            best, second = np.argsort(row)[::-1][:2]
            row[second] = row[best] - self._near[1]
        return row


def naive(row: Logits, params: SamplingParams, position: int, choice: int = 0) -> int:
    if params.greedy:
        return int(row.argmax())
    total, draw = 0.0, uniform(params.seed or 0, choice, position)
    for token, prob in enumerate(distribution(row, params)):
        total += prob
        if draw < total:
            return token
    raise AssertionError


def answer(table: Table, params: SamplingParams, forced: dict[int, int] | None = None) -> list[int]:
    """Token by token; `forced` by output position."""
    ids = list(PROMPT)
    for index in range(params.max_tokens or 0):
        ids.append((forced or {}).get(index, naive(table.row(ids), params, len(ids))))
    return ids[len(PROMPT) :]


def second_best(table: Table, prefix: Sequence[int]) -> int:
    return int(np.argsort(table.row([*PROMPT, *prefix]))[-2])


def compare(table: Table, params: SamplingParams, candidate: Sequence[int], reference: Sequence[int] | None = None):
    comparator = Comparator(table, {EOS})
    comparator.require_same(PROMPT, params, candidate, reference)
    return comparator


@both
def test_the_oracles_own_answer_is_the_same_and_no_tie(params):
    comparator = compare(Table(), params, answer(Table(), params))
    assert (comparator.num_tokens, comparator.ties) == (12, [])
    comparator.check()


@both
@pytest.mark.parametrize("index", range(12))
def test_a_wrong_token_is_refused_wherever_it_is(params, index):
    right = answer(Table(), params)
    wrong = list(right)
    wrong[index] = next(t for t in range(EOS) if t != right[index] and t not in (right[index] - 1, right[index] + 1))
    for reference in (None, right):
        with pytest.raises(AssertionError, match=f"output token {index} is {wrong[index]}"):
            compare(Table(), params, wrong, reference)


@both
def test_a_token_outside_the_vocabulary_is_refused(params):
    for token in (-1, VOCAB):
        with pytest.raises(AssertionError, match=f"output token 11 is {token}"):
            compare(Table(), params, [*answer(Table(), params)[:-1], token])


@both
def test_a_missing_and_an_extra_token_are_refused(params):
    right = answer(Table(), params)
    for wrong in (right[:-1], [*right, right[0]], []):
        for reference in (None, right, wrong):
            with pytest.raises(AssertionError, match=rf"has {len(wrong)} tokens, not 12"):
                compare(Table(), params, wrong, reference)


def test_a_token_after_the_one_that_stops_is_refused():
    class Stopping(Table):
        def row(self, prefix: Sequence[int]) -> Logits:
            row = super().row(prefix)
            row[EOS] = 99.0 if len(prefix) == len(PROMPT) + 4 else -99.0
            return row

    whole = answer(Stopping(), GREEDY)
    compare(Stopping(), GREEDY, whole[:5])
    for wrong in (whole, whole[:4], whole[:6]):
        with pytest.raises(AssertionError, match=r"tokens, not (5|12)"):
            compare(Stopping(), GREEDY, wrong)
    on = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    compare(Stopping(), on, whole)
    with pytest.raises(AssertionError, match="has 5 tokens, not 12"):
        compare(Stopping(), on, whole[:5])


def test_a_shorter_reference_does_not_excuse_a_longer_answer():
    right = answer(Table(), GREEDY)
    with pytest.raises(AssertionError, match="the reference has 6 tokens, not 12"):
        compare(Table(), GREEDY, right, right[:6])


def test_equal_answers_need_no_oracle():
    table, right = Table(), answer(Table(), GREEDY)
    assert compare(table, GREEDY, right, right).num_tokens == 12
    assert table.num_calls == 0


@pytest.mark.parametrize(("gap", "is_tie"), [(1e-9, True), (9e-4, True), (1.1e-3, False), (0.1, False)])
def test_greedy_candidates_under_a_thousandth_apart_are_a_tie(gap, is_tie):
    table = Table(near=(len(PROMPT) + 5, gap))
    best = answer(table, GREEDY)
    second = answer(table, GREEDY, {5: second_best(table, best[:5])})
    assert best[5] != second[5]
    for reference in (None, best):
        if is_tie:
            (tie,) = compare(table, GREEDY, second, reference).ties
            assert (tie.index, tie.expected, tie.got) == (5, best[5], second[5])
        else:
            with pytest.raises(AssertionError, match="output token 5 is"):
                compare(table, GREEDY, second, reference)


def test_after_a_tie_the_oracle_goes_on_from_the_token_that_came():
    table = Table(near=(len(PROMPT) + 5, 5e-4))
    best = answer(table, GREEDY)
    second = answer(table, GREEDY, {5: second_best(table, best[:5])})
    assert second[6:] != best[6:]
    with pytest.raises(AssertionError, match=r"output token [6-9] is"):
        compare(table, GREEDY, [*second[:6], *best[6:]], best)


def test_a_reference_far_from_the_oracle_is_no_excuse():
    right = answer(Table(), GREEDY)
    wrong = answer(Table(), GREEDY, {4: (right[4] + 7) % EOS})
    with pytest.raises(AssertionError, match=f"output token 4 is {right[4]}, not {wrong[4]}"):
        compare(Table(), GREEDY, right, wrong)


@pytest.mark.parametrize(("distance", "is_tie"), [(5e-5, True), (2e-4, False)])
@pytest.mark.parametrize("side", ["below", "above"])
def test_a_draw_near_a_border_is_a_tie_with_the_token_beyond_it_only(distance, is_tie, side):
    draw = uniform(7, 0, len(PROMPT))
    # Four tokens with a border `distance` beside the draw; token 9 is filtered out though it lies at that border.
    border = draw - distance if side == "below" else draw + distance
    probs = {5: border / 2, 8: border / 2, 10: (1 - border) / 2, 12: (1 - border) / 2}
    row = np.full(VOCAB, -40.0)
    row[list(probs)] = np.log(list(probs.values()))

    class Fixed(Table):
        def row(self, prefix: Sequence[int]) -> Logits:
            return row

    params = SamplingParams(top_k=4, seed=7, max_tokens=1)
    own, beyond = (10, 8) if side == "below" else (8, 10)
    assert compare(Fixed(), params, [own]).ties == []
    for token in (5, 12, 9):
        with pytest.raises(AssertionError, match=f"output token 0 is {token}, not {own}"):
            compare(Fixed(), params, [token])
    if is_tie:
        (tie,) = compare(Fixed(), params, [beyond]).ties
        assert tie.gap == pytest.approx(distance, rel=1e-6)
    else:
        with pytest.raises(AssertionError, match=f"output token 0 is {beyond}, not {own}"):
            compare(Fixed(), params, [beyond])


@pytest.mark.parametrize(("num_tokens", "num_ties", "enough"), [(12, 1, True), (2000, 2, False), (2001, 2, True)])
def test_ties_are_at_most_one_in_two_thousand_tokens(num_tokens, num_ties, enough):
    table = Table(near=(len(PROMPT), 5e-4))
    comparator = Comparator(table, {EOS})
    tied = answer(table, GREEDY, {0: second_best(table, [])})
    for _ in range(num_ties):
        comparator.require_same(PROMPT, GREEDY, tied)
    comparator.num_tokens = num_tokens
    assert comparator.summary() == f"{num_tokens} tokens compared, {num_ties} ties"
    if enough:
        comparator.check()
    else:
        with pytest.raises(AssertionError, match="too many ties"):
            comparator.check()


def test_a_choice_is_compared_with_draws_of_its_own():
    ids = list(PROMPT)
    for _ in range(SAMPLED.max_tokens or 0):
        ids.append(naive(Table().row(ids), SAMPLED, len(ids), choice=2))
    comparator = Comparator(Table(), {EOS})
    comparator.require_same(PROMPT, SAMPLED, ids[len(PROMPT) :], choice=2)
    assert comparator.ties == []
    with pytest.raises(AssertionError, match="output token"):
        comparator.require_same(PROMPT, SAMPLED, ids[len(PROMPT) :])


def test_a_comparison_of_samples_needs_their_seed():
    with pytest.raises(AssertionError, match="seed"):
        compare(Table(), SamplingParams(max_tokens=1), [1])


def test_a_reference_that_is_the_tie_counts_once():
    table = Table(near=(len(PROMPT) + 5, 5e-4))
    best = answer(table, GREEDY)
    (tie,) = compare(table, GREEDY, best, answer(table, GREEDY, {5: second_best(table, best[:5])})).ties
    assert (tie.index, tie.got) == (5, best[5])
