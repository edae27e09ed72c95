"""What `make bench-death` makes of the seconds that it measured."""

from __future__ import annotations

from cluster.bench.worker_death import Measured, judge


def test_a_goal_is_met_by_the_slowest_that_was_known_and_by_half_of_the_next_tokens():
    killed, stopped = Measured([0.1, 0.31], [1.0, 2.0, 9.0]), Measured([1.9, 1.99], [3.5, 2.9, 3.0])
    goals = judge({"1P2D": {"SIGKILL decode": killed, "SIGSTOP decode": stopped, "SIGKILL prefill": Measured()}})
    assert goals == {
        "1P2D: SIGKILL decode known, longest": {"value": 0.31, "goal": 0.3, "met": False},
        "1P2D: SIGKILL decode, next token, p50": {"value": 2.0, "goal": 3.0, "met": True},
        "1P2D: SIGSTOP decode known, longest": {"value": 1.99, "goal": 2.0, "met": True},
        "1P2D: SIGSTOP decode, next token, p50": {"value": 3.0, "goal": 3.0, "met": False},
    }
