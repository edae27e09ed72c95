"""Defences against what breaks such systems in the field, and the tests that go red without them.

Each row switches one defence off by replacing one piece of source. `scenario` is a kind of fault that users of such
servers have reported, as A3: A is for aborts and leaks, B for wrong output, C for what the API means, D for deaths and
pressure. Snippets are short, so that changes beside them leave the table as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

DECODE, PREFILL = "workers/decode.py", "workers/prefill.py"
ENGINE, SCHEDULER = "workers/engine/engine.py", "workers/engine/scheduler.py"
PREFIX_CACHE, FRAME = "workers/engine/prefix_cache.py", "workers/kv_transfer/frame.py"
PEERS, ROUTER = "workers/kv_transfer/peers.py", "router/router.py"

_DECODE_TESTS, _PREFILL_TESTS = "tests/workers/test_decode.py", "tests/workers/test_prefill.py"
_FRAME_TESTS, _PEERS_TESTS = "tests/workers/kv_transfer/test_frame.py", "tests/workers/kv_transfer/test_peers.py"
_ENGINE_TESTS, _ABORT_TESTS = "tests/workers/engine/test_engine.py", "tests/workers/engine/test_engine_aborts.py"
_PREEMPTION_TESTS = "tests/workers/engine/test_preemption.py"
_CACHE_TESTS, _SCHEDULER_TESTS = "tests/workers/engine/test_prefix_cache.py", "tests/workers/engine/test_scheduler.py"
_ROUTER_TESTS, _TOKEN_1_TESTS = "tests/router/test_router.py", "tests/router/test_token_1.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`snippet` is there exactly once in `file`; with `replacement` in its place each of `tests` must fail."""

    name: str
    scenario: str
    file: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]


ABORTS = (
    Mutant(
        "a request aborted in its last prefill step gets no output",
        "A3",
        ENGINE,
        "if self.requests.get(request.request_id) is not request:",
        "if False:",
        (
            f"{_PREFILL_TESTS}::test_an_abort_that_races_the_end_of_prefill_harms_nobody",
            f"{_ABORT_TESTS}::test_blocks_of_a_request_aborted_during_a_step_are_given_away_only_when_it_is_over",
        ),
    ),
    Mutant(
        "an abort of an unknown id is no error",
        "A4",
        ENGINE,
        "request = self.requests.get(request_id)",
        "request = self.requests[request_id]",
        ("tests/workers/test_worker.py::test_aborting_what_is_not_there_is_no_error",),
    ),
    Mutant(
        "a release of an unknown grant is no error",
        "A4",
        DECODE,
        "hand_off = self._hand_offs.get(message.grant_id)",
        "hand_off = self._hand_offs[message.grant_id]",
        (f"{_DECODE_TESTS}::test_an_end_of_something_unknown_is_no_error",),
    ),
    Mutant(
        "an abort before anything was allocated finds its request",
        "A4",
        SCHEDULER,
        "elif request.status is not RequestStatus.FINISHED:",
        "elif request.status is RequestStatus.PREEMPTED:",
        (f"{_ABORT_TESTS}::test_an_abort_between_steps_frees_everything_at_once[waiting]",),
    ),
    Mutant(
        "blocks of a request that ends during a step wait for the step's end",
        "B1",
        ENGINE,
        "if self._in_step.get(request.request_id) is request:",
        "if False:",
        (f"{_ABORT_TESTS}::test_blocks_of_a_request_aborted_during_a_step_are_given_away_only_when_it_is_over",),
    ),
    Mutant(
        "blocks under a write are quarantined until it is over",
        "B1",
        DECODE,
        "hand_off.request.hold_blocks = True",
        "pass",
        (
            f"{_DECODE_TESTS}::test_blocks_under_a_write_are_quarantined_until_it_is_over_and_its_late_bytes_harm_nobody",
        ),
    ),
    Mutant(
        "a lease ends by its own timer",
        "A11",
        DECODE,
        "call_later(self._config.lease_s",
        "call_later(1e6",
        (
            f"{_DECODE_TESTS}::test_a_lease_that_runs_out_frees_the_blocks_on_time_and_tells_the_router",
            "tests/workers/test_worker.py::test_grants_that_nobody_uses_run_out_by_themselves_in_a_full_pool",
        ),
    ),
    Mutant(
        "a hand-off that fails gives its grant back",
        "A10",
        PREFILL,
        'if reason != "committed":',
        "if False:",
        (f"{_PREFILL_TESTS}::test_a_cancelled_prefill_ends_the_request_and_gives_the_grant_back",),
    ),
    Mutant(
        "prefill keeps blocks that are still being sent",
        "B1",
        PREFILL,
        "request.hold_blocks = True",
        "pass",
        (f"{_PREFILL_TESTS}::test_what_is_held_for_sending_counts_as_in_use",),
    ),
    Mutant(
        "an attempt has an id of its own, which late aborts do not meet",
        "A8",
        ROUTER,
        'attempt_id = f"',
        'attempt_id = request.request_id or f"',
        (
            f"{_ROUTER_TESTS}::test_an_abort_of_an_earlier_attempt_that_comes_late_does_not_end_the_next",
            f"{_ROUTER_TESTS}::test_a_failure_of_an_earlier_attempt_that_is_heard_of_late_does_not_end_the_next",
        ),
    ),
)

