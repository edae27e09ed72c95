from __future__ import annotations

import pytest

from cluster.config import parse_config
from cluster.worker_configs import worker_configs
from workers.errors import ConfigError


@pytest.mark.parametrize("transport", ["grpc", "auto"])
def test_kv_that_may_leave_the_host_has_a_checksum(transport):
    with pytest.raises(ConfigError, match=f"KV leaves the host's memory by transport: {transport}") as caught:
        parse_config(f"transfer: {{transport: {transport}, checksum: false}}", "c.yaml")
    assert caught.value.param == "transfer.checksum"


def test_shared_memory_may_go_without():
    workers = worker_configs(parse_config("transfer: {transport: shm, checksum: false}", "c.yaml"))
    assert [worker.transfer.checksum for worker in workers] == [False, False]
