"""`kvferry top`."""

from __future__ import annotations

from contextlib import suppress

import click

from cluster.cli_target import name_option, running_target, target_option


@click.command()
@click.option(
    "--interval-s", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Look again after so long."
)
@click.option("--once", is_flag=True, help="Print one frame; without a terminal that is what is done anyway.")
@name_option
@target_option
def top(interval_s: float, once: bool, name: str, target: str | None) -> None:
    """Watch the cluster at work: workers, blocks, throughput, latencies and the latest requests. Ctrl-C leaves."""
    from cluster.top import watch

    with suppress(KeyboardInterrupt):
        watch(target or running_target(name), interval_s, once)