WRONG_OUTPUT = (
    Mutant(
        "a commit counts frames and bytes and sees that the whole range came",
        "B8",
        DECODE,
        "if not complete or (",
        "if False and (",
        (
            f"{_DECODE_TESTS}::test_kv_of_a_commit_that_is_refused_never_enters_the_prefix_cache",
            f"{_DECODE_TESTS}::test_a_commit_without_every_byte_is_refused_frees_the_blocks_and_tells_the_router",
        ),
    ),
    Mutant(
        "a commit waits for no frame that is still being written",
        "B8",
        DECODE,
        " and not hand_off.num_writing\n",
        "\n",
        (f"{_DECODE_TESTS}::test_a_commit_that_counts_only_what_is_written_so_far_is_refused",),
    ),
    Mutant(
        "every frame's checksum is verified",
        "B8",
        FRAME,
        "if _checksum(request_id, _fields(frame), frame.payload) != checksum:",
        "if False:",
        (
            f"{_DECODE_TESTS}::test_a_damaged_frame_is_refused_whatever_byte_it_is_and_the_true_one_is_still_welcome",
            f"{_ROUTER_TESTS}::test_a_damaged_frame_is_never_an_answer",
        ),
    ),
    Mutant(
        "a checksum is bound to its request",
        "B8",
        FRAME,
        "xxhash.xxh3_64(request_id.encode())",
        'xxhash.xxh3_64(b"")',
        (f"{_FRAME_TESTS}::test_a_frame_of_another_request_is_found",),
    ),
    Mutant(
        "a frame outside its grant's range is refused",
        "B9",
        DECODE,
        "if not inside or",
        "if False and",
        (f"{_DECODE_TESTS}::test_frames_that_belong_elsewhere_are_refused",),
    ),
    Mutant(
        "a frame that overlaps another is refused",
        "B8",
        DECODE,
        "if any(frame.overlaps(other)",
        "if any(False and frame.overlaps(other)",
        (f"{_DECODE_TESTS}::test_a_frame_sent_twice_counts_once_and_one_that_overlaps_is_refused",),
    ),
    Mutant(
        "a grant is good for one incarnation",
        "B2",
        DECODE,
        "        if incarnation != self._incarnation:",
        "        if False:",
        (
            f"{_DECODE_TESTS}::test_frames_that_belong_elsewhere_are_refused",
            f"{_DECODE_TESTS}::test_a_commit_for_another_incarnation_is_refused_and_harms_nothing",
        ),
    ),
    Mutant(
        "layouts are compared before any KV moves",
        "B6",
        PEERS,
        "self._layout.require_same(KVLayout.from_proto(answer.layout))",
        "KVLayout.from_proto(answer.layout)",
        (f"{_PEERS_TESTS}::test_another_layout_is_refused_by_the_asking_side_too",),
    ),
    Mutant(
        "block hashes depend on the salt",
        "B10",
        PREFIX_CACHE,
        "\\0{request.cache_salt}",
        "",
        (
            f"{_CACHE_TESTS}::test_another_salt_or_model_shares_no_block",
            f"{_CACHE_TESTS}::test_a_request_finds_what_one_of_its_salt_has_published_and_no_other_does",
            "tests/router/test_prefix_caching.py::test_salts_keep_equal_prompts_apart",
        ),
    ),
    Mutant(
        "block hashes depend on the model",
        "B10",
        PREFIX_CACHE,
        'f"{self._fingerprint}',
        'f"',
        (f"{_CACHE_TESTS}::test_another_salt_or_model_shares_no_block",),
    ),
    Mutant(
        "block hashes depend on all tokens before",
        "B10",
        PREFIX_CACHE,
        "xxhash.xxh3_128_digest(parent + unit)",
        "xxhash.xxh3_128_digest(unit)",
        (f"{_CACHE_TESTS}::test_equal_tokens_in_another_place_are_another_block",),
    ),
    Mutant(
        "a token comes to the client once",
        "C6",
        ROUTER,
        "seen = have - output.index",
        "seen = 0",
        (f"{_ROUTER_TESTS}::test_outputs_sent_twice_reach_the_client_once",),
    ),
    Mutant(
        "a token that is missing is asked for again",
        "C6",
        ROUTER,
        "if output.index > have:",
        "if False:",
        (f"{_ROUTER_TESTS}::test_outputs_that_get_lost_are_missed_and_asked_for_again",),
    ),
)

