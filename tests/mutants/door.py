"""The door: who leaves early, what failed, who goes next."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROUTER = "router/router.py"
QUEUE = "router/queue.py"
EDGE = "router/http/edge.py"
LEAVERS = "tests/router/test_early_leavers.py"
FAILED = "tests/router/test_failed_generations.py"
QUEUE_TESTS = "tests/router/test_queue.py"
ASKING = "tests/router/test_asking_at_once.py"
OVERLOAD = "tests/router/test_overload.py"
PREDICTION = "tests/router/test_prediction.py"
GRPC_LIMITS = "tests/router/test_grpc_limits.py"
HTTP = "tests/router/test_http_protocol.py"
BAD = "tests/router/test_bad_requests.py"

DOOR = (
    Mutant(
        "a connection that is closed before token 1 ends its request",
        "A12",
        "router/http/answers.py",
        "    answering.cancel()\n",
        "    pass\n",
        ("tests/router/test_openai_server.py::test_a_client_that_goes_away_aborts_its_request_at_once",),
    ),
    Mutant(
        "decode is told of a client that leaves between the two legs",
        "A13",
        ROUTER,
        "self._in_background(placement.decode.abort(request_id))",
        "pass",
        (f"{LEAVERS}::test_a13_a_client_that_leaves_between_token_1_and_the_first_of_decode_frees_both",),
    ),
    Mutant(
        "a grant whose answer comes to nobody is taken back",
        "A13",
        "router/admission.py",
        "        except asyncio.CancelledError:\n            self._take_back(decode, request)\n",
        "        except asyncio.CancelledError:\n",
        (f"{LEAVERS}::test_a13_a_client_that_leaves_between_reserve_and_prefill_gives_the_grant_back",),
    ),
    Mutant(
        "a worker's failed output is an error and no answer",
        "C10",
        "router/answer.py",
        "        _raise_if_failed(output)\n",
        "",
        (
            f"{FAILED}::test_c10_a_whole_answer_that_failed_is_an_error",
            f"{FAILED}::test_c10_a_stream_that_failed_before_its_first_piece_is_an_error",
            f"{FAILED}::test_c10_a_stream_that_failed_later_ends_with_an_error_and_no_finish_reason",
        ),
    ),
    Mutant(
        "outputs that end without a reason are an error",
        "C10",
        "router/text.py",
        "        if last is None:\n",
        "        if last is None:\n            return\n",
        (f"{FAILED}::test_c10_a_stream_that_failed_later_ends_with_an_error_and_no_finish_reason",),
    ),
    Mutant(
        "lower priorities go first",
        "",
        QUEUE,
        "for key in sorted(self._levels) if key[1] == job",
        "for key in self._levels if key[1] == job",
        (
            f"{QUEUE_TESTS}::test_lower_priorities_go_first_even_before_one_that_has_the_turn",
            f"{OVERLOAD}::test_urgent_requests_wait_for_a_place_and_not_for_the_jobs_before_them",
        ),
    ),
    Mutant(
        "a waiter without room steps back for one that is more urgent",
        "",
        QUEUE,
        "if self._asking and self._first(but=()) is waiter:",
        "if False:",
        (f"{QUEUE_TESTS}::test_who_waits_with_the_turn_hears_of_a_more_urgent_one_at_once",),
    ),
    Mutant(
        "nobody asks past the first that found no room",
        "",
        QUEUE,
        "self._asking.keys() - self._refused.keys()",
        "self._asking.keys()",
        (f"{ASKING}::test_nobody_goes_past_the_first_that_found_no_room",),
    ),
    Mutant(
        "several ask for room at once",
        "",
        QUEUE,
        "min(2 * self._num_turns, _MAX_TURNS)",
        "1",
        (f"{ASKING}::test_requests_of_one_moment_do_not_wait_for_each_others_grants",),
    ),
    Mutant(
        "who asks a decode worker for room counts there",
        "",
        "router/admission.py",
        "decode.num_asked += 1",
        "decode.num_asked += 0",
        (f"{ASKING}::test_who_asks_counts_where_it_asks",),
    ),
    Mutant(
        "tenants get equal tokens",
        "",
        QUEUE,
        "self._levels[waiter.priority, waiter.job].serve(waiter)",
        "pass",
        (
            f"{QUEUE_TESTS}::test_tenants_get_as_many_tokens_and_not_as_many_requests",
            f"{OVERLOAD}::test_a_tenant_with_a_hundred_requests_does_not_hold_up_one_with_one",
        ),
    ),
    Mutant(
        "a full queue makes room for who is more urgent",
        "",
        QUEUE,
        "            self._displace_for(waiter)\n",
        "            raise self._full()\n",
        (f"{QUEUE_TESTS}::test_a_full_queue_refuses_who_is_no_more_urgent_and_makes_room_for_who_is",),
    ),
    Mutant(
        "what would miss its SLO is refused before any work",
        "",
        "router/forecast.py",
        "if predicted_s is not None and predicted_s > limit_ms / 1000:",
        "if False:",
        (f"{PREDICTION}::test_under_overload_what_is_admitted_meets_its_slo_and_no_capacity_is_wasted",),
    ),
    Mutant(
        "what is ahead in the queue counts",
        "",
        "router/prediction.py",
        "num_tokens_before / rate",
        "0.0",
        (f"{PREDICTION}::test_times_are_predicted_from_what_is_ahead_the_best_worker_and_the_queues_late_waits",),
    ),
    Mutant(
        "what is every tenant's is for admins alone",
        "",
        "router/grpc_service.py",
        "        require_admin()\n",
        "",
        (f"{GRPC_LIMITS}::test_who_may_not_audit_sees_nothing_of_other_tenants",),
    ),
    Mutant(
        "a message that is too large is refused over gRPC",
        "",
        "router/server.py",
        "self._network.server(interceptors, self._config.max_body_bytes, for_clients=True)",
        "self._network.server(interceptors, for_clients=True)",
        (f"{GRPC_LIMITS}::test_a_job_that_is_larger_than_a_body_may_be_is_refused_with_the_limit_and_the_mend",),
    ),
    Mutant(
        "a body that does not come is not waited for",
        "",
        EDGE,
        "async with asyncio.timeout_at(self._deadline_s):",
        "async with asyncio.timeout_at(None):",
        (f"{BAD}::test_a_body_that_is_too_large_or_does_not_come_is_refused_and_its_connection_closed",),
    ),
    Mutant(
        "a head that does not come is not waited for",
        "",
        "router/http/patience.py",
        "self.loop.call_later(self._timeout_s, self.transport.close)",
        "self.loop.call_later(1e6, self.transport.close)",
        (f"{BAD}::test_a_head_that_does_not_come_is_not_waited_for",),
    ),
    Mutant(
        "a client that reads nothing is not waited for",
        "",
        "router/http/patience.py",
        "self.loop.call_later(self._timeout_s, self._look_whether_read, left)",
        "self.loop.call_later(1e6, self._look_whether_read, left)",
        ("tests/router/test_slow_readers.py::test_a_client_that_reads_nothing_of_its_answer_is_gone_in_time",),
    ),
    Mutant(
        "long texts are tokenised beside the loop",
        "",
        "router/text.py",
        "await asyncio.to_thread(self._encode, text, prompt, add_special_tokens)",
        "self._encode(text, prompt, add_special_tokens)",
        (
            "tests/router/test_long_texts.py"
            "::test_the_loop_turns_while_a_long_text_is_tokenised_and_the_ids_are_the_same",
        ),
    ),
    Mutant(
        "a client that leaves in the middle of its body is no error of ours",
        "",
        EDGE,
        'if message["type"] == "http.disconnect":',
        "if False:",
        (f"{BAD}::test_a_thousand_bad_requests_cost_no_error_of_ours_no_leak_and_nobody_elses_answer",),
    ),
    Mutant(
        "an answer is not lost with the connection that closes behind it",
        "C10",
        "router/http/protocol.py",
        "if self._cycle.more_body or self._protocol._is_deaf:",
        "if False:",
        (f"{HTTP}::test_the_answer_to_a_body_that_nobody_reads_is_not_lost_with_the_connection",),
    ),
    Mutant(
        "what follows a request does not get into the middle of its answer",
        "C10",
        "router/http/protocol.py",
        "if answering is not None and answering.response_started and not answering.response_complete:",
        "if False:",
        (f"{HTTP}::test_what_comes_after_a_request_does_not_get_into_the_middle_of_its_answer",),
    ),
    Mutant(
        "a deadline within another try does not hide that no router answers",
        "",
        "cluster/routers.py",
        "if isinstance(error, DeadlineError) and self._unreached is not None and not was_accepted(exc):",
        "if False:",
        (
            "tests/cluster/test_client_resume.py"
            "::test_time_that_runs_out_within_another_try_does_not_hide_that_no_router_answers",
        ),
    ),
    Mutant(
        "a rest of an answer that nobody reads keeps no connection",
        "",
        "router/http/patience.py",
        "if self._read_timer is None and self.transport.get_write_buffer_size():",
        "if False:",
        ("tests/router/test_slow_readers.py::test_a_client_that_leaves_a_little_unread_is_gone_in_time_too",),
    ),
    Mutant(
        "trailers are bounded",
        "",
        "router/http/protocol.py",
        "not (self._in_head or self._in_tail)",
        "not self._in_head",
        (f"{HTTP}::test_trailers_are_kept_by_nobody_and_are_not_endless",),
    ),
)
