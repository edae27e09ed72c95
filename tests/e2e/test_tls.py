"""A cluster with security.tls and router.api_keys: every port of it, who gets in, and what is kept secret."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from cluster.client import Client
from protos import worker_pb2, worker_pb2_grpc
from tests.e2e.clusters import RealCluster
from tests.security.certificates import Certificates
from tests.security.strangers import context_of, foreign_context, got_from
from workers.errors import UnavailableError

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Guarded:
    cluster: RealCluster
    certs: Path
    key: str
    http: str
    grpc: str

    @property
    def client(self) -> Path:
        return self.certs / "client"

    def https(self) -> httpx.Client:
        return httpx.Client(verify=context_of(self.client), trust_env=False, base_url=self.http)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    home = tmp_path_factory.mktemp("guarded")
    bare = RealCluster("tls-test", home)
    made = bare.kvferry("certs", home / "certs", "--cluster", bare.name)
    assert made.returncode == 0, made.stderr
    key, line = bare.kvferry("keys", "new", "--tenant", "ann", "--admin").stdout.split("\n\n")
    (home / "keys.yaml").write_text(f"keys:\n{line.splitlines()[-1]}\n")
    cluster = RealCluster(bare.name, home, {"KVFERRY_API_KEY": key.strip()})
    security = next(line for line in made.stdout.splitlines() if line.startswith("security:"))
    router = f"router: {{http_port: 0, grpc_port: 0, api_keys: {home / 'keys.yaml'}}}"
    started = cluster.kvferry("up", cluster.write_config(f"{router}\n{security}\n"), "--detach")
    try:
        assert (started.returncode, started.stderr) == (0, ""), started
        status = json.loads(cluster.kvferry("status", "--name", cluster.name, "--json").stdout)
        endpoints = status["endpoints"]
        yield Guarded(cluster, home / "certs", key.strip(), endpoints["http"], endpoints["grpc"])
    finally:
        cluster.kvferry("down", "--name", cluster.name)
    assert not cluster.processes()


def listeners(cluster: RealCluster) -> dict[tuple[str, int], str]:
    """Every address and TCP port on which a process of the cluster listens, and its command line."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].rpartition(":")
                inodes[f"socket:[{fields[9]}]"] = address, int(port, 16)
    found = {}
    for pid, command in cluster.processes().items():
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                place = inodes.get(os.readlink(descriptor))
            except OSError:
                continue
            if place:
                found[place] = command
    return found


def is_refused_by_ray(command: str, said: bytes) -> bool:
    """Its agent for environments speaks HTTP in plain text, to who has Ray's token."""
    return command.startswith("ray::RuntimeEnv") and said.startswith(b"HTTP/1.1 401 ")


def test_no_port_of_any_process_answers_a_stranger(guarded: Guarded, tmp_path: Path):
    foreign = Certificates(tmp_path / "foreign")
    members = guarded.certs / "members"
    strangers = {
        "in plain text": None,
        "without a certificate": context_of(members, certificate=False),
        "a member by a foreign authority": foreign_context(members, foreign.member(guarded.cluster.name)),
    }
    found = listeners(guarded.cluster)
    assert len(found) >= 6
    # 127.0.0.1, also as IPv6 writes it.
    assert {address[-8:] for address, _ in found} == {"0100007F"}, found
    answered = {
        (port, who, command): said
        for (_, port), command in found.items()
        for who, context in strangers.items()
        if (said := got_from(port, context)) and not is_refused_by_ray(command, said)
    }
    assert answered == {}


