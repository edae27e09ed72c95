"""What all end-to-end tests share: one 1P1D and one colocated cluster of real processes, and the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.config_file import packaged_configs
from tests.conftest import SUMMARIES
from tests.e2e.clusters import RealCluster, Running, up
from tests.exact import Comparator
from tests.oracle import TransformersOracle
from tests.prompts import MODEL, tokenizer
from workers.models.resolve import resolve_model

# The packaged local.yaml, beside whatever else runs on this machine; without prefix caching, so that what is computed
# and moved can be counted.
_CONFIG = "router: {http_port: 0, grpc_port: 0}\nmax_model_len: 2048\nenable_prefix_caching: false\n"


@pytest.fixture(scope="session")
def one_p_one_d(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with up(RealCluster("e2e-1p1d", tmp_path_factory.mktemp("home")), _CONFIG) as running:
        yield running


@pytest.fixture(scope="session")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The packaged baseline, on the same resources."""
    cluster = RealCluster("e2e-colocated", tmp_path_factory.mktemp("home"))
    with up(cluster, _CONFIG + packaged_configs()["colocated"]) as running:
        yield running


@pytest.fixture(scope="session")
def oracle() -> TransformersOracle:
    return TransformersOracle(resolve_model(MODEL), tokenizer().eos_token_ids)


@pytest.fixture(scope="session")
def comparator(oracle: TransformersOracle, pytestconfig: pytest.Config) -> Iterator[Comparator]:
    """One run of comparisons over all tests: too many ties in sum are an error at its end."""
    comparator = Comparator(oracle, tokenizer().eos_token_ids)
    yield comparator
    ties = [f"  {tie}" for tie in comparator.ties]
    pytestconfig.stash[SUMMARIES] += [f"law 2: {comparator.summary()}", *ties]
    comparator.check()
