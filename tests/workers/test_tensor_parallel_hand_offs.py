"""Hand-offs between workers of different numbers of ranks: the same tokens, whoever sends and whoever receives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.exact import Comparator, Logits
from tests.families import TINY, Tiny
from tests.workers.models.paged import prompt
from tests.workers.real_workers import answer, real_workers
from workers.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
# Names tell the ranks.
ONE: dict[str, Any] = {"block_size": 32}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}


@dataclass(frozen=True)
class Oracle:
    """transformers on the same weights."""

    model: PreTrainedModel

    def logits(self, token_ids, num_last) -> Logits:
        with torch.inference_mode():
            rows: Logits = self.model(torch.tensor([list(token_ids)])).logits[0, -num_last:].double().numpy()
        return rows


def hand_around(model: PreTrainedModel, folder: Path, route: list[str], workers: dict[str, dict[str, Any]]) -> None:
    """From each of `route` to the next: the tokens of transformers, and all KV heads sent once."""
    model.save_pretrained(folder)
    comparator = Comparator(Oracle(model), ())

    async def main() -> None:
        async with real_workers(folder, **workers) as running:
            for sender, receiver in pairwise(route):
                before = running[receiver].stats().kv_bytes_received
                for length, params in ((1, GREEDY), (17, SEEDED), (40, GREEDY)):
                    ids = prompt(length, seed=length)
                    tokens = await answer(running[receiver], Request("r", ids, params), running[sender])
                    comparator.require_same(ids, params, tokens)
                received = running[receiver].stats().kv_bytes_received - before
                config = model.config
                head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                token_bytes = config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 4
                assert received == (1 + 17 + 40) * token_bytes

    asyncio.run(main())
    comparator.check()


def llama(num_kv_heads: int) -> PreTrainedModel:
    return Tiny("Llama", {"num_key_value_heads": num_kv_heads}).build()


def test_any_number_of_ranks_hands_over_to_any_other(tmp_path: Path) -> None:
    hand_around(llama(4), tmp_path, ["one", "two", "two_more", "one"], {"one": ONE, "two": TWO, "two_more": TWO})


def test_ranks_that_share_a_kv_head_send_it_once_and_get_it_both(tmp_path: Path) -> None:
    hand_around(llama(1), tmp_path, ["one", "two", "two_more", "one"], {"one": ONE, "two": TWO, "two_more": TWO})


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_every_family_hands_over_between_one_and_two_and_four_ranks(tmp_path: Path, name: str) -> None:
    four = {"tensor_parallel_size": 4}
    route = ["one", "two", "four", "one", "four", "two", "one"]
    hand_around(TINY[name].build(), tmp_path, route, {"one": ONE, "two": TWO, "four": four})
