"""Injected faults: that each happens, and where it is said to. A fault that does not is a defence that nobody tries."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAULTS = "workers/faults.py"
FAULT_TESTS = "tests/workers/test_faults.py"
STEP_TESTS = "tests/workers/test_fault_steps.py"
PROCESS_TESTS = "tests/workers/test_fault_processes.py"
STEPS = ("reserve", "prefill", "frame", "token_1", "commit", "committed", "output")

INJECTED = (
    *(
        Mutant(
            f"who is to be killed is killed at {step}",
            "",
            FAULTS,
            f'self._faults.reach("{step}")',
            "pass",
            (f"{STEP_TESTS}::test_a_worker_is_killed_at_the_step_that_is_named_and_nothing_is_lost[{step}]",),
        )
        for step in STEPS
    ),
    Mutant(
        "who is killed is dead",
        "",
        FAULTS,
        "os.kill(os.getpid(), signal.SIGKILL)",
        "pass",
        (f"{PROCESS_TESTS}::test_a_process_is_killed_at_its_step_and_the_answer_is_whole[decode-output]",),
    ),
    Mutant(
        "a heartbeat pauses for as long as it is said to",
        "",
        FAULTS,
        "await asyncio.sleep(fault.for_s - since_s)",
        "pass",
        (
            f"{FAULT_TESTS}::test_a_worker_whose_heartbeat_pauses_is_gone_around_until_it_is_over",
            f"{FAULT_TESTS}::test_a_hand_off_whose_renewals_pause_loses_its_lease_and_no_answer",
        ),
    ),
    Mutant(
        "while heartbeats pause no lease is renewed",
        "",
        FAULTS,
        "        await self._faults.heartbeat()\n        return await super().Renew(request, context)",
        "        return await super().Renew(request, context)",
        (f"{FAULT_TESTS}::test_a_hand_off_whose_renewals_pause_loses_its_lease_and_no_answer",),
    ),
)
