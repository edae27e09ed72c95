"""Copies of growing KV: right or not there, in nobody's way, and found by who goes on."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REPLICAS = "workers/replicas.py"
DECODE = "workers/decode.py"
ADMISSION = "router/admission.py"
COPY_TESTS = "tests/workers/test_replicas.py"
GRANT_TESTS = "tests/workers/test_replica_grants.py"
RESUME_TESTS = "tests/router/test_replicas.py"

COPIES = (
    Mutant(
        "blocks stay as they are while they are copied, whatever becomes of their request",
        "B1",
        REPLICAS,
        "self._engine.hold(copy)",
        "pass",
        (
            f"{COPY_TESTS}::test_a_copy_of_a_request_that_ends_meanwhile_holds_its_own_kv",
            f"{COPY_TESTS}::test_a_request_is_preempted_while_it_is_copied",
        ),
    ),
    Mutant(
        "a copy is known as a prefix only once it is whole",
        "B8",
        DECODE,
        "complete = area ==",
        "complete = hand_off.is_replica or area ==",
        (f"{GRANT_TESTS}::test_a_copy_that_is_not_whole_is_refused",),
    ),
    Mutant(
        "a copy keeps its salt",
        "B10",
        REPLICAS,
        "cache_salt=request.cache_salt,",
        "",
        (f"{COPY_TESTS}::test_salts_keep_copies_apart",),
    ),
    Mutant(
        "a copy is whole blocks",
        "B8",
        DECODE,
        "del request.prompt_token_ids[",
        "request.prompt_token_ids[",
        (f"{GRANT_TESTS}::test_a_copy_is_whole_blocks_and_once_committed_nobodys",),
    ),
    Mutant(
        "a hand-off is committed with tokens, a copy without",
        "B7",
        DECODE,
        "bool(choices) != hand_off.is_replica and ",
        "",
        (f"{GRANT_TESTS}::test_only_a_hand_off_is_committed_with_tokens",),
    ),
    Mutant(
        "a copy gives way to a hand-off",
        "D10",
        DECODE,
        "self._end(replica)",
        "pass",
        (f"{GRANT_TESTS}::test_a_copy_gives_way_to_a_hand_off",),
    ),
    Mutant(
        "copies do not count as hand-offs",
        "D10",
        DECODE,
        "len(self._hand_offs) - len(self._replicas)",
        "len(self._hand_offs)",
        (f"{GRANT_TESTS}::test_copies_do_not_count_as_hand_offs_and_have_a_bound_of_their_own",),
    ),
    Mutant(
        "a worker takes few copies at once",
        "D10",
        DECODE,
        "if len(self._replicas) >= self._config.max_num_replicas:",
        "if False:",
        (f"{GRANT_TESTS}::test_copies_do_not_count_as_hand_offs_and_have_a_bound_of_their_own",),
    ),
    Mutant(
        "the end of a copy is no news for a router",
        "D5",
        DECODE,
        "if not hand_off.is_replica:",
        "if True:",
        (f"{GRANT_TESTS}::test_a_copy_that_is_given_up_frees_its_blocks_by_its_lease_and_tells_no_router",),
    ),
    Mutant(
        "a refused copy waits before it is tried again",
        "D10",
        REPLICAS,
        "_now() + _RETRY_S",
        "0.0",
        (f"{COPY_TESTS}::test_a_peer_without_room_refuses_and_is_asked_again_later",),
    ),
    Mutant(
        "a worker begins few copies at once",
        "D10",
        REPLICAS,
        "due[: self._config.max_num_replicas - len(copying)]",
        "due",
        (f"{COPY_TESTS}::test_copies_are_few_at_once_and_everybody_gets_a_turn",),
    ),
    Mutant(
        "no copy holds blocks that a preemption is to free",
        "D8",
        REPLICAS,
        "if not self._engine.block_manager.can_allocate(len(running)):",
        "if False:",
        (f"{COPY_TESTS}::test_a_request_is_preempted_while_it_is_copied",),
    ),
    Mutant(
        "a long copy moves piece by piece",
        "D10",
        REPLICAS,
        "min(self._num_behind(request), max(1, _MAX_TOKENS // self._block_size))",
        "self._num_behind(request)",
        (f"{COPY_TESTS}::test_a_long_prompt_is_copied_piece_by_piece_and_again_so_when_the_peer_lost_it",),
    ),
    Mutant(
        "a copy that a peer has lost begins anew",
        "D1",
        REPLICAS,
        "replica.num_blocks, replica.not_before_s = 0, ",
        "replica.not_before_s = ",
        (f"{COPY_TESTS}::test_a_long_prompt_is_copied_piece_by_piece_and_again_so_when_the_peer_lost_it",),
    ),
    Mutant(
        "who still has a peer that was replaced hears a typed error",
        "D1",
        "workers/kv_transfer/peers.py",
        "except grpc.aio.UsageError:",
        "except ZeroDivisionError:",
        ("tests/workers/kv_transfer/test_peers.py::test_who_still_has_a_peer_that_was_replaced_is_told_so",),
    ),
    Mutant(
        "a stream goes on where its copy is",
        "D7",
        ADMISSION,
        "(worker.address != request.replica_address, worker.address in tried)",
        "worker.address in tried",
        (f"{RESUME_TESTS}::test_a_stream_goes_where_its_copy_is_though_another_has_less_to_do",),
    ),
    Mutant(
        "where its copy is, a stream goes on without a hand-off",
        "D7",
        ADMISSION,
        "if decode.address == request.replica_address:",
        "if False:",
        (f"{RESUME_TESTS}::test_what_is_computed_again_is_a_block_or_two_instead_of_prompt_and_answer",),
    ),
    Mutant(
        "a copy at a prefill worker is used by that one",
        "D7",
        ADMISSION,
        'self._ranked(role, request, tried, self._pool.candidates("decode"))',
        "self._ranking.of(role, request, [])",
        (f"{RESUME_TESTS}::test_with_no_decode_worker_left_the_prefill_worker_with_the_copy_decodes",),
    ),
)
