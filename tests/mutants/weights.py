"""Weights in fewer bits: a row depends on no other, and KV made with one kind is never taken for that of another."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

QUANTISED = "workers/layers/quantised.py"
LINEAR_TESTS = "tests/workers/layers/test_quantised_linear.py"
UNEQUAL_TESTS = "tests/workers/test_unequal_weights.py"
ROLE_TESTS = "tests/router/test_unequal_roles.py"
MODEL_TESTS = "tests/router/test_unequal_models.py"
CHECK_TESTS = "tests/cluster/test_caveats.py"
SHARED, SHARED_TESTS = "workers/models/shared_weights.py", "tests/workers/models/test_shared_weights.py"
CONFIG_TESTS = "tests/cluster/test_quantization_config.py"

WEIGHTS = (
    Mutant(
        "each row of activations has a scale of its own",
        "B11",
        QUANTISED,
        "scale = x.abs().amax(-1, keepdim=True).float() / _INT8_MAX",
        "scale = x.abs().amax().expand(len(x), 1).float() / _INT8_MAX",
        (f"{LINEAR_TESTS}::test_a_row_is_the_same_alone_and_beside_an_outlier[torch-dtype0-int8_dynamic]",),
    ),
    Mutant(
        "activations are rotated before they lose bits",
        "B11",
        "workers/layers/quantised_linear.py",
        "_MAX_ROTATED = 64",
        "_MAX_ROTATED = 1",
        (f"{LINEAR_TESTS}::test_one_great_activation_leaves_the_others_their_bits",),
    ),
    Mutant(
        "what prompts are computed with is in the fingerprint",
        "B10",
        "workers/engine/model_runner.py",
        "weights.quantisation, quantization, kernels)",
        "weights.quantisation, kernels)",
        (
            f"{UNEQUAL_TESTS}::test_each_quantization_has_a_fingerprint_of_its_own",
            f"{UNEQUAL_TESTS}::test_decode_takes_kv_of_those_weights_only_that_it_was_told_of",
        ),
    ),
    Mutant(
        "decode shares no KV that it made with other weights than prefill's",
        "B10",
        "workers/engine/prefix_cache.py",
        "min(request.num_computed_tokens, self.num_shareable(request))",
        "request.num_computed_tokens",
        (f"{UNEQUAL_TESTS}::test_what_decode_computed_itself_is_no_prefix_of_a_prompt",),
    ),
    Mutant(
        "an answer that goes on takes no KV that a later prompt with its tokens has",
        "B10",
        "workers/engine/scheduler.py",
        "self.prefix_cache.find(request, self.prefix_cache.num_shareable(request))",
        "self.prefix_cache.find(request, request.num_tokens)",
        (f"{ROLE_TESTS}::test_a_later_prompt_that_holds_its_answer_lends_it_no_kv",),
    ),
    Mutant(
        "generated positions keep decode's weights when the stream goes on elsewhere",
        "B12",
        "workers/engine/prefix_cache.py",
        "return request.num_tokens if self.computes_prompts else request.num_prompt_tokens",
        "return request.num_tokens",
        (
            f"{ROLE_TESTS}::test_a_stream_that_loses_its_decode_worker_goes_on_as_if_nothing_had_been[17-greedy]",
            f"{MODEL_TESTS}::test_the_answer_is_that_of_ps_weights_on_the_prompt_and_ds_on_the_rest_whoever_dies[25]",
        ),
    ),
    Mutant(
        "token 1 that prefill samples again ends nothing",
        "B12",
        "workers/prefill.py",
        "    request.params = SamplingParams(temperature=0.0, ignore_eos=True)\n",
        "",
        (f"{ROLE_TESTS}::test_a_client_that_brings_tokens_gets_the_rest_whatever_token_1_would_be_now[others]",),
    ),
    Mutant(
        "decode computes no prompt that lost its KV, or never had any",
        "B12",
        "workers/engine/scheduler.py",
        "if not self.prefix_cache.computes_prompts:",
        "if False:",
        (f"{ROLE_TESTS}::test_decode_refuses_a_prompt_that_comes_without_kv",),
    ),
    Mutant(
        "who gives way is given back, not kept waiting",
        "B12",
        "workers/engine/engine.py",
        "for request in self.scheduler.waiting if not request.block_table]\n        for",
        "for request in list[Request]()]\n        for",
        (f"{ROLE_TESTS}::test_decode_refuses_a_prompt_that_comes_without_kv",),
    ),
    Mutant(
        "decode with other weights computes no prompt",
        "B10",
        "router/admission.py",
        "if decode.stats.quantization != prefill.stats.quantization:",
        "if False:",
        (
            "tests/router/test_conditional_disaggregation.py"
            "::test_a_decode_worker_with_other_weights_computes_no_prompt_however_little_is_missing",
        ),
    ),
    Mutant(
        "copies of answers are not kept as prompts of other weights",
        "B10",
        "cluster/config.py",
        'self.transfer.resume == "replicate" and (unequal := self.unequal_roles)',
        '(unequal := "")',
        (f"{CONFIG_TESTS}::test_what_cannot_be_is_refused_by_its_key",),
    ),
    Mutant(
        "where streams are not exact is said",
        "B12",
        "cluster/caveats.py",
        "if config.unequal_roles:",
        "if False:",
        (
            f"{CHECK_TESTS}::test_unequal_roles_are_told_where_they_are_not_exact",
            f"{CHECK_TESTS}::test_up_tells_the_same",
        ),
    ),
    Mutant(
        "weights that a checkpoint does not have are refused",
        "E2",
        "workers/models/stored.py",
        'if quantization == "native" and',
        "if False and",
        (f"{CHECK_TESTS}::test_weights_that_cannot_be_kept_so_are_refused_by_the_command_and_by_a_worker[native]",),
    ),
    Mutant(
        "quantised weights are not cut into ranks",
        "E2",
        "workers/config.py",
        '            raise ValueError(\n                f"quantization: {self.quantization} cannot be cut',
        '            str(\n                f"quantization: {self.quantization} cannot be cut',
        (f"{CONFIG_TESTS}::test_what_cannot_be_is_refused_by_its_key",),
    ),
    Mutant(
        "weights of another checkpoint are not taken for this one's",
        "E2",
        "workers/engine/model_runner.py",
        "return found.st_size, found.st_mtime_ns",
        "return 0, 0",
        (f"{SHARED_TESTS}::test_a_checkpoint_that_changed_is_built_anew",),
    ),
    Mutant(
        "what is not the weights that were asked for is passed over",
        "D5",
        SHARED,
        "about.st_uid == os.getuid() and not about.st_nlink and os.pread",
        "os.pread",
        (f"{SHARED_TESTS}::test_a_file_of_the_right_beginning_is_no_shared_memory",),
    ),
    Mutant(
        "weights are unpickled from nobody else's folder",
        "B10",
        SHARED,
        " or found.st_mode & 0o077:",
        ":",
        (f"{SHARED_TESTS}::test_a_folder_that_others_may_write_to_is_not_read",),
    ),
    Mutant(
        "memory of weights goes with the last that has them",
        "D3",
        SHARED,
        "    weakref.finalize(model, os.close, fd)\n",
        "",
        (f"{SHARED_TESTS}::test_another_key_is_another_model_and_memory_goes_with_the_last_that_has_it",),
    ),
)
