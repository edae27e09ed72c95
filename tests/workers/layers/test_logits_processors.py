"""Every sampling parameter, alone and in random combinations, against transformers' processors and plain counting."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.workers.layers.rows import sample
from tests.workers.layers.test_sampler import random_logits, require_chi_square
from workers.random import uniform
from workers.request import SamplingParams, TokensSoFar

VOCAB = 64
EOS = (2, 5)


def expected_logits(logits: torch.Tensor, params: SamplingParams, tokens: TokensSoFar) -> torch.Tensor:
    """What is left of one row [vocab_size], -inf for what cannot be chosen, in double precision."""
    row = logits.double().clone()
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    scores = row.unsqueeze(0)
    ids = torch.tensor([[*tokens.prompt_token_ids, *tokens.output_token_ids]])
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token_id, count in Counter(tokens.output_token_ids).items():
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * count
    stops = sorted({*EOS, *params.stop_token_ids})
    processors: list[LogitsProcessor] = [
        MinNewTokensLengthLogitsProcessor(len(tokens.prompt_token_ids), params.min_tokens, stops)
    ]
    if not params.greedy:
        processors.append(TemperatureLogitsWarper(params.temperature))
        processors += [MinPLogitsWarper(params.min_p)] if params.min_p else []
        processors += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        processors += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def require_expected(
    logits: torch.Tensor, params: list[SamplingParams], tokens: list[TokensSoFar], positions: list[int]
) -> None:
    """The whole batch in one call; each row is judged by itself."""
    # As the scheduler does it: only rows that depend on them bring their tokens.
    known = [
        t if p.penalised or len(t.output_token_ids) < p.min_tokens else None
        for p, t in zip(params, tokens, strict=True)
    ]
    chosen = sample(logits, params, positions, known, frozenset(EOS))
    for row, (token, p, t, at) in enumerate(zip(chosen, params, tokens, positions, strict=True)):
        left = expected_logits(logits[row], p, t)
        if p.greedy:
            assert token == int(left.argmax()), (p, t)
            continue
        ends = left.softmax(dim=-1).cumsum(dim=-1).numpy()
        draw = uniform(p.seed or 0, 0, at)
        start = ends[token - 1] if token else 0.0
        assert math.isfinite(left[token]), (p, t, token)
        assert start - 1e-5 <= draw <= ends[token] + 1e-5, (p, t, token, int(np.searchsorted(ends, draw)))


def random_tokens(rng: random.Random) -> TokensSoFar:
    few = rng.sample(range(VOCAB), 12)
    return TokensSoFar(rng.choices(few, k=rng.randint(1, 30)), tuple(rng.choices(few, k=rng.randint(0, 20))))


def random_params(rng: random.Random) -> SamplingParams:
    """Each parameter is at its default half of the time."""
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 1.0, 1.7],
        "top_k": [1, 5, 30],
        "top_p": [0.3, 0.8, 0.95],
        "min_p": [0.01, 0.2, 1.0],
        "repetition_penalty": [0.5, 1.1, 2.0],
        "presence_penalty": [-2.0, 0.5, 2.0],
        "frequency_penalty": [-1.0, 0.3, 2.0],
        "min_tokens": [5, 15, 25],
        "stop_token_ids": [(7,), (8, 9, 10)],
        "logit_bias": [((3, 100.0),), ((3, -100.0), (20, 2.5), (21, -1.0))],
    }
    return SamplingParams(
        seed=rng.getrandbits(64), **{name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.5}
    )


SINGLE = [
    {"min_p": 0.3},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"logit_bias": ((4, 3.0), (9, -100.0))},
    {"min_tokens": 40},
    {"min_tokens": 40, "stop_token_ids": (1, 11)},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("changes", SINGLE, ids=str)
def test_each_parameter_alone(changes: dict[str, object], temperature: float) -> None:
    rng = random.Random(1)
    params = [SamplingParams(temperature=temperature, seed=at, **changes) for at in range(60)]  # type: ignore[arg-type]
    logits = random_logits(60, VOCAB)
    # Penalties matter where the likeliest tokens have been said before.
    tokens = [TokensSoFar(row.topk(9).indices[3:].tolist(), tuple(row.topk(3).indices.tolist() * 2)) for row in logits]
    require_expected(logits, params, tokens, [rng.randrange(1000) for _ in range(60)])


@pytest.mark.parametrize("seed", range(5))
def test_random_combinations_share_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    params = [random_params(rng) for _ in range(200)]
    tokens = [random_tokens(rng) for _ in params]
    require_expected(random_logits(200, VOCAB, seed), params, tokens, [rng.randrange(1000) for _ in params])


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    rng = random.Random(7)
    params = [random_params(rng) for _ in range(32)]
    tokens = [random_tokens(rng) for _ in params]
    logits = random_logits(32, 1000, seed=7)
    together = sample(logits, params, range(32), tokens, frozenset(EOS))
    order = rng.sample(range(32), 32)
    shuffled = sample(logits[order], [params[i] for i in order], order, [tokens[i] for i in order], frozenset(EOS))
    assert shuffled == [together[i] for i in order]
    for i in range(32):
        assert sample(logits[i : i + 1], [params[i]], [i], [tokens[i]], frozenset(EOS)) == [together[i]]


def test_frequencies_of_everything_at_once_pass_chi_square() -> None:
    params = SamplingParams(
        temperature=1.4,
        top_k=25,
        top_p=0.97,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias=((7, 1.5), (8, -3.0)),
        min_tokens=10,
    )
    logits, tokens = random_logits(1, VOCAB), TokensSoFar(range(0, 30, 2), (1, 1, 1, 4, 9))
    num_draws = 20_000
    drawn = sample(
        logits.expand(num_draws, VOCAB), [params] * num_draws, range(num_draws), [tokens] * num_draws, frozenset(EOS)
    )
    require_chi_square(drawn, expected_logits(logits[0], params, tokens).softmax(dim=-1).numpy())


def test_no_penalty_makes_a_row_without_numbers() -> None:
    logits = torch.tensor([[0.0, 3.0, -3.0, 1.0]])
    extremes = [1e-300, 1e-30, 1e30, 1e300]
    for penalty in extremes:
        for temperature in (0.0, 1e-5, 1.0):
            params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
            [token] = sample(logits, [params], [0], [TokensSoFar([0, 1, 2], ())])
            # Huge: 1 falls to 0, so that 3 is best; tiny: 1 rises above all.
            if temperature < 1:
                assert token == (3 if penalty > 1 else 1)
            assert 0 <= token < 4


def test_a_vocabulary_of_nothing_but_stops_still_gives_one() -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=(0, 1, 2))
        assert sample(torch.zeros(1, 3), [params], [0], [TokensSoFar([1], ())], {2})[0] in (0, 1, 2)


def test_the_given_logits_are_left_as_they_were() -> None:
    params = replace(SamplingParams(), logit_bias=((1, 5.0),), repetition_penalty=2.0)
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [params] * 2, [0, 1], [TokensSoFar([1, 2], (3,))] * 2)
    assert torch.equal(logits, before)
