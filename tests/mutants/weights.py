"""Weights in fewer bits: a row depends on no other, and KV made with one kind is never taken for that of another."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

QUANTISED = "workers/layers/quantised.py"
LINEAR_TESTS = "tests/workers/layers/test_quantised_linear.py"
UNEQUAL_TESTS = "tests/workers/test_unequal_weights.py"
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
        "(received or self._shares_computed)",
        "True",
        (f"{UNEQUAL_TESTS}::test_what_decode_computed_itself_is_no_prefix_of_a_prompt",),
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
        "quantised weights are not cut into ranks",
        "E2",
        "workers/config.py",
        '            raise ValueError(\n                f"quantization: {self.quantization} cannot be cut',
        '            str(\n                f"quantization: {self.quantization} cannot be cut',
        (f"{CONFIG_TESTS}::test_what_cannot_be_is_refused_by_its_key",),
    ),
)
