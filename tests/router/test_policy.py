"""Routing policies: pure functions of what the router knows."""

from __future__ import annotations

import itertools
import random
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import parse_config
from router.policies.least_loaded import least_loaded
from router.policies.load import Load, ToPlace
from router.policies.power_of_two import power_of_two
from router.policies.prefix_aware import prefix_aware
from router.policies.round_robin import round_robin
from router.policies.topology import topology
from router.policy import POLICIES
from workers.config import Role
from workers.errors import ConfigError

ROLES: tuple[Role, ...] = get_args(Role)
loads = st.lists(
    st.builds(Load, st.integers(0, 9), st.integers(0, 3), st.integers(0, 9), st.integers(0, 8), st.booleans()),
    min_size=1,
    max_size=8,
)
places = st.builds(
    ToPlace, st.sampled_from(ROLES), st.sampled_from(("r", "s", "t")), st.integers(0, 8), st.integers(0, 99)
)


def to_place(role: Role = "prefill", request_id: str = "r", num_tokens: int = 100, turn: int = 0) -> ToPlace:
    return ToPlace(role, request_id, num_tokens, turn)


@pytest.mark.parametrize("name", POLICIES)
@given(candidates=loads, place=places)
def test_every_candidate_is_ranked_once_and_equally_each_time(name, candidates, place):
    before, state = list(candidates), random.getstate()
    ranked = POLICIES[name](candidates, place)
    assert sorted(ranked) == list(range(len(candidates)))
    assert POLICIES[name](candidates, place) == ranked
    assert candidates == before
    assert random.getstate() == state


@given(loads)
def test_prefill_goes_where_fewest_tokens_wait(candidates):
    queued = [candidates[i].num_queued_tokens for i in least_loaded(candidates, to_place())]
    assert queued == sorted(queued)


@given(loads)
def test_decode_goes_to_the_smallest_batch_and_then_to_the_emptiest_pool(candidates):
    ranked = [candidates[i] for i in least_loaded(candidates, to_place("decode"))]
    for better, worse in itertools.pairwise(ranked):
        assert better.num_requests <= worse.num_requests
        assert better.num_requests < worse.num_requests or better.blocks_free >= worse.blocks_free


@given(loads, st.sampled_from(ROLES))
def test_topology_leaves_the_host_only_when_nobody_is_left_on_it(candidates, role):
    ranked = [candidates[i].same_host for i in topology(candidates, to_place(role))]
    assert ranked == sorted(ranked, reverse=True)


@given(loads)
def test_power_of_two_takes_the_better_of_the_two_that_its_lot_names(candidates):
    first, second = (power_of_two(candidates, to_place()) * 2)[:2]
    assert candidates[first].num_queued_tokens <= candidates[second].num_queued_tokens


def test_power_of_two_sends_requests_everywhere_but_seldom_to_the_most_loaded():
    candidates = [Load(tokens, 0, 0) for tokens in (0, 10, 20, 30)]
    firsts = [power_of_two(candidates, to_place(request_id=f"r{i}"))[0] for i in range(400)]
    counts = [firsts.count(i) for i in range(4)]
    # Of the six pairs the least loaded is best in three, the next in two, then one; the last never is.
    assert counts[3] == 0
    assert counts[0] > counts[1] > counts[2] > 30


def test_round_robin_gives_each_its_turn():
    firsts = [round_robin([Load(9 * i, 0, 0) for i in range(3)], to_place(turn=turn))[0] for turn in range(6)]
    assert firsts == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("queued", "cached", "best"),
    [((0, 0), (0, 64), 1), ((0, 120), (0, 64), 1), ((0, 130), (0, 64), 0), ((30, 0), (0, 0), 1)],
)
def test_a_cached_prefix_wins_unless_twice_what_it_saves_waits_there(queued, cached, best):
    candidates = [Load(waiting, 1, 1, tokens) for waiting, tokens in zip(queued, cached, strict=True)]
    assert prefix_aware(candidates, to_place())[0] == best


@pytest.mark.parametrize(
    ("running", "cached", "best"), [((3, 3), (0, 16), 1), ((3, 4), (0, 64), 0), ((5, 3), (100, 0), 1)]
)
def test_on_decode_a_cached_prompt_is_worth_no_more_than_one_request(running, cached, best):
    candidates = [Load(0, count, 1, tokens) for count, tokens in zip(running, cached, strict=True)]
    assert prefix_aware(candidates, to_place("decode"))[0] == best


@pytest.mark.parametrize("role", ROLES)
def test_equals_without_prefixes_take_turns(role):
    firsts = [prefix_aware([Load(0, 0, 5)] * 3, to_place(role, turn=turn))[0] for turn in range(4)]
    assert firsts == [0, 1, 2, 0]


def most_cached(candidates: list[Load], place: ToPlace) -> list[int]:
    """A policy of somebody's own."""
    return sorted(range(len(candidates)), key=lambda i: -candidates[i].num_cached_tokens)


def forgetful(candidates: list[Load], place: ToPlace) -> list[int]:
    return [0]


def test_a_policy_of_ones_own_is_named_by_its_import_path():
    config = parse_config(f"router: {{policy: '{__name__}:most_cached'}}", "c.yaml")
    assert config.router.policy == f"{__name__}:most_cached"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("fastest", r"'fastest' is no policy; choose prefix_aware, least_loaded, .* or one of yours by package.module"),
        (":most_cached", "':most_cached' is no policy"),
        ("no_such_package.policies:best", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such"),
        (f"{__name__}:no_such", r"cannot be imported \(AttributeError"),
        (f"{__name__}:ROLES", r"ranks nobody \(TypeError: 'tuple' object is not callable"),
        (f"{__name__}:forgetful", r"ranks two workers as \[0\]; it must give the indices 0 and 1, each once"),
    ],
)
def test_what_cannot_be_a_policy_is_told_when_the_config_is_read(name, complaint):
    with pytest.raises(ConfigError, match=f"^c.yaml:1: router.policy: .*{complaint}") as caught:
        parse_config(f"router: {{policy: '{name}'}}", "c.yaml")
    assert caught.value.param == "router.policy"
    assert "no_such_package" not in sys.modules
