"""Options of the command line that say which cluster is meant, and where it is."""

from __future__ import annotations

import os

import click

from workers.errors import UnavailableError

DEFAULT_NAME = "kvferry"

name_option = click.option("--name", default=DEFAULT_NAME, show_default=True, help="Which cluster of this user.")
target_option = click.option(
    "--target",
    metavar="HOST:PORT",
    help="A router's gRPC address, or several with commas between. Default: of the cluster that runs here.",
)


def running_target(name: str) -> str:
    from cluster.client import DEFAULT_TARGET
    from cluster.state import StateFolder

    state = StateFolder(name).running()
    if state is None and name != DEFAULT_NAME:
        raise UnavailableError(f"no cluster named {name} runs here; start it with `kvferry up`, or give --target")
    if state and state.tls:
        # Who may read its files may ask it as it asks itself.
        os.environ.setdefault("KVFERRY_TLS", state.tls)
    return state.grpc_endpoint if state and state.ready else DEFAULT_TARGET
