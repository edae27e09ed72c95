"""What a client shows to a router, and that it takes new certificates without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from cluster.certs import issue_client, issue_member, open_authority
from cluster.client import AsyncClient, Client
from protos import router_pb2, router_pb2_grpc
from tests.security.certificates import DAYS, Certificates
from workers.errors import ConfigError


class Router(router_pb2_grpc.RouterServiceServicer):
    def GetStatus(self, request: Any, context: Any) -> router_pb2.GetStatusResponse:  # noqa: N802
        (name,) = context.auth_context()["x509_common_name"]
        return router_pb2.GetStatusResponse(name=name.decode())


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[int]:
    ca, certificate, key = ((folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    server = grpc.server(ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServiceServicer_to_server(cast(Any, Router)(), server)
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    bound = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait()


def replaced(ours: Certificates) -> None:
    """Everybody's files, by those of a new authority."""
    authority = open_authority(ours.folder / "new authority")
    issue_member(authority, ours.folder / "one", "one", [], DAYS)
    issue_client(authority, ours.folder / "client", "bob", DAYS)


def test_a_client_goes_on_with_new_certificates(ours: Certificates):
    member, folder = ours.member(), ours.client()
    with serving(member) as port:
        client = Client(f"127.0.0.1:{port}", tls=folder)
        assert client.status().name == "ann"
    replaced(ours)
    with serving(member, port), client:
        assert client.status().name == "bob"


def test_an_async_client_goes_on_with_new_certificates(ours: Certificates):
    async def main() -> None:
        member, folder = ours.member(), ours.client()
        with serving(member) as port:
            client = AsyncClient(f"127.0.0.1:{port}", tls=folder)
            assert (await client.status()).name == "ann"
        replaced(ours)
        with serving(member, port):
            async with client:
                assert (await client.status()).name == "bob"

    asyncio.run(main())


def test_the_environment_names_the_folder_and_an_argument_goes_before_it(ours: Certificates, monkeypatch):
    with serving(ours.member()) as port:
        monkeypatch.setenv("KVFERRY_TLS", str(ours.client()))
        with Client(f"127.0.0.1:{port}") as client:
            assert client.status().name == "ann"
        with Client(f"127.0.0.1:{port}", tls=ours.member()) as client:
            assert client.status().name == "one"


def test_a_folder_without_its_files_is_said_to_be_so(tmp_path):
    with pytest.raises(ConfigError, match=r"tls: .*ca\.crt: No such file"):
        Client(tls=tmp_path)
