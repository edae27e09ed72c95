"""`kvferry certs`, and files of certificates that cannot be used: found before anything starts, each with its mend."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from cluster import certs
from cluster.cli import run
from cluster.config import ClusterConfig
from tests.security.certificates import Certificates
from workers.errors import ConfigError
from workers.security_config import SecurityConfig
from workers.tls import Membership, membership


def test_what_it_makes_is_what_a_config_and_a_client_take(tmp_path, capsys):
    assert run(["certs", str(tmp_path / "made"), "--cluster", "one", "--host", "gpu1.lan", "--host", "10.0.0.7"]) == 0
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() if not line.startswith("#")]
    config = ClusterConfig(name="one", **yaml.safe_load(lines[0]))
    assert membership(config.security, config.name) is not None
    assert lines[1] == f"export KVFERRY_TLS={tmp_path / 'made/client'}"
    assert "ca.key signs for all" in told.err
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"authority", "members", "client"}
    for key in (tmp_path / "made").rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0, key


def test_nothing_is_overwritten_unless_renewal_is_asked_for(tmp_path, capsys):
    made = tmp_path / "made"
    assert run(["certs", str(made), "--host", "gpu1"]) == 0
    before = {path: path.read_bytes() for path in made.rglob("*.*")}
    assert run(["certs", str(made)]) == run(["certs", str(made), "--client", "client"]) == 2
    assert "is there already: --renew" in capsys.readouterr().err
    assert run(["certs", str(made), "--client", "bob"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    names = x509.load_pem_x509_certificate(before[made / "members/tls.crt"])
    assert run(["certs", str(made), "--renew", "--days", "5"]) == 0
    renewed = x509.load_pem_x509_certificate((made / "members/tls.crt").read_bytes())
    assert renewed.serial_number != names.serial_number
    assert list(renewed.extensions) == list(names.extensions)
    assert renewed.not_valid_after_utc - datetime.now(UTC) < timedelta(days=5)
    assert (made / "authority/ca.crt").read_bytes() == before[made / "authority/ca.crt"]
    Membership(made / "members", "kvferry")


@pytest.mark.parametrize(
    "arguments",
    [["--client", "members"], ["--client", "a/b"], ["--cluster", "a.b"], ["--host", "no host"], ["--renew"]],
)
def test_what_it_cannot_make_is_refused_in_one_line(tmp_path, capsys, arguments):
    assert run(["certs", str(tmp_path / "made"), *arguments]) == 2
    assert capsys.readouterr().err.startswith("kvferry: ")
    assert not list(tmp_path.rglob("tls.key"))


def broken(ours: Certificates, foreign: Certificates, how: str) -> tuple[Path, str]:
    """A folder, and what must be said of it."""
    folder = ours.member()
    if how == "missing":
        (folder / "tls.key").unlink()
        return folder, "tls.key: No such file or directory"
    if how == "no PEM":
        (folder / "tls.crt").write_bytes(b"nonsense")
        return folder, "tls.crt cannot be read as PEM"
    if how == "another's key":
        shutil.copy(ours.client() / "tls.key", folder)
        return folder, "tls.key is not the key of the certificate in tls.crt"
    if how == "another authority":
        shutil.copy(foreign.member() / "ca.crt", folder)
        return folder, "tls.crt is not signed by the authority in ca.crt"
    if how == "a client's":
        return ours.client(), "tls.crt is of no cluster; it needs one.cluster.kvferry"
    assert how == "another cluster's"
    return ours.member("two"), "tls.crt is of two.cluster.kvferry; it needs one.cluster.kvferry"


FAULTS = ["missing", "no PEM", "another's key", "another authority", "a client's", "another cluster's"]


@pytest.mark.parametrize("how", FAULTS)
def test_files_that_do_not_do_are_refused_with_what_is_wrong(ours: Certificates, foreign: Certificates, how):
    folder, said = broken(ours, foreign, how)
    with pytest.raises(ConfigError, match=r"kvferry certs") as caught:
        membership(SecurityConfig(tls=str(folder)), "one")
    assert said in caught.value.message
    assert caught.value.param == "security.tls"


def test_a_certificate_that_ran_out_is_refused(ours: Certificates, monkeypatch):
    monkeypatch.setattr(certs, "_EARLIER", timedelta(days=2))
    certs.issue_member(ours.authority, ours.folder / "old", "one", [], -1)
    with pytest.raises(ConfigError, match=r"tls\.crt ran out on 20"):
        Membership(ours.folder / "old", "one")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file; runs as any other user")
def test_a_key_that_may_not_be_read_is_refused(ours: Certificates):
    folder = ours.member()
    (folder / "tls.key").chmod(0)
    with pytest.raises(ConfigError, match=r"tls\.key: Permission denied"):
        Membership(folder)


def test_config_check_and_up_refuse_them_before_anything_starts(ours: Certificates, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "c.yaml"
    ours.member()
    shutil.copy(ours.client() / "tls.key", ours.folder / "one")
    path.write_text(f"name: one\nrouter: {{http_port: 0, grpc_port: 0}}\nsecurity:\n  tls: {ours.folder / 'one'}\n")
    assert run(["config", "check", str(path), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == "security.tls"
    assert run(["up", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvferry: security.tls: tls.key is not the key")
    assert not (tmp_path / ".kvferry/one/state.json").exists()


@pytest.mark.parametrize("transport", ["nccl", "gloo", "nixl"])
def test_what_cannot_be_encrypted_is_refused_beside_tls(transport):
    device = "cuda" if transport == "nccl" else "cpu"
    settings: dict[str, Any] = {"device": device, "transfer": {"transport": transport}, "security": {"tls": "/certs"}}
    with pytest.raises(ValueError, match=r"cannot be encrypted.*trusted_network: true"):
        ClusterConfig(**settings)
    settings["security"]["trusted_network"] = True
    assert ClusterConfig(**settings).transfer.transport == transport
    del settings["security"]
    assert ClusterConfig(**settings).security.tls is None


def test_a_ray_that_is_joined_must_speak_tls_too(tmp_path, capsys, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text("address: 127.0.0.1:1\nsecurity: {tls: /nowhere}\n")

    def problems() -> list[str]:
        assert run(["config", "check", str(path), "--json"]) == 1
        return [one["message"] for one in json.loads(capsys.readouterr().out)["problems"]]

    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert "RAY_USE_TLS=1" in problems()[0]
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        monkeypatch.delenv(name, raising=False)
    assert "RAY_USE_TLS is set without RAY_TLS_SERVER_CERT and" in problems()[0]
    path.write_text("address: 127.0.0.1:1\nsecurity: {tls: /nowhere, trusted_network: true}\n")
    assert len(problems()) == 1
