"""How clients come to a router: by TLS, with a key, and at whichever of several addresses one answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

import cluster
from cluster.client import AsyncClient, Client
from protos import router_pb2 as pb
from tests.cluster.fake_router import WORDS, serving
from workers import errors


def kept_status(request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
    """For who has the key."""
    if ("authorization", "Bearer sesame") not in list(context.invocation_metadata()):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong API key")
    return pb.GetStatusResponse(name="kept")


@contextmanager
def tls_server(ca: trustme.CA) -> Iterator[str]:
    certificate = ca.issue_cert("localhost")
    key, chain = certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()
    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(
        kept_status, pb.GetStatusRequest.FromString, pb.GetStatusResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("kvferry.v1.RouterService", {"GetStatus": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(None)


def trusted(ca: trustme.CA, folder: Path) -> Path:
    path = folder / "ca.pem"
    path.write_bytes(ca.cert_pem.bytes())
    return path


def test_both_clients_speak_tls_and_show_their_key(tmp_path):
    async def status(target: str, **how: Any) -> str:
        async with AsyncClient(target, **how) as client:
            return (await client.status()).name

    ca = trustme.CA()
    with tls_server(ca) as target:
        access: dict[str, Any] = {"tls": trusted(ca, tmp_path), "api_key": "sesame"}
        with Client(target, **access) as client:
            assert client.status().name == asyncio.run(status(target, **access)) == "kept"
        with Client(target, tls=access["tls"]) as client, pytest.raises(errors.AuthenticationError):
            client.status()


def test_a_router_whose_certificate_is_not_trusted_is_not_asked(tmp_path):
    with tls_server(trustme.CA()) as target:
        for tls in (trusted(trustme.CA(), tmp_path), True, None):
            with Client(target, tls=tls, api_key="sesame") as client, pytest.raises(errors.UnavailableError):
                client.status()


def test_a_file_of_certificates_that_is_not_there_is_said_to_be_so():
    with pytest.raises(errors.ConfigError, match="No such file"):
        Client(tls="nowhere.pem")


def gone() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_whichever_of_several_addresses_answers_is_asked():
    with serving() as router, Client(f"{gone()}, {router.target}") as client:
        assert client.generate("hi").text == "".join(WORDS)
        assert client.status().name == "fake"

    async def run(target: str) -> str:
        async with AsyncClient(target) as client:
            return (await client.generate("hi")).text

    with serving() as router:
        assert asyncio.run(run(f"{gone()},{router.target}")) == "".join(WORDS)


def test_where_none_of_them_answers_the_client_is_told_at_once():
    with Client(f"{gone()},{gone()}") as client, pytest.raises(errors.UnavailableError, match="no router answers at"):
        client.generate("hi")


def test_errors_have_openais_names_and_are_of_one_tree():
    import openai

    same = {
        "BadRequestError": errors.InvalidRequestError,
        "AuthenticationError": errors.AuthenticationError,
        "NotFoundError": errors.NotFoundError,
        "ConflictError": errors.ConflictError,
        "RateLimitError": errors.OverloadedError,
        "APIConnectionError": errors.UnavailableError,
        "APITimeoutError": errors.DeadlineError,
    }
    for name, ours in same.items():
        assert getattr(cluster, name) is ours
        assert issubclass(ours, cluster.APIError)
        assert issubclass(getattr(openai, name), openai.APIError)
