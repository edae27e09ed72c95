"""The front: what a client is told, and when."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TIMELINE_TESTS = "tests/router/test_timeline.py"
REPEATED_TESTS = "tests/router/test_repeated_ids.py"

FRONT = (
    Mutant(
        "prefill answers before its hand-off is over",
        "E10",
        "workers/prefill.py",
        "            return await token_1\n",
        "            await asyncio.shield(shipment.task)\n            return await token_1\n",
        (f"{TIMELINE_TESTS}::test_e10_the_first_token_does_not_wait_for_the_transfer",),
    ),
    Mutant(
        "the router passes token 1 on before decode has anything",
        "E10",
        "router/router.py",
        "        return first\n",
        "        await outputs.arrival()\n        return first\n",
        (f"{TIMELINE_TESTS}::test_e10_the_first_token_does_not_wait_for_the_transfer",),
    ),
    Mutant(
        "a request sent again takes the place of the first",
        "",
        "router/text.py",
        "if other.is_same(request):",
        "if False:",
        (f"{REPEATED_TESTS}::test_a_request_that_waits_for_room_gives_up_its_place_in_the_queue",),
    ),
    Mutant(
        "an id is its tenant's own",
        "",
        "router/text.py",
        "seed_of(request_id, terms.tenant)",
        "seed_of(request_id)",
        (f"{REPEATED_TESTS}::test_a_retry_after_the_end_has_the_same_answer_and_another_tenants_is_another",),
    ),
    Mutant(
        "a trace is its tenant's to see",
        "",
        "router/traces.py",
        "if owner == tenant and _is_of(name, request_id)",
        "if _is_of(name, request_id)",
        ("tests/router/test_trace_tenants.py::test_a_tenant_sees_its_own_requests_only_and_to_look_costs_nothing",),
    ),
    Mutant(
        "arguments of strict functions follow their schema",
        "",
        "router/openai/tools.py",
        "if self.strict and syntax.tagged",
        "if False",
        (
            "tests/router/test_strict_tools.py::test_a_call_that_a_model_begins_is_held_to_its_strict_schema[Bernissimo-False]",
        ),
    ),
    Mutant(
        "a call that begins while a map is closed is cancelled",
        "",
        "cluster/connection.py",
        "        if self._cancelled:\n            call.cancel()\n",
        "",
        ("tests/cluster/test_calls.py::test_a_call_that_begins_while_the_others_are_cancelled_is_cancelled_too",),
    ),
    Mutant(
        "time of a try that failed is counted",
        "",
        "router/router.py",
        "choice.spent += one_try.told[choice.request.choice]",
        "pass",
        (f"{TIMELINE_TESTS}::test_time_that_a_dead_worker_took_with_it_is_counted_where_it_went",),
    ),
    Mutant(
        "a call that is ended twice ends once",
        "-",
        "router/call.py",
        "        if self.error is not None:\n            return\n        self.error = error",
        "        self.error = error",
        ("tests/router/test_nothing_lingers.py::test_a_call_may_be_ended_twice_before_it_hears_of_it",),
    ),
    Mutant(
        "who reads slowly is not taken for one who does not read",
        "-",
        "router/http/patience.py",
        "elif left < left_before:",
        "elif False:",
        ("tests/router/test_slow_readers.py::test_a_client_that_reads_nothing_of_its_answer_is_gone_in_time",),
    ),
    Mutant(
        "the message that brings a prompt goes with its request",
        "D3",
        "router/waits.py",
        "        self._timer.cancel()",
        "        pass",
        ("tests/router/test_nothing_lingers.py::test_the_message_that_brings_a_prompt_goes_with_its_request",),
    ),
)
