"""Client and AsyncClient, and what they give, have one shape: what is to be known of one is known of the other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cluster.async_jobs import AsyncJob, AsyncJobs
from cluster.client import AsyncClient, Client
from cluster.jobs import Job, Jobs

# Where one has what the other cannot have, and why.
ONLY_BLOCKING = {
    Client: set(),
    # A thread looks at blocking jobs; it ends with them.
    Jobs: {"close"},
    # A concurrent.futures.Future's own; `result` can wait for a while only, where asyncio has its timeouts.
    Job: {"add_done_callback", "cancelled", "done", "exception", "running", "set_exception", "set_result",
          "set_running_or_notify_cancel", "result"},
}  # fmt: skip
ONLY_ASYNC = {AsyncClient: set(), AsyncJobs: set(), AsyncJob: {"result"}}
# A simulated network's.
ONLY_OF_INIT = {"channel"}


def public(cls: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(cls) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any, Any]]:
    """Without what is returned: the other's awaits."""
    return [
        (one.name, one.kind, one.default, one.annotation) for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Jobs, AsyncJobs), (Job, AsyncJob)])
def test_both_have_the_same_methods_with_the_same_parameters(blocking: type, awaited: type):
    one, other = public(blocking), public(awaited)
    assert one.keys() - ONLY_BLOCKING[blocking] == other.keys() - ONLY_ASYNC[awaited]
    for name in one.keys() & other.keys() - ONLY_ASYNC[awaited]:
        assert callable(one[name]) == callable(other[name]), name
        if callable(one[name]):
            assert parameters(one[name]) == parameters(other[name]), name


def test_both_clients_are_made_alike():
    made = [parameters(cls.__init__) for cls in (Client, AsyncClient)]
    assert made[0] == [one for one in made[1] if one[0] not in ONLY_OF_INIT]


def test_both_are_contexts():
    assert {"__enter__", "__exit__"} <= set(dir(Client))
    assert {"__aenter__", "__aexit__"} <= set(dir(AsyncClient))
