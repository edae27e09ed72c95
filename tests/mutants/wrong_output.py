"""Wrong output: found before the first token that depends on it, never an answer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DECODE = "workers/decode.py"
BLOCK_HASH = "workers/engine/block_hash.py"
FRAME = "workers/kv_transfer/frame.py"
PEERS = "workers/kv_transfer/peers.py"
ROUTER = "router/router.py"
QUARANTINE_TESTS = "tests/workers/test_quarantine.py"
REFUSED_COMMIT_TESTS = "tests/workers/test_refused_commits.py"
DECODE_TESTS = "tests/workers/test_decode.py"
FRAME_TESTS = "tests/workers/kv_transfer/test_frame.py"
PEERS_TESTS = "tests/workers/kv_transfer/test_peers.py"
CACHE_TESTS = "tests/workers/engine/test_prefix_cache.py"
ROUTER_TESTS = "tests/router/test_router.py"
PREFIX_LENGTH_TESTS = "tests/router/test_prefix_lengths.py"

WRONG_OUTPUT = (
    Mutant(
        "shared memory that a receiver may still read is not written again",
        "B1",
        "workers/kv_transfer/shm.py",
        "                segment.close()\n            raise",
        "                self._idle.append(segment)\n            raise",
        ("tests/workers/kv_transfer/test_shm.py::test_memory_that_the_receiver_may_still_read_is_never_written_again",),
    ),
    Mutant(
        "a segment is known by its token, not by its file descriptor",
        "B1",
        "workers/kv_transfer/segment.py",
        "if whole[:_TOKEN_BYTES] != token:",
        "if False:",
        (
            "tests/workers/kv_transfer/test_shm.py"
            "::test_a_descriptor_that_is_another_segment_now_is_not_taken_for_the_old_one",
        ),
    ),
    Mutant(
        "a commit counts frames and bytes and sees that the whole range came",
        "B8",
        DECODE,
        "if not complete or (",
        "if False and (",
        (
            "tests/workers/test_commit.py::test_kv_of_a_commit_that_is_refused_never_enters_the_prefix_cache",
            f"{REFUSED_COMMIT_TESTS}::test_a_commit_without_every_byte_is_refused_frees_the_blocks_and_tells_the_router",
        ),
    ),
    Mutant(
        "a commit waits for no frame that is still being written",
        "B8",
        DECODE,
        " and not hand_off.writing\n",
        "\n",
        ("tests/workers/test_commit.py::test_a_commit_that_counts_only_what_is_written_so_far_is_refused",),
    ),
    Mutant(
        "every frame's checksum is verified",
        "B8",
        FRAME,
        "if self.value != checksum:",
        "if False:",
        (
            f"{DECODE_TESTS}::test_a_damaged_frame_is_refused_whatever_byte_it_is_and_the_true_one_is_still_welcome",
            "tests/router/test_router_faults.py::test_a_damaged_frame_is_never_an_answer",
        ),
    ),
    Mutant(
        "a checksum is bound to its request",
        "B8",
        FRAME,
        "xxhash.xxh3_64(request_id.encode())",
        'xxhash.xxh3_64(b"")',
        (f"{FRAME_TESTS}::test_a_frame_of_another_request_is_found",),
    ),
    Mutant(
        "a frame outside its grant's range is refused",
        "B9",
        DECODE,
        "if not inside or",
        "if False and",
        (f"{DECODE_TESTS}::test_frames_that_belong_elsewhere_are_refused",),
    ),
    Mutant(
        "a frame that overlaps another is refused",
        "B8",
        DECODE,
        "if any(frame.overlaps(other)",
        "if any(False and frame.overlaps(other)",
        (f"{DECODE_TESTS}::test_a_frame_sent_twice_counts_once_and_one_that_overlaps_is_refused",),
    ),
    Mutant(
        "a grant is good for one incarnation",
        "B2",
        DECODE,
        "        if incarnation != self._incarnation:",
        "        if False:",
        (
            f"{DECODE_TESTS}::test_frames_that_belong_elsewhere_are_refused",
            f"{REFUSED_COMMIT_TESTS}::test_a_commit_for_another_incarnation_is_refused_and_harms_nothing",
        ),
    ),
    Mutant(
        "layouts are compared before any KV moves",
        "B6",
        PEERS,
        "self._layout.require_convertible(KVLayout.from_proto(answer.layout))",
        "KVLayout.from_proto(answer.layout)",
        (f"{PEERS_TESTS}::test_another_layout_is_refused_by_the_asking_side_too",),
    ),
    Mutant(
        "block hashes depend on the salt",
        "B10",
        BLOCK_HASH,
        "\\0{request.cache_salt}",
        "",
        (
            f"{CACHE_TESTS}::test_another_salt_or_model_shares_no_block",
            f"{CACHE_TESTS}::test_a_request_finds_what_one_of_its_salt_has_published_and_no_other_does",
            "tests/router/test_prefix_caching.py::test_salts_keep_equal_prompts_apart",
        ),
    ),
    Mutant(
        "block hashes depend on the model",
        "B10",
        BLOCK_HASH,
        'f"{self.fingerprint}',
        'f"',
        (f"{CACHE_TESTS}::test_another_salt_or_model_shares_no_block",),
    ),
    Mutant(
        "block hashes depend on all tokens before",
        "B10",
        BLOCK_HASH,
        "xxhash.xxh3_128_digest(parent + unit)",
        "xxhash.xxh3_128_digest(unit)",
        (f"{CACHE_TESTS}::test_equal_tokens_in_another_place_are_another_block",),
    ),
    Mutant(
        "a token comes to the client once",
        "C6",
        "router/call.py",
        "seen = have - output.index",
        "seen = 0",
        ("tests/router/test_router_faults.py::test_outputs_sent_twice_reach_the_client_once",),
    ),
    Mutant(
        "a token that is missing is asked for again",
        "C6",
        "router/call.py",
        "if output.index > have:",
        "if False:",
        ("tests/router/test_router_faults.py::test_outputs_that_get_lost_are_missed_and_asked_for_again",),
    ),
    Mutant(
        "a write whose grant ended meanwhile is no success",
        "B2",
        DECODE,
        "if frame.grant_id not in self._hand_offs:",
        "if False:",
        (
            f"{QUARANTINE_TESTS}::test_blocks_under_a_write_are_quarantined_until_it_is_over_and_its_late_bytes_harm_nobody",
        ),
    ),
    Mutant(
        "a commit of part of the prompt is refused though its sums are right",
        "B7",
        DECODE,
        "area == (grant.end - grant.start) * self._layout.num_layers and",
        "area is not None and",
        (
            "tests/workers/test_incomplete_commits.py"
            "::test_it_is_refused_though_it_counts_what_came_and_the_blocks_are_free",
        ),
    ),
    Mutant(
        "prefill commits only what it has sent whole",
        "B7",
        "workers/prefill.py",
        "            await self._send_all(shipment)\n            reason",
        "            reason",
        ("tests/workers/test_prefill.py::test_a_handed_over_request_is_answered_as_without_a_cache",),
    ),
    Mutant(
        "prefill sends from where decode's prefix ends",
        "B9",
        "workers/prefill.py",
        "sent = shipment.grant.start",
        "sent = 0",
        (f"{PREFIX_LENGTH_TESTS}::test_the_answer_is_that_of_a_model_without_a_cache[0-4-sizes0]",),
    ),
    Mutant(
        "decode writes a token's KV where its position says",
        "B9",
        DECODE,
        "slots_of(request.block_table, frame.token_start, frame.token_end, self._layout.block_size)",
        "slots_of(request.block_table, 0, frame.token_end - frame.token_start, self._layout.block_size)",
        (f"{PREFIX_LENGTH_TESTS}::test_the_answer_is_that_of_a_model_without_a_cache[8-13-sizes0]",),
    ),
)
