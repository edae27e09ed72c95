"""What the whole run needs: markers that ask for a machine of a kind, two processes, and lines at the end."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

# Lines to print at the end of the run, from whichever process.
SUMMARIES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMMARIES] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters share fixtures, so their tests stay together; those that need a GPU skip where there is none."""
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test-all` on a machine with one")
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("clusters"))
        if item.get_closest_marker("gpu") and not shutil.which("nvidia-smi"):
            item.add_marker(skip)


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
