"""Aborts and leaks: every block is free again on both sides, whatever the order of events."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECODE = "workers/decode.py"
PREFILL = "workers/prefill.py"
ENGINE = "workers/engine/engine.py"
SCHEDULER = "workers/engine/scheduler.py"
ROUTER = "router/router.py"
QUARANTINE_TESTS = "tests/workers/test_quarantine.py"
LEASE_TESTS = "tests/workers/test_leases.py"
DECODE_TESTS = "tests/workers/test_decode.py"
PREFILL_TESTS = "tests/workers/test_prefill.py"
ABORT_TESTS = "tests/workers/engine/test_engine_aborts.py"
ROUTER_TESTS = "tests/router/test_router.py"
ONE_SIDE_TESTS = "tests/workers/test_one_side_ends.py"
WORKER = "workers/worker.py"

ABORTS = (
    Mutant(
        "a request aborted in its last prefill step gets no output",
        "A3",
        ENGINE,
        "if request.status is RequestStatus.FINISHED:",
        "if False:",
        (
            "tests/workers/test_abort_races.py::test_an_abort_that_races_the_end_of_prefill_harms_nobody",
            f"{ABORT_TESTS}::test_blocks_of_a_request_aborted_during_a_step_are_given_away_only_when_it_is_over",
        ),
    ),
    Mutant(
        "an abort of an unknown id is no error",
        "A4",
        ENGINE,
        "self.requests.get(request_id, {}).values()",
        "self.requests[request_id].values()",
        ("tests/workers/test_worker.py::test_aborting_what_is_not_there_is_no_error",),
    ),
    Mutant(
        "a release of an unknown grant is no error",
        "A4",
        DECODE,
        "hand_off = self._hand_offs.get(message.grant_id)",
        "hand_off = self._hand_offs[message.grant_id]",
        (f"{DECODE_TESTS}::test_an_end_of_something_unknown_is_no_error",),
    ),
    Mutant(
        "an abort before anything was allocated finds its request",
        "A4",
        SCHEDULER,
        "elif request.status is not RequestStatus.FINISHED:",
        "elif request.status is RequestStatus.PREEMPTED:",
        (f"{ABORT_TESTS}::test_an_abort_between_steps_frees_everything_at_once[waiting]",),
    ),
    Mutant(
        "blocks of a request that ends during a step wait for the step's end",
        "B1",
        ENGINE,
        "if request in self._in_step:",
        "if False:",
        (f"{ABORT_TESTS}::test_blocks_of_a_request_aborted_during_a_step_are_given_away_only_when_it_is_over",),
    ),
    Mutant(
        "blocks under a write are quarantined until it is over",
        "B1",
        DECODE,
        "hand_off.request.hold_blocks = True",
        "pass",
        (
            f"{QUARANTINE_TESTS}::test_blocks_under_a_write_are_quarantined_until_it_is_over_and_its_late_bytes_harm_nobody",
        ),
    ),
    Mutant(
        "a lease ends by its own timer",
        "A11",
        DECODE,
        "call_later(self._config.lease_s",
        "call_later(1e6",
        (
            f"{LEASE_TESTS}::test_a_lease_that_runs_out_frees_the_blocks_on_time_and_tells_the_router",
            "tests/workers/test_worker.py::test_grants_that_nobody_uses_run_out_by_themselves_in_a_full_pool",
        ),
    ),
    Mutant(
        "a hand-off that fails gives its grant back",
        "A10",
        PREFILL,
        'if reason != "committed":',
        "if False:",
        ("tests/workers/test_prefill_aborts.py::test_a_cancelled_prefill_ends_the_request_and_gives_the_grant_back",),
    ),
    Mutant(
        "prefill keeps blocks that are still being sent",
        "B1",
        PREFILL,
        "request.hold_blocks = True",
        "pass",
        (f"{PREFILL_TESTS}::test_what_is_held_for_sending_counts_as_in_use",),
    ),
    Mutant(
        "an attempt has an id of its own, which late aborts do not meet",
        "A8",
        ROUTER,
        'attempt_id = f"',
        'attempt_id = request.request_id or f"',
        (
            "tests/router/test_router_aborts.py::test_an_abort_of_an_earlier_attempt_that_comes_late_does_not_end_the_next",
            "tests/router/test_router_aborts.py::test_a_failure_of_an_earlier_attempt_that_is_heard_of_late_does_not_end_the_next",
        ),
    ),
    Mutant(
        "prefill hears of a grant that is no more when it renews it",
        "A1",
        PREFILL,
        "if shipment.grant.grant_id in lost and still_here:",
        "if False:",
        (
            f"{ONE_SIDE_TESTS}"
            "::test_prefill_hears_within_a_lease_that_decode_has_aborted_though_its_step_takes_half_an_hour",
        ),
    ),
    Mutant(
        "prefill frees a request whose hand-off was refused",
        "A2",
        PREFILL,
        "            self._free(shipment)\n",
        "            pass\n",
        (f"{ONE_SIDE_TESTS}::test_whatever_decode_refuses_leaves_no_block_on_either_side",),
    ),
    Mutant(
        "decode validates a request before prefill computes it",
        "A2",
        WORKER,
        "        self._check(request)\n        grant = self.decode.reserve",
        "        grant = self.decode.reserve",
        ("tests/workers/test_worker.py::test_a_request_that_can_never_fit_is_refused_by_every_entrance",),
    ),
    Mutant(
        "a renewal renews only what it names",
        "A6",
        DECODE,
        "for grant_id in message.grant_ids:",
        "for grant_id in (*message.grant_ids, *self._hand_offs):",
        (f"{LEASE_TESTS}::test_a_renewed_lease_does_not_keep_others_alive",),
    ),
    Mutant(
        "an abort finds a request between its commit and its batch",
        "A8",
        WORKER,
        "            self.engine.abort(request_id)",
        "            pass",
        (f"{ONE_SIDE_TESTS}::test_an_abort_finds_a_request_between_its_commit_and_its_batch",),
    ),
    Mutant(
        "a frame that fails gives its credit back",
        "A10",
        "workers/kv_transfer/outgoing.py",
        "async with outgoing.peer.window:",
        "if await outgoing.peer.window.acquire():",
        (f"{PREFILL_TESTS}::test_failed_frames_do_not_wear_out_the_window_of_credits",),
    ),
    Mutant(
        "a request that fails before token 1 leaves prefill's queue",
        "A10",
        ROUTER,
        "        finally:\n            self._admission.leave(placement)",
        "        finally:\n            pass",
        (
            "tests/router/test_prefill_death.py::test_its_prompt_is_answered_by_who_is_there_and_decode_keeps_no_room_for_it",
        ),
    ),
)
