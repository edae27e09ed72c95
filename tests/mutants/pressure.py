"""Deaths, restarts and pools that are too small: the rest goes on unharmed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREFILL = "workers/prefill.py"
SCHEDULER = "workers/engine/scheduler.py"
PEERS = "workers/kv_transfer/peers.py"
DECODE = "workers/decode.py"
ROUTER = "router/router.py"
PREFILL_TESTS = "tests/workers/test_prefill.py"
PEERS_TESTS = "tests/workers/kv_transfer/test_peers.py"
ENGINE_TESTS = "tests/workers/engine/test_engine.py"
PREEMPTION_TESTS = "tests/workers/engine/test_preemption.py"
ONE_SIDE_TESTS = "tests/workers/test_one_side_ends.py"
DROPPED_TESTS = "tests/workers/kv_transfer/test_dropped_peers.py"
ROOM_TESTS = "tests/workers/test_grant_room.py"
SCHEDULER_TESTS = "tests/workers/engine/test_scheduler.py"

PRESSURE = (
    Mutant(
        "faults are not injected unless a flag allows them",
        "-",
        "cluster/config.py",
        "if config.faults and not allow_faults:",
        "if False:",
        ("tests/cluster/test_config.py::test_faults_are_refused_unless_a_flag_allows_them",),
    ),
    Mutant(
        "with no decode worker left a prefill worker decodes",
        "D1",
        "router/pool.py",
        'return True, "no decode worker answers: prefill workers decode"',
        "pass",
        ("tests/router/test_router.py::test_with_no_decode_worker_left_a_prefill_worker_decodes_until_one_is_back",),
    ),
    Mutant(
        "a handed-over request that is preempted waits for a step, not for KV",
        "D7",
        SCHEDULER,
        "self._wait_in_order(victim)",
        "self.waiting_for_kv[victim.request_id] = victim",
        ("tests/workers/test_commit.py::test_a_handed_over_request_that_is_preempted_is_computed_here_and_finishes",),
    ),
    Mutant(
        "a preempted request computes its KV again",
        "D7",
        SCHEDULER,
        "victim.num_computed_tokens = ",
        "",
        (f"{SCHEDULER_TESTS}::test_preemption_takes_the_latest_arrival_and_starts_it_again_first",),
    ),
    Mutant(
        "preemption takes the latest arrival",
        "D8",
        SCHEDULER,
        "key=lambda r: (r.arrival, r.choice)",
        "key=lambda r: (-r.arrival, r.choice)",
        (
            f"{PREEMPTION_TESTS}::test_nobody_gives_way_to_a_later_arrival_and_a_cascade_ends",
            f"{ENGINE_TESTS}::test_preemption_changes_no_answer_and_takes_the_latest_arrival",
        ),
    ),
    Mutant(
        "a newcomer leaves room for the growth of what runs",
        "D8",
        SCHEDULER,
        "return len(self.running)",
        "return 0",
        (f"{PREEMPTION_TESTS}::test_a_newcomer_leaves_the_block_that_each_running_request_needs_next",),
    ),
    Mutant(
        "a request whose KV is being sent is not preempted",
        "D8",
        SCHEDULER,
        "if r.block_table and not r.hold_blocks)",
        "if r.block_table)",
        (f"{SCHEDULER_TESTS}::test_a_request_whose_kv_is_being_read_is_not_preempted",),
    ),
    Mutant(
        "who waits for a seat with blocks gives them up before who came earlier",
        "D8",
        SCHEDULER,
        "(*self.running, *self.waiting)",
        "self.running",
        (f"{SCHEDULER_TESTS}::test_who_waits_for_a_seat_with_blocks_of_its_own_gives_way_to_who_came_before",),
    ),
    Mutant(
        "no grant takes the room that a preempted request waits for",
        "D10",
        SCHEDULER,
        "self._watermark() + self._num_blocks_awaited()",
        "self._watermark()",
        (f"{SCHEDULER_TESTS}::test_room_is_not_promised_that_a_preempted_request_waits_for",),
    ),
    Mutant(
        "who waits for a seat only keeps no hand-off from its room",
        "D10",
        SCHEDULER,
        "        blocks = self.block_manager\n        beyond_room",
        "        blocks = self.block_manager\n"
        "        if any(not r.block_table for r in self.waiting):\n"
        "            return False\n"
        "        beyond_room",
        (f"{SCHEDULER_TESTS}::test_seats_go_by_order_to_those_that_bring_their_kv_and_those_that_do_not",),
    ),
    Mutant(
        "hand-offs take no more of the pool than their room",
        "D10",
        SCHEDULER,
        "self._num_blocks_awaited(), beyond_room)",
        "self._num_blocks_awaited())",
        (f"{ROOM_TESTS}::test_running_requests_grow_into_all_that_is_not_hand_offs_room",),
    ),
    Mutant(
        "a known prefix that runs anyway takes none of hand-offs' room",
        "D10",
        "workers/engine/block_manager.py",
        "sum(self._ref_counts[block_id] == count for block_id, count in Counter(owned).items())",
        "len(set(owned))",
        (f"{ROOM_TESTS}::test_a_prefix_counts_once_and_only_while_nothing_else_needs_it",),
    ),
    Mutant(
        "no more frames are in flight than the receiver gave credits for",
        "D5",
        "workers/kv_transfer/outgoing.py",
        "async with outgoing.peer.window:",
        "if True:",
        (f"{PREFILL_TESTS}::test_no_more_frames_are_in_flight_than_credits_were_given",),
    ),
    Mutant(
        "a long prefill renews its lease",
        "D9",
        PREFILL,
        "while self._shipments:",
        "while False:",
        (
            "tests/workers/test_renewals.py::test_renewal_keeps_a_prefill_alive_that_takes_many_leases",
            f"{ONE_SIDE_TESTS}::test_prompts_that_wait_for_their_turn_for_many_leases_are_all_answered",
        ),
    ),
    Mutant(
        "a rank that never loads is given up",
        "D3",
        "workers/engine/rank_process.py",
        "self._steps.poll(timeout_s)",
        "self._steps.poll(None)",
        ("tests/workers/engine/test_tensor_parallel.py::test_a_rank_that_never_loads_is_given_up_in_bounded_time",),
    ),
    Mutant(
        "a call to a peer has a deadline",
        "D3",
        PEERS,
        "self._stub.Commit(message, timeout=self._timeout_s)",
        "self._stub.Commit(message)",
        (f"{PREFILL_TESTS}::test_a_message_that_gets_lost_ends_the_hand_off_within_its_deadline",),
    ),
    Mutant(
        "a worker replaced at the same address is another peer",
        "D1",
        PEERS,
        "if peer is None or peer.incarnation != incarnation:",
        "if peer is None:",
        (f"{PEERS_TESTS}::test_a_replaced_worker_is_a_new_peer_and_its_old_grants_are_refused",),
    ),
    Mutant(
        "decode's room is given back when prefill dies",
        "D3",
        ROUTER,
        "                self._abort(attempt_id, placement)",
        "                pass",
        (
            "tests/router/test_prefill_death.py"
            "::test_its_prompt_is_answered_by_who_is_there_and_decode_keeps_no_room_for_it",
        ),
    ),
    Mutant(
        "a prefill worker that dies before decode has answered ends the hand-off",
        "D3",
        ROUTER,
        "with placement.prefill.ends(outputs):",
        "with placement.decode.ends(outputs):",
        (
            "tests/router/test_prefill_death.py"
            "::test_its_prompt_is_answered_by_who_is_there_and_decode_keeps_no_room_for_it[2-Commit-0]",
        ),
    ),
    Mutant(
        "a handshake has a deadline",
        "D3",
        PEERS,
        ".Connect(message, timeout=timeout_s)",
        ".Connect(message)",
        (f"{PEERS_TESTS}::test_a_peer_that_does_not_answer_ends_the_wait_at_its_deadline",),
    ),
    Mutant(
        "decode frees its room when a hand-off fails on prefill",
        "D4",
        DECODE,
        '            self._fail(hand_off, FrameError(f"the hand-off was given up: {message.reason}"))',
        "            pass",
        (f"{ONE_SIDE_TESTS}::test_whatever_decode_refuses_leaves_no_block_on_either_side",),
    ),
    Mutant(
        "decode frees its room when a prompt ends on prefill",
        "D4",
        DECODE,
        "        else:\n            self._end(hand_off)",
        "",
        (f"{ONE_SIDE_TESTS}::test_a_prompt_that_fails_on_prefill_gives_decode_its_room_back_at_once",),
    ),
    Mutant(
        "a frame has a deadline",
        "D5",
        "workers/kv_transfer/grpc.py",
        "await call(self._put(packed, timeout=timeout_s))",
        "await call(self._put(packed))",
        (f"{ONE_SIDE_TESTS}::test_any_one_frame_that_gets_lost_ends_the_hand_off_within_its_deadline",),
    ),
    Mutant(
        "hand-offs in flight are bounded by their own setting",
        "D10",
        DECODE,
        "if num_grants >= self._config.max_num_grants:",
        "if num_grants + len(self._engine.requests) >= 2 * self._config.max_num_grants:",
        (f"{ONE_SIDE_TESTS}::test_as_many_hand_offs_are_in_flight_as_the_setting_says_whatever_else_runs",),
    ),
    Mutant(
        "what is said to a peer that was dropped is a typed error",
        "D1",
        PEERS,
        "except grpc.aio.UsageError:",
        "except ZeroDivisionError:",
        (
            f"{DROPPED_TESTS}::test_whatever_is_said_to_it_is_a_typed_error",
            f"{DROPPED_TESTS}::test_a_hand_off_that_was_waiting_for_it_ends_without_a_trace",
        ),
    ),
)