# C3, n > 1 in one hand-off, belongs here.
MEANING = (
    Mutant(
        "an answer that token 1 ends is not handed over",
        "C1",
        PREFILL,
        "if output.finish_reason is not None:",
        "if False:",
        (
            f"{_TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-length]",
            f"{_PREFILL_TESTS}::test_an_answer_that_token_1_ends_goes_no_further",
        ),
    ),
    Mutant(
        "EOS, stop tokens and the length limit are applied to token 1",
        "C2",
        ENGINE,
        "reason = finish_reason_of(",
        "reason = None if not index else finish_reason_of(",
        (
            f"{_TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-EOS]",
            f"{_TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-stop token]",
            f"{_TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-length]",
        ),
    ),
    Mutant(
        "stop strings are looked for from token 1 on",
        "C2",
        "router/answer.py",
        "if options.stops else None",
        "if options.stops and self._detokenizer is None else None",
        (f"{_TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-stop string]",),
    ),
    Mutant(
        "token 1 is in usage",
        "C8",
        "router/answer.py",
        "self.num_tokens + len(token_ids)",
        "self.num_tokens + (len(token_ids) if output.index else 0)",
        (f"{_TOKEN_1_TESTS}::test_usage_counts_token_1_and_exactly_the_prompt_tokens_that_were_not_computed",),
    ),
    Mutant(
        "prompt logprobs are computed though the prompt's KV is known",
        "C4",
        SCHEDULER,
        "usable = 0 if request.wants_prompt_logprobs else",
        "usable =",
        ("tests/workers/engine/test_sampling_params.py::test_a_cached_prefix_hides_no_prompt_logprobs",),
    ),
    Mutant(
        "cached_tokens are told with token 1",
        "C8",
        ENGINE,
        "num_cached_tokens=request.num_cached_tokens or 0",
        "num_cached_tokens=0",
        (f"{_TOKEN_1_TESTS}::test_usage_counts_token_1_and_exactly_the_prompt_tokens_that_were_not_computed",),
    ),
)

