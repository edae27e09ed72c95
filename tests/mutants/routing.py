"""Routing: who is served by, and what a router may believe of caches."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

INDEX = "router/prefix_index.py"
FOLLOW = "router/kv_events.py"
ROLE_TESTS = "tests/router/test_wrong_role.py"
INDEX_TESTS = "tests/router/test_prefix_index.py"
ROUTING_TESTS = "tests/router/test_prefix_routing.py"

ROUTING = (
    Mutant(
        "a worker of another role than configured is not served by",
        "E7",
        "router/roles.py",
        "if configured not in (None, stats.role):",
        "if False:",
        (
            f"{ROLE_TESTS}::test_requests_do_not_all_go_to_a_worker_that_should_only_prefill",
            f"{ROLE_TESTS}::test_the_others_serve_and_status_names_the_wrong_one",
            f"{ROLE_TESTS}::test_it_serves_when_it_comes_back_with_its_role",
        ),
    ),
    Mutant(
        "readiness tells of a worker with the wrong role",
        "E7",
        "router/pool.py",
        'worker answers", *refused))',
        'worker answers",))',
        (f"{ROLE_TESTS}::test_requests_do_not_all_go_to_a_worker_that_should_only_prefill",),
    ),
    Mutant(
        "the prefix index is bounded",
        "E8",
        INDEX,
        "while len(self._holders) > self._max_num_blocks:",
        "while False:",
        (
            f"{INDEX_TESTS}::test_it_never_grows_beyond_its_bound_however_much_it_is_told",
            f"{INDEX_TESTS}::test_with_a_bound_it_forgets_but_invents_nothing",
            f"{ROUTING_TESTS}::test_the_index_is_bounded_by_its_setting",
        ),
    ),
    Mutant(
        "what waits to be told of a cache is bounded",
        "E8",
        "workers/kv_events.py",
        "self.missed = len(self.changes) > most",
        "pass",
        ("tests/workers/test_kv_events.py::test_who_reads_too_slowly_is_told_all_anew_and_costs_no_memory",),
    ),
    Mutant(
        "an incarnation that is gone leaves nothing in the index",
        "E8",
        INDEX,
        "self._bits.pop(incarnation, None)",
        "pass",
        (f"{INDEX_TESTS}::test_incarnations_that_come_and_go_leave_nothing_behind",),
    ),
    Mutant(
        "what a dead worker had is forgotten at once",
        "E8",
        FOLLOW,
        "        finally:\n            index.drop(incarnation)",
        "        finally:\n            pass",
        (
            f"{ROUTING_TESTS}"
            "::test_what_a_dead_incarnation_had_is_forgotten_at_once_and_its_successor_starts_with_nothing",
        ),
    ),
    Mutant(
        "who missed an event asks for all of them anew",
        "E8",
        FOLLOW,
        "(message.incarnation, message.number) != (incarnation, expected)",
        "message.incarnation != incarnation",
        (
            f"{ROUTING_TESTS}::test_who_missed_an_event_gets_all_of_them_anew[3]",
            f"{ROUTING_TESTS}::test_who_missed_an_event_gets_all_of_them_anew[4]",
        ),
    ),
)
