"""Random schedules: whatever order things happen in, every client gets the right tokens and no block is lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.conftest import SUMMARIES
from tests.schedules.play import Outcome, play
from tests.schedules.schedule import Ask, Kill, Schedule, Spoil, draw


def play_all(seeds: Iterable[int]) -> Outcome:
    return Outcome.total(play_seed(seed) for seed in seeds)


def play_seed(seed: int) -> Outcome:
    try:
        return play(draw(seed))
    except Exception as error:
        error.add_note(f"schedule {seed}; to play it again and make it small: python -m tests.schedules {seed}")
        raise


def require_service(outcome: Outcome, config: pytest.Config) -> None:
    """An error is typed and comes after all tries are spent, which `play` sees to; and few requests end with one."""
    config.stash[SUMMARIES].append(
        f"schedules: {outcome.num_answered} answered, {len(outcome.errors)} with an error "
        f"({outcome.rate:.2%} answered), {outcome.num_left} left by their clients"
    )
    assert outcome.rate >= 0.99, "\n".join(outcome.errors[:20])


def test_500_random_schedules_give_every_client_the_right_tokens_and_leak_nothing(pytestconfig):
    require_service(play_all(range(500)), pytestconfig)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_random_schedules_give_every_client_the_right_tokens_and_leak_nothing(pytestconfig):
    require_service(play_all(range(500, 10_500)), pytestconfig)


def test_the_same_schedule_is_played_the_same_again():
    assert [draw(seed) for seed in range(5)] == [draw(seed) for seed in range(5)]
    assert [play_seed(seed) for seed in range(5)] == [play_seed(seed) for seed in range(5)]


def test_a_request_that_nobody_is_left_to_answer_counts_as_one_that_ended_with_an_error():
    for events in ((Kill(0.0, "p0"), Ask(at_s=0.1)), (Ask(max_tokens=25), Kill(0.1, "p0"), Kill(0.1, "d0"))):
        outcome = play(Schedule(events))
        assert (outcome.num_answered, len(outcome.errors), outcome.rate) == (0, 1, 0.0)
        assert "UnavailableError: no prefill" in outcome.errors[0]


def test_an_error_before_all_tries_are_spent_is_a_failure(monkeypatch):
    """Here because nothing may be tried again."""
    monkeypatch.setattr("router.router._RETRYABLE", ())
    with pytest.raises(AssertionError, match="ended after 1 of 4 tries"):
        play(Schedule((Ask(num_prompt_tokens=5), Spoil(how="flip", amount=0.9))))
