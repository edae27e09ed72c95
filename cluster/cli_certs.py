"""`kvferry certs`: a development authority, and certificates of it."""

from __future__ import annotations

import re
from pathlib import Path

import click

from cluster.cli_target import DEFAULT_NAME
from workers.errors import ConfigError, InvalidRequestError

_AUTHORITY, _MEMBERS, _CLIENT = "authority", "members", "client"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--cluster", default=DEFAULT_NAME, show_default=True, help="Its `name:`.")
@click.option("--host", multiple=True, help="A name or address by which clients know its routers. Repeatable.")
@click.option("--client", "clients", multiple=True, help="A client's name, at first: client. Repeatable.")
@click.option("--days", default=90, show_default=True, type=click.IntRange(1, 3650), help="Until they run out.")
@click.option("--renew", is_flag=True, help="New certificates and keys for all that FOLDER has.")
def certs(folder: Path, cluster: str, host: tuple[str, ...], clients: tuple[str, ...], days: int, renew: bool) -> None:
    """Make a development authority in FOLDER, and certificates of it for a cluster and its clients.

    FOLDER/members is for `security.tls` on every machine of the cluster; FOLDER/client is a client's (KVFERRY_TLS).
    Nothing is overwritten: more clients are added, and --renew replaces all, which needs no restart.
    """
    for name in (cluster, *clients):
        _require_name(name)
    if renew:
        if host or clients:
            raise InvalidRequestError("--renew goes with neither --host nor --client: it keeps what certificates name")
        _renew(folder, days)
    else:
        _make(folder, cluster, host, clients, days)


def _make(folder: Path, cluster: str, hosts: tuple[str, ...], clients: tuple[str, ...], days: int) -> None:
    from cluster.certs import issue_client, issue_member, open_authority

    members = folder / _MEMBERS
    if hosts or not (members.exists() and clients):
        _require_new(members)
        clients = clients or (_CLIENT,)
    for name in clients:
        _require_new(folder / name)
    authority = open_authority(folder / _AUTHORITY)
    if not members.exists():
        issue_member(authority, members, cluster, hosts, days)
        click.echo(f"# {members}: of every process of cluster {cluster}, for {days} days. In the config:")
        click.echo(f"security: {{tls: {members.resolve()}}}")
    for name in clients:
        issue_client(authority, folder / name, name, days)
        click.echo(f"# {folder / name}: of a client, for {days} days. In its environment:")
        click.echo(f"export KVFERRY_TLS={(folder / name).resolve()}")
    click.echo(f"{folder / _AUTHORITY / 'ca.key'} signs for all: keep it off the machines that serve", err=True)


def _renew(folder: Path, days: int) -> None:
    from cluster.certs import open_authority, renew
    from workers.tls import CERTIFICATE

    found = sorted(path.parent for path in folder.glob(f"*/{CERTIFICATE}"))
    if not found:
        raise ConfigError(f"{folder} has no certificates to renew; make some without --renew")
    authority = open_authority(folder / _AUTHORITY)
    for each in found:
        renew(authority, each, days)
        click.echo(f"# {each}: anew, for {days} days")


def _require_new(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} is there already: --renew makes it anew, --client NAME adds a client")


def _require_name(name: str) -> None:
    if name in (_AUTHORITY, _MEMBERS) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} cannot be the name of a cluster or a client: use 1 to 40 letters, digits, - and _, the first a "
            f"letter or digit, and neither {_AUTHORITY} nor {_MEMBERS}"
        )
