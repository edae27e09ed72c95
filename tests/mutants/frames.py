"""KV on its way: what a frame must be before anything counts as received, and where in the pool it goes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHM_TESTS = "tests/workers/kv_transfer/test_shm.py"
CHECKSUM_TESTS = "tests/workers/kv_transfer/test_checksum.py"

FRAMES = (
    Mutant(
        "without a checksum of its payload a frame is still bound to its place",
        "B8",
        "workers/kv_transfer/frame.py",
        "        self._hash.update(_fields(frame))",
        "        pass",
        (f"{CHECKSUM_TESTS}::test_without_a_checksum_of_payloads_a_frame_is_bound_to_its_place",),
    ),
    Mutant(
        "workers that disagree about checksums exchange no KV",
        "B6",
        "workers/services.py",
        "        require_same_checksum(self._worker.config.transfer.checksum, request.checksum)",
        "        pass",
        (f"{CHECKSUM_TESTS}::test_workers_that_disagree_about_checksums_exchange_no_kv",),
    ),
    Mutant(
        "KV that may leave the host's memory has a checksum",
        "B8",
        "workers/config.py",
        'if not checksum and transport != "shm":',
        "if False:",
        ("tests/cluster/test_transfer_config.py::test_kv_that_may_leave_the_host_has_a_checksum",),
    ),
    Mutant(
        "a frame that was refused does not count as received",
        "B8",
        "workers/decode.py",
        "hand_off.received.remove(header)",
        "pass",
        (f"{CHECKSUM_TESTS}::test_a_damaged_payload_is_refused_by_every_transport_and_the_true_one_arrives",),
    ),
    Mutant(
        "KV is copied by the block only where the blocks are whole",
        "B8",
        "workers/engine/kv_pool.py",
        "if np.array_equal(split_rows(blocks, size), index)",
        "if len(blocks) * size == len(index)",
        (
            "tests/workers/engine/test_kv_pool.py"
            "::test_what_is_read_is_what_lies_at_each_position_and_writing_puts_it_just_there",
        ),
    ),
    Mutant(
        "KV that the receiver copies out of the sender's pool is verified",
        "B8",
        "workers/kv_transfer/incoming.py",
        "            digest.require(claimed)\n        return",
        "            pass\n        return",
        (
            "tests/workers/kv_transfer/test_pulled_frames.py::test_kv_that_changed_after_it_was_hashed_is_refused",
            "tests/schedules/test_damage.py::test_a_bit_that_flips_in_a_payload_is_noticed_however_it_goes[0.6-True]",
        ),
    ),
    Mutant(
        "rows that a sender tells of lie in the memory that it shares",
        "B8",
        "workers/kv_transfer/kv_rows.py",
        "if outside or no_shape",
        "if no_shape",
        ("tests/workers/engine/test_kv_pool.py::test_rows_outside_the_memory_that_is_shared_are_refused",),
    ),
    Mutant(
        "without a checksum of payloads it is still certain where they lie",
        "B8",
        "workers/decode.py",
        "                digest.place(frame.payload)\n                digest.require(checksum)",
        "                pass",
        (
            f"{CHECKSUM_TESTS}::test_without_a_checksum_of_payloads_every_byte_of_a_header_still_counts",
            f"{CHECKSUM_TESTS}::test_without_a_checksum_of_payloads_a_damaged_place_is_refused",
        ),
    ),
    Mutant(
        "nothing that another container has in place of a segment is waited for",
        "D5",
        "workers/kv_transfer/segment.py",
        " | os.O_NONBLOCK | os.O_NOCTTY",
        "",
        (
            "tests/workers/kv_transfer/test_shm.py"
            "::test_what_another_process_has_in_place_of_a_segment_is_not_waited_for",
        ),
        hangs=True,
    ),
    Mutant(
        "a dead worker's pool is unmapped beside the loop",
        "D3",
        "workers/kv_transfer/segment.py",
        'threading.Thread(target=mappings.clear, name="unmap").start()',
        "mappings.clear()",
        (f"{SHM_TESTS}::test_the_memory_of_a_process_goes_when_it_dies_on_a_thread_of_its_own",),
    ),
    Mutant(
        "nobody keeps the pool of a worker that died",
        "A10",
        "workers/kv_transfer/segment.py",
        "    loop.add_reader(life, ended)",
        "    os.close(life)",
        (f"{SHM_TESTS}::test_the_memory_of_a_process_goes_when_it_dies_on_a_thread_of_its_own",),
    ),
    Mutant(
        "what was packed and never sent leaves no file open",
        "A10",
        "workers/kv_transfer/segment.py",
        "weakref.finalize(self, os.close, self._fd)",
        "lambda: os.close(self._fd)",
        ("tests/workers/kv_transfer/test_shm.py::test_what_was_packed_and_never_sent_leaves_nothing_open",),
    ),
    Mutant(
        "a group in which something failed is never used again",
        "D5",
        "workers/kv_transfer/sessions.py",
        "if self._session is None or self._session.ended:",
        "if self._session is None:",
        ("tests/workers/kv_transfer/test_nccl.py::test_after_a_missed_deadline_the_group_is_another",),
    ),
    Mutant(
        "an answer that is on its way is not cut off by whoever gives it up",
        "B6",
        "workers/rpc_stream.py",
        "                calls.pop(number, None)",
        "                pass",
        ("tests/workers/test_rpc_stream.py::test_giving_up_while_the_answer_is_on_its_way_costs_the_others_nothing",),
    ),
    Mutant(
        "a call that is late ends its stream for all that are on it",
        "D3",
        "workers/rpc_stream.py",
        "stream.leave()",
        "stream.give_up(number)",
        (
            "tests/workers/test_rpc_stream_troubles.py"
            "::test_a_call_that_is_late_fails_those_beside_it_at_once_so_that_they_are_sent_anew",
        ),
    ),
    Mutant(
        "a call that is given up here is given up there",
        "A1",
        "workers/rpc_stream.py",
        "            stream.give_up(number)\n",
        "",
        ("tests/workers/test_rpc_stream_troubles.py::test_a_call_that_is_cancelled_costs_those_beside_it_nothing",),
    ),
    Mutant(
        "what was packed goes with the error that kept it from being sent",
        "D3",
        "workers/kv_transfer/outgoing.py",
        "raise error.with_traceback(None) from None",
        "raise",
        ("tests/workers/test_failed_sends.py::test_what_was_packed_goes_with_the_error",),
    ),
    Mutant(
        "decode workers that no prefill worker's KV is for get no requests",
        "E2",
        "router/pairs.py",
        "if prefill.stats.fingerprint != decode.stats.fingerprint:",
        "if False:",
        ("tests/router/test_strangers.py::test_a_decode_worker_with_other_weights_gets_no_requests_and_is_named",),
    ),
    Mutant(
        "a closed channel's connection ends with its calls",
        "D1",
        "workers/rpc_stream.py",
        "        except asyncio.CancelledError:\n            pass  # The reader's end.",
        "        except ZeroDivisionError:\n            pass  # The reader's end.",
        (
            "tests/workers/test_rpc_stream_troubles.py"
            "::test_a_closed_channels_connection_ends_without_the_garbage_collectors_help",
        ),
    ),
)
