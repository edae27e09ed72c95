"""transfer.resume: what can not work is refused before anything starts."""

from __future__ import annotations

import pytest

from cluster.config import load_config
from cluster.worker_configs import worker_configs
from workers.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("enable_prefix_caching: false", "set enable_prefix_caching: true"),
        ("colocated: {replicas: 1}", "needs another worker"),
        ("transfer: {resume: copy}", "transfer.resume: must be 'recompute' or 'replicate'"),
    ],
)
def test_copies_that_nobody_could_keep_or_find_are_refused(tmp_path, text, complaint):
    path = tmp_path / "kvferry.yaml"
    path.write_text(text if "transfer" in text else text + "\ntransfer: {resume: replicate}\n")
    with pytest.raises(ConfigError, match=complaint):
        load_config(path)


def test_every_worker_is_told(tmp_path):
    path = tmp_path / "kvferry.yaml"
    path.write_text("transfer: {resume: replicate, max_num_replicas: 2}")
    transfers = [worker.transfer for worker in worker_configs(load_config(path))]
    assert [(t.resume, t.max_num_replicas) for t in transfers] == [("replicate", 2)] * 2
