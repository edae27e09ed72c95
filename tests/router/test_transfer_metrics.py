"""How long hand-offs took, and how much of that was not hidden behind prefill, for Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.metrics import RouterMetrics
from workers.timeline import Timeline


def test_the_transfer_and_its_unhidden_part_are_histograms():
    metrics = RouterMetrics("m")
    for transfer_s, unhidden_s in ((0.25, 0.015), (0.5, 0.03)):
        metrics.times(1.0, 0.1, Timeline(transfer_s=transfer_s, transfer_unhidden_s=unhidden_s))
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}

    def samples(name: str) -> dict[str, float]:
        family = families[f"kvferry_request_{name}_seconds"]
        assert family.type == "histogram"
        return {s.name.rsplit("_", 1)[1] + s.labels.get("le", ""): s.value for s in family.samples}

    transfer, unhidden = samples("transfer_time"), samples("transfer_unhidden_time")
    assert (transfer["sum"], transfer["count"]) == (0.75, 2)
    assert (transfer["bucket0.1"], transfer["bucket0.25"], transfer["bucket0.5"]) == (0, 1, 2)
    assert (round(unhidden["sum"], 9), unhidden["count"]) == (0.045, 2)
    assert (unhidden["bucket0.01"], unhidden["bucket0.02"], unhidden["bucket0.04"]) == (0, 1, 2)
