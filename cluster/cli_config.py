"""`kvferry config`: a config file shown, and held against this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from workers.errors import ConfigError

if TYPE_CHECKING:
    from cluster.caveats import Finding
    from cluster.check import Report
    from cluster.config import ClusterConfig
    from cluster.config_file import ConfigFile

_CONFIG = click.argument("config", required=False, metavar="[CONFIG]", type=click.Path())
# Of a URL, in either place, also of one that is not quite one.
_PASSWORD = re.compile(r":(?!//)[^@]*@")
_PASSWORD_IN_QUERY = re.compile(r"(?<=[?&]password=)[^&]*")


@click.group()
def config() -> None:
    """Config files: CONFIG is a YAML file, or the name of one that comes with kvferry; none: the default."""


@config.command()
def schema() -> None:
    """Print the JSON schema of config files, for editors."""
    from cluster.config_schema import config_schema

    click.echo(json.dumps(config_schema(), indent=2))


@config.command()
@_CONFIG
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(config: str | None, as_json: bool) -> None:
    """Print every key of CONFIG with the value that it has, without passwords."""
    import yaml

    from cluster.config import load_config

    values: dict[str, Any] = load_config(config, allow_faults=True).model_dump(mode="json")
    if values["jobs"]["url"]:
        url = _PASSWORD.sub(":***@", values["jobs"]["url"])
        values["jobs"]["url"] = _PASSWORD_IN_QUERY.sub("***", url)
    click.echo(json.dumps(values, indent=2) if as_json else yaml.safe_dump(values, sort_keys=False).rstrip())


@config.command()
@_CONFIG
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(config: str | None, as_json: bool) -> int:
    """Tell what would keep CONFIG from being served on this machine, without starting anything.

    Exit code 0: nothing. 1: what is here and now: no such model, too little memory, a port in use, and the like.
    2: CONFIG itself is wrong.
    """
    from cluster.caveats import Finding
    from cluster.check import Report
    from cluster.config import checked
    from cluster.config_file import read_config_file
    from cluster.up import require_server_extra

    try:
        file = read_config_file(config)
        settings = checked(file)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps(_object(Report(problems=[Finding(error.param or "", error.message)])), indent=2))
        return 2
    require_server_extra()
    report = _examine(settings)
    if as_json:
        click.echo(json.dumps(_object(report), indent=2))
    else:
        _print(report, file, settings)
    return 1 if report.problems else 0


def _examine(settings: ClusterConfig) -> Report:
    from cluster.check import examine
    from cluster.state import StateFolder
    from workers.models.resolve import find_model

    report = examine(settings, find_model, with_torch=True)
    with report.noting():
        StateFolder(settings.name).refuse_second()
    return report


def _object(report: Report) -> dict[str, Any]:
    return {
        "ok": not report.problems,
        "problems": [asdict(found) for found in report.problems],
        "caveats": [asdict(found) for found in report.caveats],
        "model": report.model and str(report.model),
        "workers": {name: asdict(footprint) for name, footprint in report.footprints.items()},
    }


def _print(report: Report, file: ConfigFile, settings: ClusterConfig) -> None:
    if report.model is not None:
        click.echo(f"model: {report.model}")
    for name, own in report.footprints.items():
        weights, kv = (f"{num_bytes / 1e9:.2f} GB" for num_bytes in (own.weight_bytes, own.kv_bytes))
        room = f"{own.num_full_requests:.1f} requests of {own.max_model_len} tokens at once"
        click.echo(f"{name}: {weights} of weights, {kv} of KV in {own.num_blocks} blocks, room for {room}")
    _print_findings("caveat", report.caveats, file)
    _print_findings("problem", report.problems, file)
    names = ", ".join(settings.worker_roles())
    click.echo(f"{file.source} {'cannot' if report.problems else 'can'} be served here: {names}")


def _print_findings(kind: str, found: Sequence[Finding], file: ConfigFile) -> None:
    for one in found:
        click.echo(f"{kind}: {file.at(tuple(one.key.split('.')))}: {one.message}")
