"""`kvferry scale`, `flip` and `restart`: a cluster that runs becomes another, while requests go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cluster.cli_target import name_option
from workers.errors import KVFerryError, UnavailableError

if TYPE_CHECKING:
    from protos.control_pb2_grpc import ControlServiceStub

_POLL_S = 0.25


def _wait_options(command: Callable[..., Any]) -> Callable[..., Any]:
    wait = click.option("--wait/--no-wait", default=True, help="Return when it is done, or at once.  [default: wait]")
    timeout = click.option("--timeout-s", type=float, default=600.0, show_default=True, help="Wait no longer.")
    return wait(timeout(name_option(command)))


@click.command()
@click.argument("replicas", nargs=-1, required=True, metavar="ROLE=NUMBER...")
@_wait_options
def scale(replicas: tuple[str, ...], name: str, wait: bool, timeout_s: float) -> None:
    """Have so many workers of a role: `kvferry scale prefill=3 decode=2`.

    New ones serve as soon as they have loaded. Those that are too many end their requests first.
    """
    from cluster.control import parse_replicas
    from protos.control_pb2 import ScaleRequest

    wanted = parse_replicas(replicas)
    _order(name, lambda stub: stub.Scale(ScaleRequest(replicas=wanted)), wait, timeout_s)


@click.command()
@click.argument("worker")
@click.argument("role")
@_wait_options
def flip(worker: str, role: str, name: str, wait: bool, timeout_s: float) -> None:
    """Give WORKER another ROLE (prefill, decode or colocated), without loading anew."""
    from protos.control_pb2 import FlipRequest

    _order(name, lambda stub: stub.Flip(FlipRequest(worker=worker, role=role)), wait, timeout_s)


@click.command()
@click.argument("names", nargs=-1, metavar="[WORKER|ROLE]...")
@_wait_options
def restart(names: tuple[str, ...], name: str, wait: bool, timeout_s: float) -> None:
    """Start workers anew, one after the other: those named, those of a role, or all."""
    from protos.control_pb2 import RestartRequest

    _order(name, lambda stub: stub.Restart(RestartRequest(names=names)), wait, timeout_s)


def _order(name: str, order: Callable[[ControlServiceStub], object], wait: bool, timeout_s: float) -> None:
    from cluster.control import connected
    from cluster.state import StateFolder
    from protos.control_pb2 import GetProgressRequest

    folder = StateFolder(name)
    if folder.running() is None or not folder.control.exists():
        raise UnavailableError(f"no cluster named {name} is up here; start it with `kvferry up`")
    with connected(folder.control) as stub:
        events = stub.GetProgress(GetProgressRequest()).events
        from_event = events[-1].number + 1 if events else 0
        order(stub)
        give_up_s = time.monotonic() + timeout_s
        while wait:
            progress = stub.GetProgress(GetProgressRequest(from_event=from_event))
            for event in progress.events:
                click.echo(event.text)
                from_event = event.number + 1
            if progress.settled:
                return
            if time.monotonic() > give_up_s:
                left = "; ".join(f"{worker} {what}" for worker, what in sorted(progress.under_way.items()))
                raise KVFerryError(f"not done within {timeout_s:g} s, and it goes on: {left or 'workers start'}")
            time.sleep(_POLL_S)
