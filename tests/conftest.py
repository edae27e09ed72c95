"""What the whole run needs: markers that ask for a machine of a kind, two processes, and lines at the end."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

# Lines to print at the end of the run, from whichever process.
SUMMARIES = pytest.StashKey[list[str]]()
_OF_CLUSTERS = ("tests/e2e/", "tests/cluster/test_demo.py", "tests/cluster/test_launch.py")

if not shutil.which("nvidia-smi"):
    # Kernels of a GPU are interpreted where there is none. Triton asks when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMMARIES] = []


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not shutil.which("nvidia-smi"):
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test-all` on a machine with one"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Clusters share fixtures and cores: their tests stay in one process. (pytest-xdist's own loadgroup does not group
    with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ClustersTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.startswith(_OF_CLUSTERS) else nodeid

    return ClustersTogether(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["summaries"] = session.config.stash[SUMMARIES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SUMMARIES] += node.workeroutput.get("summaries", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in terminalreporter.config.stash[SUMMARIES]:
        terminalreporter.write_line(line)