PRESSURE = (
    Mutant(
        "a handed-over request that is preempted waits for a step, not for KV",
        "D7",
        SCHEDULER,
        "self.waiting.appendleft(victim)",
        "self.waiting_for_kv[victim.request_id] = victim",
        (f"{_DECODE_TESTS}::test_a_handed_over_request_that_is_preempted_is_computed_here_and_finishes",),
    ),
    Mutant(
        "a preempted request computes its KV again",
        "D7",
        SCHEDULER,
        "victim.num_computed_tokens = ",
        "",
        (f"{_SCHEDULER_TESTS}::test_preemption_takes_the_latest_arrival_and_starts_it_again_first",),
    ),
    Mutant(
        "preemption takes the latest arrival",
        "D8",
        SCHEDULER,
        "key=lambda r: r.arrival",
        "key=lambda r: -r.arrival",
        (
            f"{_PREEMPTION_TESTS}::test_nobody_gives_way_to_a_later_arrival_and_a_cascade_ends",
            f"{_ENGINE_TESTS}::test_preemption_changes_no_answer_and_takes_the_latest_arrival",
        ),
    ),
    Mutant(
        "a newcomer leaves room for the growth of what runs",
        "D8",
        SCHEDULER,
        "return len(self.running)",
        "return 0",
        (f"{_PREEMPTION_TESTS}::test_a_newcomer_leaves_the_block_that_each_running_request_needs_next",),
    ),
    Mutant(
        "a request whose KV is being sent is not preempted",
        "D8",
        SCHEDULER,
        "(r for r in self.running if not r.hold_blocks)",
        "self.running",
        (f"{_SCHEDULER_TESTS}::test_a_request_whose_kv_is_being_read_is_not_preempted",),
    ),
    Mutant(
        "no grant takes the room that a preempted request waits for",
        "D10",
        SCHEDULER,
        "if any(not r.block_table for r in self.waiting):",
        "if False:",
        (f"{_SCHEDULER_TESTS}::test_room_is_not_promised_while_a_preempted_request_waits_for_it",),
    ),
    Mutant(
        "no more frames are in flight than the receiver gave credits for",
        "D5",
        PREFILL,
        "async with shipment.peer.window:",
        "if True:",
        (f"{_PREFILL_TESTS}::test_no_more_frames_are_in_flight_than_credits_were_given",),
    ),
    Mutant(
        "a long prefill renews its lease",
        "D9",
        PREFILL,
        "while self._shipments:",
        "while False:",
        (f"{_PREFILL_TESTS}::test_renewal_keeps_a_prefill_alive_that_takes_many_leases",),
    ),
    Mutant(
        "a call to a peer has a deadline",
        "D3",
        PEERS,
        "self._stub.Commit(message, timeout=self._timeout_s)",
        "self._stub.Commit(message)",
        (f"{_PREFILL_TESTS}::test_a_message_that_gets_lost_ends_the_hand_off_within_its_deadline",),
    ),
    Mutant(
        "a worker replaced at the same address is another peer",
        "D1",
        PEERS,
        "if peer is None or peer.incarnation != grant.incarnation:",
        "if peer is None:",
        (f"{_PEERS_TESTS}::test_a_replaced_worker_is_a_new_peer_and_its_old_grants_are_refused",),
    ),
)

SAMPLING = (
    Mutant(
        "a draw depends on the request's seed",
        "",
        "workers/layers/sampler.py",
        "one.params.seed or 0",
        "0",
        ("tests/workers/engine/test_seeded_sampling.py::test_first_tokens_of_many_seeds_pass_chi_square",),
    ),
    Mutant(
        "a draw depends on the token's position",
        "",
        "workers/layers/sampler.py",
        ", one.position)",
        ", 0)",
        ("tests/workers/engine/test_seeded_sampling.py::test_alone_it_is_what_transformers_logits_and_the_draw_say",),
    ),
)

MUTANTS = (*ABORTS, *WRONG_OUTPUT, *MEANING, *PRESSURE, *SAMPLING)
