from __future__ import annotations

from workers.backoff import pause_s


def test_a_pause_doubles_and_is_between_half_of_it_and_the_whole():
    for num_failed in range(1, 6):
        whole_s = 0.2 * 2 ** (num_failed - 1)
        pauses = [pause_s(0.2, num_failed, f"r{at}") for at in range(200)]
        assert all(whole_s / 2 <= pause <= whole_s for pause in pauses)
        # All over the range, so that few come back together.
        assert min(pauses) < 0.55 * whole_s
        assert max(pauses) > 0.95 * whole_s


def test_a_pause_is_the_same_in_a_run_that_is_repeated_and_another_each_time():
    assert pause_s(1.0, 2, "r") == pause_s(1.0, 2, "r")
    assert pause_s(2.0, 1, "r") != pause_s(1.0, 2, "r") != pause_s(1.0, 2, "s")
