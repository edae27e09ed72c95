"""What a running cluster is asked by other processes of its user, over its socket."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from cluster.config import parse_config
from cluster.control import Control, Events, connected, listening, parse_replicas
from cluster.roster import Roster
from cluster.worker_configs import worker_configs
from protos.control_pb2 import FlipRequest, GetProgressRequest, RestartRequest, ScaleRequest
from workers.errors import ConfigError, UnavailableError

UNDER_WAY = MappingProxyType({"decode-0": "starts"})


class Progress:
    settled = False
    under_way = UNDER_WAY


@contextmanager
def controlled(socket: Path, events: Events) -> Iterator[Roster]:
    config = parse_config("prefill: {replicas: 2}", "c.yaml")
    roster = Roster(config, worker_configs(config, cores=[0, 1]))
    control = Control(roster, Progress(), events)
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            control.carry_out()

    with listening(control, socket):
        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield roster
        finally:
            over.set()
            thread.join()


def test_orders_change_the_roster_and_what_is_refused_says_why(tmp_path):
    socket = tmp_path / ("long" * 50) / "control"
    socket.parent.mkdir()
    with controlled(socket, Events(lambda text: None)) as roster:
        assert stat.S_IMODE(os.stat(socket).st_mode) == 0o600
        with connected(socket) as stub:
            stub.Scale(ScaleRequest(replicas={"decode": 3}))
            stub.Flip(FlipRequest(worker="prefill-1", role="decode"))
            assert list(stub.Restart(RestartRequest(names=["prefill"])).workers) == ["prefill-0"]
            assert roster.replicas() == {"prefill": 1, "decode": 4, "colocated": 0}
        with pytest.raises(ConfigError, match="there is no worker 'x'") as raised, connected(socket) as stub:
            stub.Flip(FlipRequest(worker="x", role="decode"))
        assert raised.value.param == "name"
    assert not socket.exists()


def test_progress_tells_what_is_under_way_and_only_what_was_said_since(tmp_path):
    said: list[str] = []
    events = Events(said.append)
    with controlled(tmp_path / "control", events), connected(tmp_path / "control") as stub:
        for text in ("one", "two", "three"):
            events(text)
        progress = stub.GetProgress(GetProgressRequest(from_event=1))
        assert [(event.number, event.text) for event in progress.events] == [(1, "two"), (2, "three")]
        assert (progress.settled, dict(progress.under_way)) == (False, dict(UNDER_WAY))
    assert said == ["one", "two", "three"]


def test_what_a_killed_one_left_is_in_nobodys_way_and_nobody_is_found_there(tmp_path):
    socket = tmp_path / "control"
    socket.touch()
    with pytest.raises(UnavailableError, match="does not answer"), connected(socket) as stub:
        stub.GetProgress(GetProgressRequest(), timeout=5)
    with controlled(socket, Events(lambda text: None)), connected(socket) as stub:
        assert not stub.GetProgress(GetProgressRequest()).settled


@pytest.mark.parametrize("text", ["prefill", "prefill=", "prefill=x", "prefill=-1", "prefill=1.5"])
def test_what_is_no_number_of_a_role_is_refused(text):
    assert parse_replicas(["prefill=3", "decode=0"]) == {"prefill": 3, "decode": 0}
    with pytest.raises(ConfigError, match="is not ROLE=NUMBER"):
        parse_replicas([text])
