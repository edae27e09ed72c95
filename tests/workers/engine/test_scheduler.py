"""The scheduler by examples: how a step's tokens are shared, and who runs. test_state_machine.py tries any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import make_request
from workers.config import CacheConfig, SchedulerConfig
from workers.engine.block_manager import BlockManager
from workers.engine.prefix_cache import PrefixCache
from workers.engine.scheduler import Scheduler, SchedulerOutput, share_tokens
from workers.request import Request, RequestStatus

BLOCK_SIZE = 4
# Longest request: it must fit into the pool of NUM_BLOCKS alone.
NUM_BLOCKS, MAX_TOKENS = 10, 36
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)

prompts = st.lists(st.integers(1, 400), min_size=1, max_size=12)
budgets = st.integers(1, 600)


@given(prompts, budgets)
def test_shares_spend_the_budget_or_finish_every_prompt(remaining, budget):
    shares = share_tokens(remaining, budget)
    assert all(0 <= share <= wanted for share, wanted in zip(shares, remaining, strict=True))
    assert sum(shares) == min(budget, sum(remaining))


@given(prompts, budgets)
def test_the_oldest_gets_half_or_all_that_it_lacks(remaining, budget):
    assert share_tokens(remaining, budget)[0] >= min(remaining[0], budget // 2)


@given(prompts, budgets)
def test_beyond_the_oldest_a_shorter_prompt_is_never_kept_waiting_by_a_longer_one(remaining, budget):
    shares = share_tokens(remaining, budget)
    for i in range(1, len(remaining)):
        if shares[i] < remaining[i]:
            assert not any(shares[j] for j in range(1, len(remaining)) if remaining[j] > remaining[i])


@given(prompts, budgets)
def test_nobody_starves(remaining, budget):
    """Every prompt ends after as many steps as its own and its elders' tokens take at half of the budget."""
    left = list(remaining)
    for _ in range(sum(-(-tokens // max(1, budget // 2)) for tokens in remaining)):
        live = [i for i, tokens in enumerate(left) if tokens]
        for i, share in zip(live, share_tokens([left[i] for i in live], budget), strict=True):
            left[i] -= share
    assert not any(left)


def test_no_prompts_need_no_shares():
    assert share_tokens([], 8) == []


def scheduler() -> Scheduler:
    return scheduler_of(CONFIG)


def scheduler_of(config: SchedulerConfig) -> Scheduler:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    return Scheduler(config, blocks, PrefixCache(cache, blocks, "fingerprint"))


def compute(step: SchedulerOutput, live: dict[str, Request]) -> None:
    """What the engine does with a step's result."""
    for scheduled in step.requests:
        request = live[scheduled.request_id]
        request.num_computed_tokens = scheduled.start + len(scheduled.token_ids)
        if scheduled.samples:
            request.output_token_ids.append(7)


def admit(place: Scheduler, *sizes: int) -> dict[str, Request]:
    requests = {f"r{i}": make_request(size, request_id=f"r{i}", arrival=i) for i, size in enumerate(sizes)}
    for request in requests.values():
        place.add(request)
    return requests


def test_a_short_prompt_finishes_its_prefill_before_a_long_one_that_came_first():
    place = scheduler()
    live = admit(place, 20, 3)
    step = place.schedule()
    assert [(r.request_id, len(r.token_ids), bool(r.samples)) for r in step.requests] == [
        ("r0", 5, False), ("r1", 3, True),
    ]  # fmt: skip
    compute(step, live)
    # The one that decodes now takes its token first; the rest of the step is the long prompt's.
    assert [(r.request_id, len(r.token_ids)) for r in place.schedule().requests] == [("r1", 1), ("r0", 7)]


def test_chunks_cover_a_prompt_once_and_in_order():
    place = scheduler()
    live = admit(place, 19)
    covered: list[int] = []
    while not live["r0"].output_token_ids:
        step = place.schedule()
        (chunk,) = step.requests
        covered += chunk.token_ids
        assert chunk.start + len(chunk.token_ids) == len(covered)
        assert bool(chunk.samples) == (len(covered) == 19)
        compute(step, live)
    assert covered == live["r0"].prompt_token_ids


def test_preemption_takes_the_latest_arrival_and_starts_it_again_first():
    place = scheduler()
    live = admit(place, 4, 4, 4)
    while not place.num_preemptions:
        assert live["r0"].num_tokens < MAX_TOKENS
        compute(place.schedule(), live)
    assert [r.request_id for r in place.waiting] == ["r2"]
    assert live["r2"].status is RequestStatus.PREEMPTED
    assert (live["r2"].num_computed_tokens, live["r2"].block_table) == (0, [])
    place.add(make_request(1, request_id="late", arrival=9))
    assert [r.request_id for r in place.waiting] == ["r2", "late"]


def test_who_waits_for_a_seat_with_blocks_of_its_own_gives_way_to_who_came_before():
    place = scheduler_of(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8))
    live = admit(place, 4)
    compute(place.schedule(), live)
    late = make_request(8, request_id="late", arrival=9, output_token_ids=[7], num_computed_tokens=8)
    late.block_table = place.block_manager.allocate(3)
    place.add(late)
    place.block_manager.allocate(NUM_BLOCKS - 4)
    while not place.num_preemptions:
        compute(place.schedule(), live)
    assert live["r0"].status is RequestStatus.RUNNING
    assert (late.status, late.block_table) == (RequestStatus.PREEMPTED, [])
    assert list(place.waiting) == [late]


def test_a_choice_for_which_there_is_no_block_waits_behind_who_came_before_it():
    place = scheduler()
    parent = make_request(6, request_id="parent", arrival=2)
    parent.block_table, parent.num_computed_tokens = place.block_manager.allocate(2), 6
    place.block_manager.allocate(NUM_BLOCKS - 2)
    place.add(make_request(4, request_id="earlier", arrival=1))
    children = [replace(parent, choice=choice, block_table=[], output_token_ids=[7]) for choice in range(2)]
    place.fork(parent, children)
    assert list(place.waiting) == [children[0], place.waiting[1], children[1]]
    assert place.waiting[1].request_id == "earlier"
    assert (len(children[0].block_table), children[1].block_table) == (2, [])


def test_a_request_whose_kv_is_being_read_is_not_preempted():
    place = scheduler()
    live = admit(place, 8, 8)
    live["held"] = make_request(8, request_id="held", arrival=9, hold_blocks=True)
    place.add(live["held"])
    while not place.num_preemptions:
        step = place.schedule()
        compute(step, live)
        if live["held"].output_token_ids:
            # Its next token is not wanted: it stands for a shipment that is slow.
            live["held"].output_token_ids.clear()
            live["held"].num_computed_tokens = 7
    assert [r.request_id for r in place.waiting] == ["r1"]
    assert len(live["held"].block_table) == 2


def test_a_hand_off_takes_room_for_one_token_more_and_starts_without_recomputing():
    place = scheduler()
    request = make_request(8)
    assert place.try_reserve(request, place.block_manager.num_blocks)
    assert len(request.block_table) == 3
    commit(place, request)
    (scheduled,) = place.schedule().requests
    assert (scheduled.start, list(scheduled.token_ids)) == (8, [5])
    assert [s.params for s in scheduled.samples] == [request.params]


def test_room_is_not_promised_that_a_preempted_request_waits_for():
    place = scheduler()
    place.add(make_request(NUM_BLOCKS * BLOCK_SIZE - 4, request_id="preempted"))
    assert not place.try_reserve(make_request(4, request_id="two blocks"), NUM_BLOCKS)
    assert place.try_reserve(make_request(3, request_id="the block that is left"), NUM_BLOCKS)


def test_seats_go_by_order_to_those_that_bring_their_kv_and_those_that_do_not():
    """Who waits for a seat and not for blocks is no reason to refuse room, and is not passed by all who come later."""
    place = scheduler()
    running = [make_request(1, request_id=f"r{i}") for i in range(CONFIG.max_num_seqs)]
    for request in running:
        place.add(request)
    place.schedule()
    local, handed_over = make_request(1, request_id="local"), make_request(1, request_id="handed over")
    place.add(local)
    assert place.try_reserve(handed_over, NUM_BLOCKS)
    commit(place, handed_over)
    for seats, request in enumerate((local, handed_over), start=1):
        place.remove(running[-seats])
        place.free(running[-seats])
        place.schedule()
        assert request.status is RequestStatus.RUNNING
        assert len(place.running) == CONFIG.max_num_seqs


def commit(place: Scheduler, request: Request) -> None:
    del place.waiting_for_kv[request.request_id]
    request.num_computed_tokens = request.num_tokens
    request.output_token_ids.append(5)
    place.add(request)


def test_preempted_requests_wait_in_order_of_arrival_even_when_a_later_one_ran_meanwhile():
    """A hand-over that came after a preempted request finds its place before it, runs, and is preempted in its turn."""
    place = scheduler()
    live = admit(place, 20, 12)
    while not place.num_preemptions:
        compute(place.schedule(), live)
    late = make_request(8, request_id="late", arrival=9, output_token_ids=[7], num_computed_tokens=8)
    late.block_table = place.block_manager.allocate(3)
    live["late"] = late
    place.add(late)
    while place.num_preemptions < 2:
        compute(place.schedule(), live)
    assert [r.request_id for r in place.waiting] == ["r1", "late"]


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_as_many_requests_as_a_step_has_tokens_all_get_one(num_seqs):
    place = scheduler_of(SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs))
    live = admit(place, *[2] * num_seqs)
    for _ in range(2 * num_seqs):
        compute(place.schedule(), live)
    assert all(request.output_token_ids for request in live.values())
