"""What the API means, and that a draw is a function of the request: as colocated, so disaggregated."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PREFILL = "workers/prefill.py"
ENGINE = "workers/engine/engine.py"
SCHEDULER = "workers/engine/scheduler.py"
PREFILL_TESTS = "tests/workers/test_prefill.py"
TOKEN_1_TESTS = "tests/router/test_token_1.py"

LEGS_TESTS = "tests/router/test_both_legs.py"
TOOLS_TESTS = "tests/router/test_openai_tools.py"
CHOICES_TESTS = "tests/router/test_choices.py"
DRAFTS_TESTS = "tests/workers/engine/test_drafts.py"

MEANING = (
    Mutant(
        "token 1 of every choice is handed over",
        "C3",
        "workers/prefill.py",
        "first_token_ids=running,",
        "first_token_ids=dict(list(running.items())[:1]),",
        (f"{CHOICES_TESTS}::test_c3_all_samples_of_one_request_share_one_hand_off_and_all_end",),
    ),
    Mutant(
        "a commit of other choices than were asked for ends the hand-off",
        "C3",
        "workers/decode.py",
        "self._verify_choices(message.first_token_ids, hand_off)",
        "pass",
        (
            "tests/workers/test_hand_off_choices.py"
            "::test_a_commit_of_choices_that_nobody_asked_for_or_of_none_ends_the_hand_off",
        ),
    ),
    Mutant(
        "every choice has the end of the prompt in a block of its own",
        "C3",
        "workers/engine/scheduler.py",
        "for r in starting if r.copy_source is not None",
        "for r in starting if False",
        ("tests/workers/engine/test_choices.py::test_every_choice_is_answered_as_if_it_were_alone",),
    ),
    Mutant(
        "a draft is kept only when it is what is sampled",
        "-",
        "workers/engine/engine.py",
        "drafts[count - 1] == token.token_id",
        "drafts",
        (f"{DRAFTS_TESTS}::test_answers_are_the_same_in_fewer_steps",),
    ),
    Mutant(
        "the KV of a wrong draft does not count",
        "-",
        "workers/engine/engine.py",
        "len(scheduled.token_ids) - len(drafts) + num_right",
        "len(scheduled.token_ids)",
        (f"{DRAFTS_TESTS}::test_answers_are_the_same_in_fewer_steps",),
    ),
    Mutant(
        "drafts take only what the prompts leave of a step",
        "-",
        "workers/engine/scheduler.py",
        "budget - sum(shares)",
        "budget",
        (f"{DRAFTS_TESTS}::test_answers_are_the_same_in_fewer_steps",),
    ),
    Mutant(
        "decode's first message is new, however many tokens it holds",
        "C6",
        "router/router.py",
        "                await outputs.arrival()\n\n",
        "                await outputs.next()\n\n",
        (f"{LEGS_TESTS}::test_several_tokens_in_decodes_first_message_are_all_new",),
    ),
    Mutant(
        "prefill is asked with the client's own limits",
        "C7",
        "router/worker_handle.py",
        "message = worker_pb2.PrefillRequest(request=request_to_pb(request), grant=grant)",
        "message = worker_pb2.PrefillRequest(request=request_to_pb(request), grant=grant); "
        "message.request.params.max_tokens = 1",
        (f"{LEGS_TESTS}::test_a_stream_and_min_tokens_are_no_business_of_prefills_alone",),
    ),
    Mutant(
        "a prompt is tokenised once",
        "C11",
        "router/text.py",
        "token_ids = self.token_ids(prompt) if token_ids is None else token_ids",
        "token_ids = self.token_ids(prompt)",
        (f"{LEGS_TESTS}::test_a_prompt_is_tokenised_once_and_each_token_sampled_once",),
    ),
    Mutant(
        "token 1 comes to decode with the hand-off, which does not sample it again",
        "C11",
        ENGINE,
        "            request.output_token_ids.append(first_token_ids[request.choice])",
        "            request.num_computed_tokens -= 1",
        (f"{LEGS_TESTS}::test_a_prompt_is_tokenised_once_and_each_token_sampled_once",),
    ),
    Mutant(
        "an answer that must be calls is held to their schema",
        "-",
        "router/openai/chat.py",
        "return replace(params, grammar=grammar) if grammar else params",
        "return params",
        (f"{TOOLS_TESTS}::test_an_answer_that_must_be_calls_is_held_to_their_schema",),
    ),
    Mutant(
        "references within a function's schema follow it to its place",
        "-",
        "router/openai/tools.py",
        '{"$ref": place + ref[1:]}',
        '{"$ref": ref}',
        (f"{TOOLS_TESTS}::test_an_answer_that_must_be_calls_is_held_to_their_schema",),
    ),
    Mutant(
        "an answer that token 1 ends is not handed over",
        "C1",
        PREFILL,
        " for output in outputs if output.finish_reason is None}",
        " for output in outputs}",
        (
            f"{TOKEN_1_TESTS}::test_what_ends_an_answer_ends_it_at_token_1_too[1P1D-length]",
            f"{PREFILL_TESTS}::test_an_answer_that_token_1_ends_goes_no_further",
        ),
    ),
    Mutant(
        "EOS, stop tokens and the length limit are applied to token 1",
        "C2",
        ENGINE,
        "return finish_reason_of(",
        "return None if request.num_output_tokens == 1 else finish_reason_of(",
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
        "workers/request.py",
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
