"""Floors and splits against arithmetic done another way."""

from __future__ import annotations

import random

import pytest

from cluster.plan.cards import CARDS, card_of
from cluster.plan.floors import Served, decode_floor, prefill_floor
from cluster.plan.shape import shape_of
from cluster.plan.sizing import Efficiency, Workload, largest_batch, split
from workers.errors import ConfigError

SERVED = Served(shape_of(32, 8, 128, 8_000_000_000), 16e9, 2)
H100 = CARDS["h100"]
WHOLE = Efficiency(1.0, 1.0)
KV_BYTES = 56e9


def test_the_numbers_of_the_design():
    free = 80e9 - 14e9 - 4e9
    assert [largest_batch(free, size) for size in (0.5e9, 1e9, 5e9)] == [124, 62, 12]


def test_a_prompt_is_bound_by_arithmetic_and_a_step_by_bytes():
    prompt, step = prefill_floor(SERVED, H100, 2048), decode_floor(SERVED, H100, 1, 2048)
    assert (prompt.bound, step.bound) == ("compute", "memory")
    pairs = sum(position + 1 for position in range(2048))
    operations = 2 * 8e9 * 2048 + 32 * pairs * 2 * (2 * 8 * 128)
    assert prompt.seconds == pytest.approx(operations / 989e12)
    assert step.seconds == pytest.approx((16e9 + 2048 * 32 * 2 * 8 * 128 * 2) / 3350e9)


def test_enough_rows_make_a_step_arithmetic():
    bounds = [decode_floor(SERVED, H100, batch, 0).bound for batch in (1, 64, 256, 512, 1024)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == "memory"
    assert bounds[-1] == "compute"


def test_two_cards_have_half_the_floor():
    assert decode_floor(SERVED, H100 * 2, 4, 100).seconds == decode_floor(SERVED, H100, 4, 100).seconds / 2


def test_a_split_keeps_its_promises_and_one_worker_less_does_not():
    load = Workload(2048, 256, 40.0, 0.2, 0.02)
    found = split(SERVED, H100, KV_BYTES, load, WHOLE)
    assert found.prefill_s + found.prefill_wait_s <= load.ttft_s
    assert found.prefill_s + simulated_wait_s(found.prefill_s, load.rate / found.num_prefill) < 1.1 * load.ttft_s
    fewer_rate = load.rate / (found.num_prefill - 1) if found.num_prefill > 1 else 1e9
    busy = fewer_rate * found.prefill_s
    assert busy >= 1 or found.prefill_s + simulated_wait_s(found.prefill_s, fewer_rate) > 0.9 * load.ttft_s
    assert found.decode_step_s <= load.tpot_s
    assert decode_floor(SERVED, H100, found.batch + 1, load.context).seconds > load.tpot_s or (
        (found.batch + 1) * load.num_tokens * SERVED.kv_bytes > KV_BYTES
    )
    tokens = found.num_decode * found.batch / found.decode_step_s
    assert tokens >= load.rate * load.num_output_tokens > tokens - found.batch / found.decode_step_s


def simulated_wait_s(service_s: float, rate: float) -> float:
    """Mean wait of a queue with random arrivals and equal service, by letting one run."""
    rng, arrives, free, waits = random.Random(1), 0.0, 0.0, []
    for _ in range(200_000):
        arrives += rng.expovariate(rate)
        waits.append(max(0.0, free - arrives))
        free = max(free, arrives) + service_s
    return sum(waits) / len(waits)


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8])
def test_the_wait_is_that_of_a_queue(busy):
    service_s = prefill_floor(SERVED, H100, 2048).seconds
    load = Workload(2048, 1, busy / service_s, 1e3, 1e3)
    found = split(SERVED, H100, KV_BYTES, load, WHOLE)
    assert found.num_prefill == 1
    assert found.prefill_wait_s == pytest.approx(simulated_wait_s(service_s, load.rate), rel=0.05)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Workload(8192, 256, 1.0, 0.001, 0.05), "takes .* ms alone, which is no less than the TTFT of 1 ms"),
        (Workload(2048, 256, 1.0, 1.0, 0.001), "a step of one request takes .* more than the TPOT of 1 ms"),
        (Workload(900_000, 256, 1.0, 1000.0, 0.05), "not one request of 900256 tokens fits"),
    ],
)
def test_what_no_number_of_workers_keeps_is_refused(load, message):
    with pytest.raises(ConfigError, match=message):
        split(SERVED, H100, KV_BYTES, load, WHOLE)


def test_an_unknown_card_has_a_near_one():
    with pytest.raises(ConfigError, match="did you mean h100"):
        card_of("h1000")
