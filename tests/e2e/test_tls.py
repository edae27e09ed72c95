"""A cluster whose config says security.tls: every port of it, and who gets in."""

from __future__ import annotations

import json
import os
import socket
import ssl
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.client import Client
from protos import worker_pb2, worker_pb2_grpc
from tests.e2e.clusters import RealCluster
from workers.errors import UnavailableError

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def context_of(folder: Path, *, certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if certificate:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def ports_of(cluster: RealCluster) -> dict[int, str]:
    """Every TCP port on which a process of the cluster listens, and its command line."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = {}
    for pid, command in cluster.processes().items():
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                port = inodes.get(os.readlink(descriptor))
            except OSError:
                continue
            if port:
                found[port] = command
    return found


def speaks_tls_to_strangers(port: int, folder: Path) -> str:
    """What comes of a handshake without a certificate: "refused", or how far it got."""
    context = context_of(folder, certificate=False)
    context.check_hostname = False
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as wrapped,
        ):
            wrapped.settimeout(5)
            # TLS 1.3 tells of a missing certificate with the first read.
            wrapped.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            return f"answered {wrapped.recv(100)!r}"[:80] if wrapped.recv(1) else "refused"
    except OSError:
        return "refused"


def test_every_port_of_a_cluster_is_for_who_has_a_certificate(tmp_path: Path):
    cluster = RealCluster("tls-test", tmp_path)
    made = cluster.kvferry("certs", tmp_path / "certs", "--cluster", cluster.name, "--client", "ann")
    assert made.returncode == 0, made.stderr
    config = cluster.write_config(f"router: {{http_port: 0, grpc_port: 0}}\n{made.stdout.splitlines()[0]}\n")
    started = cluster.kvferry("up", config, "--detach")
    try:
        assert (started.returncode, started.stderr) == (0, ""), started
        answered = cluster.kvferry("generate", "Hi", "--max-tokens", "8", "--name", cluster.name)
        assert answered.returncode == 0, answered.stderr
        status = json.loads(cluster.kvferry("status", "--name", cluster.name, "--json").stdout)
        http, target = status["endpoints"]["http"], status["endpoints"]["grpc"]
        assert http.startswith("https://")
        ann, members = tmp_path / "certs/ann", tmp_path / "certs/members"

        with Client(target, tls=ann) as client:
            assert client.status().ready
        with pytest.raises(UnavailableError), Client(target) as client:
            client.status()
        with httpx.Client(verify=context_of(ann, certificate=True), trust_env=False) as client_of_http:
            models = client_of_http.get(f"{http}/v1/models")
            assert models.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{http}/v1/models", verify=context_of(ann, certificate=False), trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{http.replace('https', 'http')}/v1/models", trust_env=False)

        credentials = grpc.ssl_channel_credentials(
            *((ann / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
        )
        for worker in status["workers"]:
            with grpc.secure_channel(worker["address"], credentials) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                with pytest.raises(grpc.RpcError) as caught:
                    stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        ports = ports_of(cluster)
        assert len(ports) >= 4
        open_ones = {port: what for port, what in ports.items() if speaks_tls_to_strangers(port, members) != "refused"}
        assert open_ones == {}
    finally:
        cluster.kvferry("down", "--name", cluster.name)
