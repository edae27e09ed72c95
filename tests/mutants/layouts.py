"""Two sides of different layouts: KV is converted, or refused before any of it moves."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RANKS = "workers/engine/tensor_parallel.py"
SHARD = "workers/models/shard.py"
RANK_TESTS = "tests/workers/test_tensor_parallel_hand_offs.py"
SHARD_TESTS = "tests/workers/models/test_shard.py"
CAST_TESTS = "tests/workers/test_kv_dtype_hand_offs.py"

LAYOUTS = (
    Mutant(
        "KV that ranks send has their heads in the model's order",
        "E1",
        RANKS,
        "whole[:, :, :, heads.start : heads.stop] =",
        "whole[:, :, :, : len(heads)] =",
        (f"{RANK_TESTS}::test_any_number_of_ranks_hands_over_to_any_other",),
    ),
    Mutant(
        "each rank gets its own heads of KV that comes",
        "E1",
        RANKS,
        "np.ascontiguousarray(whole[:, :, :, heads.start : heads.stop])",
        "np.ascontiguousarray(whole[:, :, :, : len(heads)])",
        (f"{RANK_TESTS}::test_any_number_of_ranks_hands_over_to_any_other",),
    ),
    Mutant(
        "a rank has the KV heads that its attention heads share",
        "E1",
        SHARD,
        "first = rank * total // size",
        "first = 0",
        (
            f"{SHARD_TESTS}::test_a_rank_has_the_kv_heads_that_its_attention_heads_share",
            f"{SHARD_TESTS}::test_ranks_give_the_logits_and_tokens_of_transformers[llama-4]",
        ),
    ),
    Mutant(
        "a write is over when every rank has its part",
        "E1",
        RANKS,
        "                rank.end_write()",
        "                pass",
        ("tests/workers/engine/test_tensor_parallel.py::test_kv_comes_back_as_it_went_and_a_wrong_size_harms_nobody",),
    ),
    Mutant(
        "heads that cannot be divided are refused before anything starts",
        "E2",
        SHARD,
        "if config.num_heads % size:",
        "if False:",
        (
            f"{SHARD_TESTS}::test_smollm2_can_be_divided_by_one_and_three_and_is_refused_otherwise_with_its_numbers",
            "tests/cluster/test_role_layouts.py"
            "::test_a_model_that_cannot_be_divided_is_refused_in_one_line_before_anything_starts",
        ),
    ),
    Mutant(
        "KV heads that can be neither divided nor shared evenly are refused",
        "E2",
        SHARD,
        "if config.num_kv_heads % size and size % config.num_kv_heads:",
        "if False:",
        (f"{SHARD_TESTS}::test_kv_heads_are_divided_or_shared_evenly_or_refused",),
    ),
    Mutant(
        "a receiver refuses a layout that cannot be converted",
        "E2",
        "workers/services.py",
        "self._worker.layout.require_convertible(",
        "(lambda layout: None)(",
        (
            "tests/workers/kv_transfer/test_layout_refusals.py"
            "::test_a_layout_that_cannot_be_converted_is_refused_at_connect_by_its_field",
        ),
    ),
    Mutant(
        "KV is cast to the receiver's dtype",
        "B6",
        "workers/kv_transfer/outgoing.py",
        "*layers, dtype=layout.dtype)",
        "*layers)",
        (
            f"{CAST_TESTS}::test_kv_is_cast_to_the_receivers_dtype[fp32-bf16]",
            # Of the same size: nothing but the answer can tell.
            f"{CAST_TESTS}::test_kv_is_cast_to_the_receivers_dtype[bf16-fp16]",
        ),
    ),
    Mutant(
        "a pool of another dtype is not read where it lies",
        "B6",
        "workers/kv_transfer/outgoing.py",
        "as_it_is = layout.dtype == self._layout.dtype",
        "as_it_is = True",
        (f"{CAST_TESTS}::test_a_pool_is_read_where_it_lies_only_if_nothing_is_to_be_cast[bf16-fp16]",),
    ),
    Mutant(
        "a frame has the bytes that its range takes here",
        "B6",
        "workers/decode.py",
        "if len(frame.payload) != frame.expected_bytes(self._layout):",
        "if False:",
        ("tests/workers/test_decode.py::test_frames_that_belong_elsewhere_are_refused",),
    ),
    Mutant(
        "a dtype that is not known here is refused",
        "B6",
        "workers/kv_transfer/layout.py",
        " and theirs in DTYPE_BYTES",
        "",
        ("tests/workers/kv_transfer/test_layout.py::test_a_dtype_that_nobody_here_knows_cannot_be_cast_to",),
    ),
    Mutant(
        "a worker that lost a rank ends",
        "E5",
        RANKS,
        "self._on_death(self._lost)",
        "pass",
        (
            "tests/workers/engine/test_tensor_parallel.py::test_a_rank_that_dies_ends_the_step_and_everything_after_it",
            "tests/workers/test_rank_death.py::test_a_worker_ends_when_one_of_its_ranks_is_killed",
        ),
    ),
)
