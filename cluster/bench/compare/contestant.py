"""Who takes part in the comparison, and the commands that start them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

# What every one of them is asked for the model by.
MODEL_NAME = "smol"
# Of prompt and answer together, and how many requests may run at once.
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 32


@dataclass(frozen=True, slots=True)
class Command:
    arguments: Sequence[str]
    # Beside those of this process.
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server in one setting. `commands`: from a folder to write to and the port of 127.0.0.1 where it shall answer
    to what its processes are; they are all started at once."""

    name: str
    # colocated, or 1P1D: prefill and decode apart, with half of the cores each.
    mode: str
    precision: str
    commands: Callable[[Path, int], Sequence[Command]]

    @property
    def label(self) -> str:
        return f"{self.name} {self.mode} {self.precision}"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
