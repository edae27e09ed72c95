"""Whom a client trusts, and what it shows to a router that asks for a certificate."""

from __future__ import annotations

import os
from pathlib import Path

import grpc

from workers.errors import ConfigError
from workers.tls import TlsFolder

# A folder with ca.crt, tls.crt and tls.key (what a cluster with security.tls asks for), a file of certificates to trust
# (PEM), True: those that this machine trusts, or False: plain text.
Tls = bool | str | Path


class ClientTls:
    def __init__(self, tls: Tls | None) -> None:
        """None: what KVFERRY_TLS says, if anything; else plain text. Raises ConfigError when `tls` cannot be read."""
        if tls is None:
            tls = os.environ.get("KVFERRY_TLS") or False
        self._folder: TlsFolder | None = None
        self._fixed: grpc.ChannelCredentials | None = None
        if isinstance(tls, bool):
            self._fixed = grpc.ssl_channel_credentials() if tls else None
        elif Path(tls).is_dir():
            self._folder = TlsFolder(Path(tls))
        else:
            self._fixed = grpc.ssl_channel_credentials(_read(Path(tls)))

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: plain text."""
        return self._folder.channel_credentials() if self._folder else self._fixed

    def refresh(self) -> bool:
        """Whether there are others now: files of the folder have changed."""
        return self._folder is not None and self._folder.refresh()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"tls: {path}: {exc.strerror}; give a folder with ca.crt, tls.crt and tls.key, a file of certificates "
            "(PEM), or true",
            param="tls",
        ) from None
