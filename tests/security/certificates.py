"""Authorities and what they sign, for tests."""

from __future__ import annotations

from pathlib import Path

from cluster.certs import issue_client, issue_member, open_authority

DAYS = 2


class Certificates:
    """Of one authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = open_authority(folder / "authority")

    def member(self, cluster: str = "one", into: str = "") -> Path:
        folder = self.folder / (into or cluster)
        issue_member(self.authority, folder, cluster, [], DAYS)
        return folder

    def client(self) -> Path:
        issue_client(self.authority, self.folder / "client", "ann", DAYS)
        return self.folder / "client"
