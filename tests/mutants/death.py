"""Deaths: of workers, seen in time and survived; of routers, behind which our client goes on."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESUME = "cluster/resume.py"
ROUTER = "router/router.py"
HANDLE = "router/worker_handle.py"
RESUME_TESTS = "tests/cluster/test_resume.py"
CLIENT_TESTS = "tests/cluster/test_client_resume.py"
SILENCE_TESTS = "tests/router/test_silence.py"

DEATH = (
    Mutant(
        "text goes on behind the tokens that the client holds, half characters and stop strings included",
        "D1",
        "router/answer.py",
        "self._show(TokenOutput(self._request.request_id, 0, tuple(token_ids)))",
        "pass",
        ("tests/router/test_so_far.py::test_an_answer_cut_at_any_token_goes_on_as_if_it_had_not_been",),
    ),
    Mutant(
        "tokens that the client holds are not generated again",
        "D1",
        ROUTER,
        "choice.request.output_token_ids.extend(so_far[choice.request.choice])",
        "pass",
        (f"{RESUME_TESTS}::test_what_goes_on_is_what_a_model_without_a_cache_says",),
    ),
    Mutant(
        "a choice that the client saw end is not asked for again",
        "D1",
        RESUME,
        "del self._so_far[chunk.choice]",
        "pass",
        (f"{RESUME_TESTS}::test_the_next_router_computes_no_token_again_and_no_choice_that_had_ended",),
    ),
    Mutant(
        "the seed in effect goes to the next router",
        "D1",
        RESUME,
        "self._request.params.seed = message.seed",
        "pass",
        (f"{RESUME_TESTS}::test_an_answer_whose_router_dies_again_and_again_is_the_same",),
    ),
    Mutant(
        "the client chooses the id that keys the random numbers",
        "D1",
        RESUME,
        ' or f"gen-{uuid.uuid4().hex}"',
        "",
        (f"{RESUME_TESTS}::test_a_request_whose_router_dies_before_its_first_piece_is_sent_again_with_its_id",),
    ),
    Mutant(
        "what does not go on where the client is is an error",
        "D1",
        RESUME,
        "if message.index != len(held):",
        "if False:",
        (f"{CLIENT_TESTS}::test_an_answer_that_does_not_fit_on_is_an_error",),
    ),
    Mutant(
        "a client that never met a router is told so at once",
        "E5",
        "cluster/routers.py",
        "not self._routers.heard or ",
        "",
        (f"{RESUME_TESTS}::test_a_client_that_never_met_a_router_is_told_at_once",),
    ),
    Mutant(
        "requests of a router that is gone for a lease end",
        "A11",
        "workers/outputs.py",
        "self._on_lost(router_id)",
        "pass",
        (f"{RESUME_TESTS}::test_requests_of_a_dead_router_end_with_its_lease_and_not_before",),
    ),
    Mutant(
        "a heartbeat is not waited for longer than three may be missed",
        "D3",
        HANDLE,
        "timeout_s = (_MAX_MISSES - 0.5) *",
        "timeout_s = (_MAX_MISSES + 0.5) *",
        (f"{SILENCE_TESTS}::test_a_silent_worker_is_known_to_be_gone_in_time_wherever_its_heartbeat_was",),
    ),
    Mutant(
        "an answer is not waited for longer than its worker is there",
        "D3",
        HANDLE,
        "        self._waits.fail(error)\n",
        "",
        (
            f"{SILENCE_TESTS}::test_a_prompt_whose_prefill_worker_falls_silent_is_taken_by_another_as_soon_as_that_is_known",
        ),
    ),
    Mutant(
        "an abort that was not heard is said again",
        "A1",
        HANDLE,
        "self._unheard_aborts |= dict.fromkeys(request_ids)",
        "pass",
        (f"{SILENCE_TESTS}::test_a_worker_that_wakes_up_is_told_what_it_was_not_told_asleep",),
    ),
    Mutant(
        "a new process serves nobody before it has told who it is",
        "D1",
        HANDLE,
        "self._misses = _MAX_MISSES\n        self._lose(how)",
        "self._lose(how)",
        (f"{SILENCE_TESTS}::test_nothing_is_placed_on_a_new_process_before_it_has_told_who_it_is",),
    ),
    Mutant(
        "requests wait for a worker that is being replaced",
        "D3",
        "router/pool.py",
        "return last_s + self._config.worker_wait_s",
        "return -math.inf",
        (f"{SILENCE_TESTS}::test_requests_wait_while_who_could_serve_them_is_being_replaced",),
    ),
    Mutant(
        "a stream that gets on is not counted out",
        "D3",
        ROUTER,
        "failures.num_in_a_row = 1 if got_on else failures.num_in_a_row + 1",
        "failures.num_in_a_row += 1",
        (f"{SILENCE_TESTS}::test_streams_outlive_more_deaths_than_a_request_may_have_tries_without_a_token",),
    ),
    Mutant(
        "pauses before another try differ",
        "D8",
        "workers/backoff.py",
        "(0.5 + part / 2)",
        "1.0",
        (
            "tests/workers/test_backoff.py::test_a_pause_doubles_and_is_between_half_of_it_and_the_whole",
            f"{SILENCE_TESTS}::test_those_who_lost_one_worker_do_not_all_come_back_at_one_moment",
        ),
    ),
    Mutant(
        "a process that hangs in its start is begun again",
        "D3",
        "cluster/controller.py",
        "if now_s - watched.began_s >= self._longest_start_s:",
        "if False:",
        ("tests/cluster/test_controller.py::test_one_that_hangs_in_its_start_is_ended_and_begun_again",),
    ),
    Mutant(
        "what failed on one worker is tried on another",
        "D4",
        "router/admission.py",
        "(worker.address != request.replica_address, worker.address in tried)",
        "worker.address != request.replica_address",
        ("tests/router/test_second_tries.py::test_a_step_that_fails_on_one_worker_is_taken_on_another[d0]",),
    ),
    Mutant(
        "what has waited its turn goes past the queue",
        "D9",
        "router/admission.py",
        "await (self._place_again(request, tried) if tried else self._place_in_turn(request))",
        "await self._place_in_turn(request)",
        ("tests/router/test_second_tries.py::test_streams_that_lose_their_worker_go_past_a_full_queue",),
    ),
)
