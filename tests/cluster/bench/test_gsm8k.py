"""Answers to grade-school problems: found in a text, compared, and gone on with."""

from __future__ import annotations

import pytest

from cluster.bench.gsm8k import add_answers, last_number, num_alike, read_answers
from tests.checkpoints import write_folder
from workers.config import EngineConfig


@pytest.mark.parametrize(
    ("text", "number"),
    [("3 eggs, so 1,234 in all.", "1234"), ("#### 18", "18"), ("$5.00", "5"), ("-2.5 it is", "-2.5"), ("none", None)],
)
def test_the_last_number_of_an_answer(text, number):
    assert last_number(text) == number


def test_answers_are_alike_up_to_the_first_difference():
    assert [num_alike([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4, 3], [], [1, 2])] == [3, 2, 0, 2]


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path):
    folder = write_folder(tmp_path / "m")
    config = EngineConfig(model=str(folder), num_gpu_blocks_override=16, max_model_len=64, num_threads=1)
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    prompts = [[5, 6, 7], [8, 9], [10]]
    add_answers(whole, prompts, config, max_tokens=6)
    add_answers(part, prompts[:2], config, max_tokens=6)
    begun = part.read_text()
    add_answers(part, prompts, config, max_tokens=6)
    assert part.read_text().startswith(begun)
    assert read_answers(part) == read_answers(whole)
    assert sorted(read_answers(part)) == [0, 1, 2]