def test_a_client_may_not_speak_to_workers(guarded: Guarded):
    ca, certificate, key = ((guarded.client / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    with Client(guarded.grpc, tls=guarded.client, api_key=guarded.key) as client:
        workers = client.status().workers
    for worker in workers:
        with grpc.secure_channel(worker.address, grpc.ssl_channel_credentials(ca, key, certificate)) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetStats(worker_pb2.GetStatsRequest(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_commands_beside_it_need_nothing_said(guarded: Guarded, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi", "max_tokens": 4}\n')
    name = ("--name", guarded.cluster.name)
    for command in (
        ("generate", "Hi", "--max-tokens", "8"),
        ("status",),
        ("submit", tmp_path / "prompts.jsonl", "--wait"),
        ("jobs",),
        ("verify",),
    ):
        done = guarded.cluster.kvferry(*command, *name)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout


def test_others_show_a_clients_certificate(guarded: Guarded):
    with Client(guarded.grpc, tls=guarded.client, api_key=guarded.key) as client:
        text = client.generate("Hello", max_tokens=8, temperature=0.0).text
    by_openai = openai.DefaultHttpxClient(verify=context_of(guarded.client), trust_env=False)
    with openai.OpenAI(base_url=f"{guarded.http}/v1", api_key=guarded.key, http_client=by_openai) as api:
        (model,) = api.models.list().data
        answer = api.completions.create(model=model.id, prompt="Hello", max_tokens=8, temperature=0)
        assert answer.choices[0].text == text
    with guarded.https() as http:
        assert http.get("/v1/models").status_code == 401
    with pytest.raises(UnavailableError, match="KVFERRY_TLS"), Client(guarded.grpc, api_key=guarded.key) as client:
        client.status()


def test_certificates_are_renewed_while_it_serves(guarded: Guarded):
    with Client(guarded.grpc, tls=guarded.client, api_key=guarded.key) as client:
        chunks = client.stream("Hello", max_tokens=200, ignore_eos=True)
        next(chunks)
        renewed = guarded.cluster.kvferry("certs", guarded.certs, "--renew")
        assert renewed.returncode == 0, renewed.stderr
        assert client.status().ready
        assert sum(len(chunk.token_ids) for chunk in chunks) > 100
    done = guarded.cluster.kvferry("generate", "Hi", "--max-tokens", "8", "--name", guarded.cluster.name)
    assert done.returncode == 0, done.stderr


def told_by(guarded: Guarded) -> dict[str, str]:
    """All that a cluster says of itself: its logs, Ray's, status, metrics, and its errors."""
    cluster, told = guarded.cluster, {}
    sessions = {Path(word) for line in cluster.processes().values() for word in line.split() if "/session_" in word}
    folders = {Path(*path.parts[: index + 1]) for path in sessions for index, part in enumerate(path.parts)
               if part.startswith("session_")}  # fmt: skip
    for folder in (cluster.home / ".kvferry" / cluster.name, *(folder / "logs" for folder in folders)):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".sqlite":
                told[str(path)] = path.read_text(errors="replace")
    name = ("--name", cluster.name)
    for command in (("status", "--json"), ("verify", "--json"), ("jobs", "--json")):
        told[command[0]] = cluster.kvferry(*command, *name).stdout
    told["config show"] = cluster.kvferry("config", "show", cluster.home / f"{cluster.name}.yaml").stdout
    with guarded.https() as http:
        key = {"authorization": f"Bearer {guarded.key}"}
        told["metrics"] = http.get("/metrics", headers=key).text
        told["wrong"] = http.post("/v1/completions", headers=key, json={"model": 1}).text
        told["no key"] = http.get("/metrics", headers={"authorization": f"Bearer {guarded.key}x"}).text
    return told


def secrets_of(guarded: Guarded) -> dict[str, str]:
    found = {"API key": guarded.key}
    for path in guarded.certs.rglob("*.key"):
        found[str(path)] = path.read_text().splitlines()[1]
    for pid in guarded.cluster.processes():
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(b"RAY_AUTH_TOKEN="):
                found["Ray's token"] = line.partition(b"=")[2].decode()
    return found


def test_no_secret_is_told(guarded: Guarded):
    secrets, told = secrets_of(guarded), told_by(guarded)
    assert {"API key", "Ray's token"} < secrets.keys()
    assert len(told) > 10
    assert [(name, where) for where, text in told.items() for name, secret in secrets.items() if secret in text] == []
