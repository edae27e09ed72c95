"""Answers of the packaged model under grammars, through engines, alone, in batches and handed over."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch

from router.structured import grammar_of
from tests.factories import run_engine, tokens_of
from tests.prompts import tokenizer
from workers.config import EngineConfig, SchedulerConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import Scheduler
from workers.request import FinishReason, Request, SamplingParams

NAME = {"type": "string", "maxLength": 12}
AGE = {"type": "integer", "minimum": 0, "maximum": 130}


def thing(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = [
    thing(name=NAME, age=AGE),
    thing(
        colour={"enum": ["red", "green", "blue"]},
        sure={"type": "boolean"},
        note={"type": ["string", "null"], "maxLength": 8},
    ),
    thing(people={"type": "array", "items": thing(name=NAME, age=AGE), "maxItems": 2}),
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "minItems": 1, "maxItems": 4},
    thing(
        at=thing(city=NAME, zone={"enum": [1, 2, 3]}),
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    ),
]
preempt = Scheduler._preempt


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@cache
def runner() -> ModelRunner:
    return ModelRunner(EngineConfig(num_gpu_blocks_override=512, max_model_len=256, num_threads=1))


def request(request_id: str, kind: str = "", wish: Any = None, prompt: str = "A thing:", **params: Any) -> Request:
    grammar = grammar_of(kind, wish, kind) if kind else ""
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 200, "grammar": grammar}
    return Request(request_id, tokenizer().encode(prompt), SamplingParams(**defaults | params))


def answers(requests: Sequence[Request], **settings: Any) -> list[tuple[str, FinishReason | None]]:
    """Text and the reason of its end, in the requests' order."""
    scheduler = SchedulerConfig(**{"max_num_seqs": 32, "max_num_batched_tokens": 1024} | settings)

    async def run() -> list[tuple[str, FinishReason | None]]:
        executor = Executor(runner())
        engine = Engine(executor, EngineConfig(enable_prefix_caching=False), scheduler)
        for one in requests:
            engine.add(one)
        by_id = await run_engine(engine)
        outputs = [by_id[one.request_id] for one in requests]
        executor.close()
        return [(tokenizer().decode(tokens_of(one)), one[-1].finish_reason) for one in outputs]

    return asyncio.run(run())


def check_schemas(num_requests: int) -> None:
    """Each answer that ends is valid, and nearly all end."""
    schemas = [SCHEMAS[i % len(SCHEMAS)] for i in range(num_requests)]
    requests = [request(f"r{i}", "json", schema, f"Thing {i}:", seed=i) for i, schema in enumerate(schemas)]
    started_s = time.perf_counter()
    ended = 0
    for (text, reason), schema in zip(answers(requests), schemas, strict=True):
        if reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    print(f"{num_requests} answers, {ended} ended and all of these are valid, {time.perf_counter() - started_s:.1f} s")
    assert ended >= 0.95 * num_requests


def test_answers_match_their_schemas() -> None:
    check_schemas(8)


@pytest.mark.slow
def test_200_answers_match_their_schemas() -> None:
    check_schemas(200)


def test_regex_choice_and_lark() -> None:
    wishes = [
        ("regex", "[a-f]{3,5}-[0-9]{2}"),
        ("choice", ['say "hi"\n', "größer", "b"]),
        ("grammar", 'start: "<" word ("," word)? ">"\nword: /[a-z]{1,4}/'),
    ]
    requests = [request(f"{kind}-{seed}", kind, wish, seed=seed) for kind, wish in wishes for seed in range(3)]
    said = answers(requests)
    assert {reason for _, reason in said} == {FinishReason.STOP}
    texts = [text for text, _ in said]
    assert all(re.fullmatch("[a-f]{3,5}-[0-9]{2}", text) for text in texts[:3]), texts
    assert all(text in wishes[1][1] for text in texts[3:6]), texts
    assert all(re.fullmatch("<[a-z]{1,4}(,[a-z]{1,4})?>", text) for text in texts[6:]), texts


def test_any_object_begins_as_one() -> None:
    [(text, reason)] = answers([request("o", "json_object", True, "JSON:", max_tokens=40, temperature=0.0)])
    assert text.startswith("{")
    assert reason is FinishReason.LENGTH or isinstance(json.loads(text), dict)


def test_penalties_bias_and_min_tokens_do_not_break_a_grammar() -> None:
    [token_id] = tokenizer().encode("7")
    params: dict[str, Any] = {
        "repetition_penalty": 1.8, "presence_penalty": 2.0, "logit_bias": ((token_id, 100.0),), "min_tokens": 6,
    }  # fmt: skip
    said = answers([request(f"p{t}", "regex", "[3-5]{3}", temperature=t, **params) for t in (0.0, 1.0)])
    for text, reason in said:
        assert re.fullmatch("[3-5]{3}", text)
        assert reason is FinishReason.STOP


def mixed() -> list[Request]:
    plain = [request(f"plain{i}", temperature=i * 1.0, max_tokens=12) for i in range(2)]
    return [plain[0], request("a", "json", SCHEMAS[0]), plain[1], request("b", "json", SCHEMAS[4], temperature=0.0)]


def test_an_answer_is_the_same_alone_and_in_a_batch() -> None:
    alone = [answers([one])[0] for one in mixed()]
    assert answers(mixed()) == alone


def test_an_answer_goes_on_in_its_grammar_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    def long() -> list[Request]:
        return [request(f"long{seed}", "regex", "([a-z]{1,3} ){16}", seed=seed) for seed in range(2)]

    alone = [answers([one])[0] for one in long()]
    victims: list[Request] = []

    def noted(scheduler: Scheduler, victim: Request) -> None:
        victims.append(victim)
        preempt(scheduler, victim)

    monkeypatch.setattr(runner(), "num_blocks", 3)
    monkeypatch.setattr(Scheduler, "_preempt", noted)
    assert answers(long()) == alone
    assert victims


def test_no_row_without_a_grammar_changes() -> None:
    with_grammars = answers(mixed())
    without = answers([one for one in mixed() if not one.params.grammar])
    assert [with_grammars[0], with_grammars[2]] == without
