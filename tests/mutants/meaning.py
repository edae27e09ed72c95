"""What the API means, and that a draw is a function of the request: as colocated, so disaggregated."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREFILL = "workers/prefill.py"
ENGINE = "workers/engine/engine.py"
SCHEDULER = "workers/engine/scheduler.py"
PREFILL_TESTS = "tests/workers/test_prefill.py"
TOKEN_1_TESTS = "tests/router/test_token_1.py"

# C3, n > 1 in one hand-off, belongs here.
MEANING = (
    Mutant(
        "an answer that token 1 ends is not handed over",
        "C1",
        PREFILL,
        "if output.finish_reason is not None:",
        "if False:",
        (
            f"{TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-length]",
            f"{PREFILL_TESTS}::test_an_answer_that_token_1_ends_goes_no_further",
        ),
    ),
    Mutant(
        "EOS, stop tokens and the length limit are applied to token 1",
        "C2",
        ENGINE,
        "reason = finish_reason_of(",
        "reason = None if not index else finish_reason_of(",
        (
            f"{TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-EOS]",
            f"{TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-stop token]",
            f"{TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-length]",
        ),
    ),
    Mutant(
        "stop strings are looked for from token 1 on",
        "C2",
        "router/answer.py",
        "if options.stops else None",
        "if options.stops and self._detokenizer is None else None",
        (f"{TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-stop string]",),
    ),
    Mutant(
        "token 1 is in usage",
        "C8",
        "router/answer.py",
        "self.num_tokens + len(token_ids)",
        "self.num_tokens + (len(token_ids) if output.index else 0)",
        (f"{TOKEN_1_TESTS}::test_usage_counts_token_1_and_exactly_the_prompt_tokens_that_were_not_computed",),
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
        (f"{TOKEN_1_TESTS}::test_usage_counts_token_1_and_exactly_the_prompt_tokens_that_were_not_computed",),
    ),
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
