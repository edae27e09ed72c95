"""What fails is made small: only what it takes is left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedules import schedule as namespace
from tests.schedules.__main__ import as_test, fails_like, failure_of, main
from tests.schedules.schedule import Ask, Kill, Pause, Schedule, Spoil, as_code, draw
from tests.schedules.shrink import shrink, simpler


def test_only_the_events_that_a_failure_takes_are_left_and_these_are_plain():
    def fails(schedule: Schedule) -> bool:
        kills = any(isinstance(e, Kill) and e.name == "d0" for e in schedule.events)
        return kills and any(isinstance(e, Ask) and e.num_prompt_tokens >= 5 for e in schedule.events)

    long, kill = Ask(at_s=0.123, num_prompt_tokens=47, n=3, seed=8), Kill(0.517, "d0", 2.25)
    noise = tuple(Ask(at_s=i / 7, max_tokens=i + 1) for i in range(9))
    spoilt = Schedule((*noise, long, Pause(0.2, "p1"), kill, Spoil()), prefill=2, num_blocks=40, seed=77)
    assert shrink(spoilt, fails) == Schedule((Ask(num_prompt_tokens=5), Kill()))


def test_a_schedule_that_nothing_can_be_taken_from_stays_as_it_is():
    whole = draw(3)
    assert shrink(whole, lambda schedule: schedule == whole) == whole


def test_no_schedule_is_asked_about_twice_and_every_way_ends():
    asked: list[Schedule] = []

    def fails(schedule: Schedule) -> bool:
        asked.append(schedule)
        return len(schedule.events) > 2

    shrink(draw(5), fails)
    assert len(asked) == len(set(asked)) < 2000


def test_a_worker_that_something_happens_to_is_not_taken_out():
    schedule = Schedule((Kill(name="d1"),), decode=2)
    assert all(smaller.decode == 2 or not smaller.events for smaller in simpler(schedule))
    assert any(smaller.decode == 1 for smaller in simpler(replace(schedule, events=(Kill(name="d0"),))))


@pytest.mark.parametrize("seed", range(10))
def test_the_code_of_a_schedule_makes_it_again(seed):
    assert eval(as_code(draw(seed)), vars(namespace)) == draw(seed)


def test_a_planted_fault_is_found_made_small_and_printed_as_a_test(monkeypatch, capsys):
    """Nobody looks at checksums: what is left is one request and the flipped bit of its KV."""
    monkeypatch.setattr("workers.kv_transfer.frame.Digest.require", lambda *args: None)
    assert main(["0", "100"]) == 1
    printed = capsys.readouterr().out
    assert "def test_what_seed_" in printed
    failing = next(seed for seed in range(100) if failure_of(draw(seed)))
    failure = failure_of(draw(failing))
    assert isinstance(failure, AssertionError)
    small = shrink(draw(failing), fails_like(failure))
    asks, spoils = (sum(isinstance(e, kind) for e in small.events) for kind in (Ask, Spoil))
    assert (asks, spoils, len(small.events)) == (1, 1, 2)
    # The same again, and it is what was printed.
    assert as_test(small, failing) in printed
    monkeypatch.undo()
    assert failure_of(small) is None
