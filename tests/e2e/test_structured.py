"""Answers of a given form from real processes: handed over or not, the same tokens, and valid."""

from __future__ import annotations

import json

import jsonschema
import pytest

from cluster.client import Client, Completion
from tests.e2e.clusters import Running
from tests.prompts import chat

pytestmark = pytest.mark.ray

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "boats"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def ask(running: Running, seed: int) -> Completion:
    with Client(running.grpc) as client:
        return client.generate(
            chat("Invent a person."), json_schema=PERSON, n=2, seed=seed, temperature=1.0, max_tokens=100
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_schema_is_kept_and_a_hand_off_changes_no_token_of_any_choice(one_p_one_d, colocated, seed):
    handed_over, whole = ask(one_p_one_d, seed), ask(colocated, seed)
    tokens = [choice.token_ids for choice in handed_over.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert tokens[0] != tokens[1]
    for choice in handed_over.choices:
        jsonschema.validate(json.loads(choice.text), PERSON)
