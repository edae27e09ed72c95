"""Who may speak to whom in a cluster, and what of it is encrypted."""

from __future__ import annotations

import os

from pydantic import field_validator

from workers.strict import Strict

# They speak to each other past gRPC, in plain text.
NEVER_ENCRYPTED = ("nccl", "gloo", "nixl")


class SecurityConfig(Strict):
    tls: str | None = None
    """A folder with ca.crt, tls.crt and tls.key (`kvferry certs`, cert-manager), read again when they change: every
    port then speaks TLS, to those only who show a certificate of that authority. null: plain text, to whoever comes."""
    trusted_network: bool = False
    """With tls: whether what cannot be encrypted may be used all the same: transports nccl, gloo and nixl, and a Ray
    that is joined without TLS of its own."""

    @field_validator("tls")
    @classmethod
    def _folder_from_here(cls, folder: str | None) -> str | None:
        """Other processes may be in another folder."""
        return folder and os.path.abspath(os.path.expanduser(folder))

    def plain_transport(self, transport: str) -> str:
        """What is wrong with KV that would leave in plain text; empty: nothing."""
        if not self.tls or self.trusted_network or transport not in NEVER_ENCRYPTED:
            return ""
        return (
            f"transfer.transport: {transport} cannot be encrypted, and security.tls is set: use grpc, shm or auto, or "
            "set security.trusted_network: true"
        )
