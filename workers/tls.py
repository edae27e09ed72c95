"""Mutual TLS: every process of a cluster shows a certificate of one authority, and speaks to those only who do.

The authority signs for members of the cluster and for its clients. A member has a certificate with the cluster's name,
NAME.cluster.kvferry, among its names; clients have one without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from workers.errors import ConfigError

if TYPE_CHECKING:
    from workers.security_config import SecurityConfig

logger = logging.getLogger(__name__)

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
MEMBER_SUFFIX = ".cluster.kvferry"
_KEY = "security.tls"


@dataclass(frozen=True, slots=True)
class Pems:
    ca: bytes
    certificate: bytes
    key: bytes


def _whatever(pems: Pems) -> None:
    """TLS itself refuses what does not fit."""


class TlsFolder:
    """ca.crt, tls.crt and tls.key of a folder, read again when they change."""

    def __init__(self, path: Path, check: Callable[[Pems], None] = _whatever, param: str = "tls") -> None:
        """`check` raises ConfigError, as this does when a file cannot be read; `param`: who named the folder."""
        self.path = path
        self._check = check
        self._param = param
        self._stamp = self._refused = self._stamp_now()
        self.pems = self._read()

    def refresh(self) -> bool:
        """Whether there are others now. What is half-written or wrong is not taken: the former ones stay."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        try:
            pems = self._read()
        except ConfigError as error:
            if stamp != self._refused:
                logger.warning("%s; the former ones are used on", error.message)
                self._refused = stamp
            return False
        self._stamp, changed, self.pems = stamp, pems != self.pems, pems
        return changed

    def channel_credentials(self) -> grpc.ChannelCredentials:
        pems = self.pems
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)

    def _read(self) -> Pems:
        files = []
        for name in (CA, CERTIFICATE, KEY):
            try:
                files.append((self.path / name).read_bytes())
            except OSError as exc:
                raise ConfigError(
                    f"{self._param}: {self.path / name}: {exc.strerror}; `kvferry certs` makes such files",
                    param=self._param,
                ) from None
        pems = Pems(*files)
        self._check(pems)
        return pems

    def _stamp_now(self) -> tuple[tuple[int, int], ...]:
        """Of files, or of links to them, which are what cert-manager's secrets are."""
        try:
            stats = [(self.path / name).stat() for name in (CA, CERTIFICATE, KEY)]
        except OSError:
            return ()
        return tuple((stat.st_ino, stat.st_mtime_ns) for stat in stats)


class Membership:
    """With what a process shows that it is of its cluster, and knows who else is."""

    def __init__(self, folder: Path, cluster: str = "") -> None:
        """`cluster`: its `name:`; empty: whichever the certificate names. Raises ConfigError."""
        self._name = cluster and cluster + MEMBER_SUFFIX
        self.files = TlsFolder(folder, self._require, _KEY)

    @property
    def name(self) -> str:
        """Whoever is of the cluster has it in its certificate."""
        return self._name

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server to which only those come who have a certificate of the same authority."""

        def latest() -> grpc.ServerCertificateConfiguration:
            # Called with each new connection, on a thread of gRPC's.
            self.files.refresh()
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), latest, require_client_authentication=True
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self.files.pems
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.ca)

    def _require(self, pems: Pems) -> None:
        from workers.certificates import dns_names, fault_of

        problem = fault_of(pems.ca, pems.certificate, pems.key)
        if not problem:
            members = [name for name in dns_names(pems.certificate) if name.endswith(MEMBER_SUFFIX)]
            if len(members) != 1 or (self._name and members != [self._name]):
                wanted = self._name or f"one name NAME{MEMBER_SUFFIX}"
                problem = f"{CERTIFICATE} is of {' and '.join(members) or 'no cluster'}; it needs {wanted}"
            else:
                (self._name,) = members
        if problem:
            raise ConfigError(f"{_KEY}: {problem}; `kvferry certs` makes such files", param=_KEY)


def membership(security: SecurityConfig, cluster: str = "") -> Membership | None:
    """None: plain text. Raises ConfigError."""
    return Membership(Path(security.tls), cluster) if security.tls else None
