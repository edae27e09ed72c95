"""One contestant at a time: started, waited for, stopped with all that stems from it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.compare.contestant import MODEL_NAME, Command, Contestant, free_ports
from cluster.bench.load import Clients, Target, Workload, load
from cluster.guard import descendants, start_time
from workers.errors import KVFerryError

_POLL_S = 0.1
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_ONE_TOKEN = Workload(num_requests=1, num_prompt_tokens=4, max_tokens=1)
# What a server does only once, allocators and compilers, is no part of any load.
_WARM_UP = Workload(num_requests=2, num_prompt_tokens=256, max_tokens=8)


@dataclass(frozen=True, slots=True)
class Running:
    target: Target
    # From the start of its processes to the end of its first answer, of one token.
    ready_s: float


@contextmanager
def running(contestant: Contestant, folder: Path) -> Iterator[Running]:
    """Ready and warm inside the `with`, gone after it. Raises KVFerryError when it does not start."""
    port = free_ports(1)[0]
    commands = contestant.commands(folder, port)
    target = Target(f"http://127.0.0.1:{port}", MODEL_NAME)
    with ExitStack() as stack:
        began_s = time.monotonic()
        logs = [folder / f"{contestant.label.replace(' ', '-')}-{i}.log" for i in range(len(commands))]
        started = [
            (stack.enter_context(_process(command, log)), log) for command, log in zip(commands, logs, strict=True)
        ]
        _wait_until_answers(target, started, began_s + _START_TIMEOUT_S)
        ready_s = time.monotonic() - began_s
        asyncio.run(load(target, _WARM_UP, Clients(1)))
        yield Running(target, ready_s)


def _wait_until_answers(target: Target, started: Sequence[tuple[subprocess.Popen[bytes], Path]], end_s: float) -> None:
    while True:
        for process, log in started:
            if process.poll() is not None:
                said = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
                raise KVFerryError(f"it ended with {process.returncode} before it answered: {said}; see {log}")
        sample = asyncio.run(load(target, _ONE_TOKEN, Clients(1))).samples[0]
        if not sample.error:
            return
        if time.monotonic() > end_s:
            raise KVFerryError(f"no answer within {_START_TIMEOUT_S:.0f} s ({sample.error}); see {started[0][1]}")
        time.sleep(_POLL_S)


@contextmanager
def _process(command: Command, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own: the terminal's Ctrl-C reaches us alone, and we end it in order."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **command.env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asked first; what is left of its group and of its descendants, in whatever group they are, is killed."""
    family = {pid: start_time(pid) for pid in descendants(process.pid)}
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = {pid: started for pid, started in family.items() if started is not None}
    while left := {pid: started for pid, started in left.items() if start_time(pid) == started}:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
