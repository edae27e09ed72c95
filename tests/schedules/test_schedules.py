"""Random schedules: whatever order things happen in, every client gets the right tokens and no block is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pytest

from tests.schedules.play import Outcome, play
from tests.schedules.schedule import draw


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Every death is logged; thousands of them are of no use to anybody."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def play_all(seeds: Iterable[int]) -> Outcome:
    return Outcome.total(play_seed(seed) for seed in seeds)


def play_seed(seed: int) -> Outcome:
    try:
        return play(draw(seed))
    except Exception as error:
        error.add_note(f"schedule {seed}; to play it again and make it small: python -m tests.schedules {seed}")
        raise


def require_service(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    """An error is typed and comes after all tries are spent, which `play` sees to; and few requests end with one."""
    with capsys.disabled():
        print(
            f"\n{outcome.num_answered} answered, {len(outcome.errors)} with an error ({outcome.rate:.2%} answered), "
            f"{outcome.num_left} left by their clients"
        )
    assert outcome.rate >= 0.99, "\n".join(outcome.errors[:20])


def test_500_random_schedules_give_every_client_the_right_tokens_and_leak_nothing(capsys):
    require_service(play_all(range(500)), capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_random_schedules_give_every_client_the_right_tokens_and_leak_nothing(capsys):
    require_service(play_all(range(500, 10_500)), capsys)


def test_the_same_schedule_is_played_the_same_again():
    assert [draw(seed) for seed in range(5)] == [draw(seed) for seed in range(5)]
    assert [play_seed(seed) for seed in range(5)] == [play_seed(seed) for seed in range(5)]
