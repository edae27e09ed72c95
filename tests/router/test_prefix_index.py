"""The index of who has which block equals a naive one, and stays within its bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prefix_index import PrefixIndex

WORKERS = ("a", "b", "c")
HASHES = [bytes([i]) * 16 for i in range(8)]

events = st.lists(
    st.tuples(
        st.sampled_from(("enter", "enter", "enter", "leave", "drop")),
        st.sampled_from(WORKERS),
        st.lists(st.sampled_from(HASHES), max_size=5),
    ),
    max_size=30,
)
prompts = st.lists(st.sampled_from(HASHES), max_size=6)
units = st.fixed_dictionaries({worker: st.integers(1, 3) for worker in WORKERS})


def told(index: PrefixIndex, history: Iterable[tuple[str, str, Sequence[bytes]]]) -> dict[str, set[bytes]]:
    """Tell the index, and a set for each worker."""
    held: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
    for event, worker, hashes in history:
        if event == "drop":
            index.drop(worker)
            held[worker].clear()
        elif event == "enter":
            index.enter(worker, hashes)
            held[worker] |= set(hashes)
        else:
            index.leave(worker, hashes)
            held[worker] -= set(hashes)
    return held


def longest(held: Mapping[str, set[bytes]], prompt: Sequence[bytes], block_units: Mapping[str, int]) -> dict[str, int]:
    """Block by block: one is held where the hash of its last unit is."""
    found = {}
    for worker, size in block_units.items():
        last_units = itertools.islice(prompt, size - 1, None, size)
        found[worker] = size * len(list(itertools.takewhile(held[worker].__contains__, last_units)))
    return found


@given(events, prompts, units)
def test_it_equals_one_set_a_worker(history, prompt, block_units):
    index = PrefixIndex(1000)
    held = told(index, history)
    assert index.match(prompt, block_units) == longest(held, prompt, block_units)
    assert len(index) == len(set().union(*held.values()))


@given(events, prompts, units, st.integers(1, 4))
def test_with_a_bound_it_forgets_but_invents_nothing(history, prompt, block_units, most):
    index = PrefixIndex(most)
    held = told(index, history)
    assert len(index) <= most
    found, known = index.match(prompt, block_units), longest(held, prompt, block_units)
    assert all(found[worker] <= known[worker] for worker in WORKERS)


def test_it_never_grows_beyond_its_bound_however_much_it_is_told():
    index = PrefixIndex(100)
    for number in range(5000):
        index.enter(WORKERS[number % 3], [number.to_bytes(16, "big")])
        assert len(index) <= 100


def test_what_was_asked_for_longest_ago_is_forgotten_first_and_of_a_prefix_its_end():
    index = PrefixIndex(4)
    index.enter("a", HASHES[:2])
    index.enter("a", HASHES[2:4])
    assert index.match(HASHES[:2], {"a": 1}) == {"a": 2}
    index.enter("a", [HASHES[7]])
    # The second's end is gone, and nothing of the first.
    assert index.match(HASHES[:2], {"a": 1}) == {"a": 2}
    assert index.match(HASHES[2:4], {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(("held", "taken"), [(0, 1), (1, 2), (3, 4)])
def test_a_prompt_costs_no_more_hashes_than_are_held_and_one(held, taken):
    index = PrefixIndex(100)
    index.enter("a", HASHES[:held])
    hashes = iter(HASHES)
    index.match(hashes, {"a": 1, "b": 1})
    assert len(HASHES) - len(list(hashes)) == taken


def test_incarnations_that_come_and_go_leave_nothing_behind():
    index = PrefixIndex(1000)
    for number in range(200):
        index.enter(f"w{number}", HASHES)
        index.drop(f"w{number}")
    state: Any = index.__dict__
    assert len(index) == len(state["_bits"]) == 0
    index.enter("w", HASHES)
    assert max(state["_holders"].values()) == 1
