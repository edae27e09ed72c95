"""What block hashes are made of: all that KV depends on, so that nothing else is ever found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.factories import BLOCK_SIZE, make_request, prompt_of
from workers.config import CacheConfig
from workers.engine.block_hash import BlockHash
from workers.engine.block_manager import BlockManager
from workers.engine.prefix_cache import PrefixCache
from workers.request import Request

PROMPT = prompt_of(4 * BLOCK_SIZE)


def hashes(prompt: list[int] = PROMPT, fingerprint: str = "model", **fields: Any) -> list[bytes]:
    """Of all whole blocks."""
    request, names = make_request(prompt, **fields), BlockHash(fingerprint, BLOCK_SIZE)
    return [names.of_unit(request, i) for i in range(len(prompt) // BLOCK_SIZE)]


def cache_of(fingerprint: str) -> PrefixCache:
    config = CacheConfig(block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)
    return PrefixCache(config, BlockManager(16, BLOCK_SIZE), fingerprint)


def test_hashes_are_a_function_of_the_tokens_and_nothing_of_the_request():
    assert hashes() == hashes(request_id="other", router_id="other")
    assert len(set(hashes())) == 4


@pytest.mark.parametrize(
    ("some", "others"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"fingerprint": "another model"}, {}),
        ({"fingerprint": "a", "cache_salt": "b"}, {"fingerprint": "ab"}),
    ],
)
def test_another_salt_or_model_shares_no_block(some, others):
    assert not set(hashes(**some)) & set(hashes(**others))


@pytest.mark.parametrize("at", range(4 * BLOCK_SIZE))
def test_a_token_that_differs_changes_its_block_and_all_after_it(at):
    changed = [*PROMPT[:at], PROMPT[at] + 1, *PROMPT[at + 1 :]]
    same = [a == b for a, b in zip(hashes(), hashes(changed), strict=True)]
    assert same == [i < at // BLOCK_SIZE for i in range(4)]


def test_equal_tokens_in_another_place_are_another_block():
    again = hashes(PROMPT[:BLOCK_SIZE] * 4)
    assert len(set(again)) == 4


def test_a_request_finds_what_one_of_its_salt_has_published_and_no_other_does():
    cache = cache_of("model")
    blocks = cache._blocks
    owner = salted("a")
    owner.block_table = blocks.allocate(4)
    owner.num_computed_tokens = 3 * BLOCK_SIZE + 1
    cache.publish(owner)
    assert cache.find(salted("a"), len(PROMPT)) == owner.block_table[:3]
    assert cache.find(salted("b"), len(PROMPT)) == cache.find(salted(""), len(PROMPT)) == []


def salted(salt: str) -> Request:
    return make_request(PROMPT, cache_salt=salt)
