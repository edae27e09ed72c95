"""Our histogram and counter show what prometheus_client's would."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.histogram import Histogram, Tally

BUCKETS = (0.001, 0.5, 1, 2.5, 80)


@given(st.lists(st.sampled_from(BUCKETS) | st.floats(0, 100)))
def test_it_shows_what_prometheus_clients_shows(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("waited_seconds", "How long.", "m", BUCKETS, ours)
    oracle = prometheus_client.Histogram(
        "waited_seconds", "How long.", ["model_name"], registry=theirs, buckets=BUCKETS
    ).labels("m")
    for value in values:
        histogram.observe(value)
        oracle.observe(value)

    assert samples(ours) == samples(theirs)


@given(st.lists(st.integers(1, 1000)))
def test_a_tally_shows_what_prometheus_clients_counter_shows(counts):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("tokens", "How many.", "m", ours)
    oracle = prometheus_client.Counter("tokens", "How many.", ["model_name"], registry=theirs).labels("m")
    for count in counts:
        tally.add(count)
        oracle.inc(count)
    assert samples(ours) == samples(theirs)


def samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = [(one.name, one.labels, one.value) for family in families for one in family.samples]
    return [one for one in found if not one[0].endswith("_created")]
