"""`python -m cluster.bench.transfer` (or `make bench-transfer`): how fast KV travels, beside what the machine can do.

Sender and receiver are two processes with a core each. The contestants take turns, round after round, so that whatever
else the machine does hits all alike; the best round of each counts. Every transport is production's whole path: chunks,
frames, checksums, credits, the fence, commit. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import click
import grpc.aio

from cluster.bench.transfer.far_side import WAYS, in_another_process, pin, serve_bench
from cluster.bench.transfer.model import measure_model, serve_model
from cluster.bench.transfer.ways import BareGrpc, Memcpy, Move, Socket, WholePath
from cluster.bench.transfer.workers import LAYOUT, PoolRunner, Way, frame_bytes, start_worker, worker_config
from cluster.certs import issue_member, open_authority
from workers.config import Role, TransferConfig
from workers.kv_transfer.local import LocalTransport
from workers.rpc import GrpcNetwork
from workers.tls import Membership
from workers.worker import Worker

_ROLES: tuple[Role, ...] = ("decode", "prefill")

# Name, bound, and what must hold between the value and it.
_GOALS: dict[str, tuple[Callable[[float, float], bool], float]] = {
    "grpc / bare grpc": (operator.ge, 0.7),
    "shm / memcpy": (operator.ge, 0.4),
    "shm without checksum / memcpy": (operator.ge, 0.7),
    "checksum's part of grpc's time": (operator.le, 0.15),
    "prefill slower by": (operator.le, 0.05),
    "unhidden part of the time to token 2": (operator.le, 0.05),
}


async def contestants(
    addresses: Mapping[str, str], num_tokens: int, certificates: Path, closing: AsyncExitStack
) -> dict[str, Move]:
    plain = GrpcNetwork()

    async def worker(role: Role, way: Way, runner: PoolRunner, local: LocalTransport | None = None) -> Worker:
        started = await start_worker(worker_config(role, way, certificates), runner, local)
        closing.push_async_callback(started.stop)
        return started

    async def channel(address: str, network: GrpcNetwork = plain, *, bulk: bool = False) -> grpc.aio.Channel:
        return await closing.enter_async_context(network.connect(address, bulk=bulk))

    bare = await channel(addresses["bare grpc"], bulk=True)
    moves: dict[str, Move] = {
        "memcpy": Memcpy(num_tokens),
        "socket": Socket(addresses["socket"], frame_bytes()),
        "bare grpc": BareGrpc(bare, frame_bytes(), TransferConfig().credits),
    }
    runner, local = PoolRunner(share_pool=True), LocalTransport()
    by_tls = GrpcNetwork(Membership(certificates))
    for name, way in WAYS.items():
        prefill = await worker("prefill", way, runner)
        moves[name] = WholePath(prefill, await channel(addresses[name], by_tls if way.tls else plain))
    # Who hands over is stopped first.
    decode, prefill = [await worker(role, Way("grpc"), runner, local) for role in _ROLES]
    moves["local"] = WholePath(prefill, await channel(decode.address))
    return moves


async def take_turns(
    addresses: Mapping[str, str], num_tokens: int, num_rounds: int, certificates: Path
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round."""
    async with AsyncExitStack() as closing:
        moves = await contestants(addresses, num_tokens, certificates, closing)
        seconds: dict[str, list[float]] = {name: [] for name in moves}
        for round_number in range(num_rounds + 1):
            for name, move in moves.items():
                began = time.perf_counter()
                await move(num_tokens)
                if round_number:  # The first connects, and finds memory that was never used.
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def transfer_figures(seconds: Mapping[str, list[float]], num_tokens: int) -> dict[str, dict[str, float]]:
    num_bytes = num_tokens * LAYOUT.token_bytes
    return {
        name: {
            "gb_per_s": round(num_bytes / min(times) / 1e9, 3),
            "s_per_1000_tokens": round(1000 * min(times) / num_tokens, 5),
            "median_s_per_1000_tokens": round(1000 * statistics.median(times) / num_tokens, 5),
        }
        for name, times in seconds.items()
    }


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "grpc / bare grpc": best["bare grpc"] / best["grpc"],
        "shm / memcpy": best["memcpy"] / best["shm"],
        "shm without checksum / memcpy": best["memcpy"] / best["shm without checksum"],
        "checksum's part of grpc's time": max(0.0, 1 - best["grpc without checksum"] / best["grpc"]),
    }


def cost_of_tls(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """How many times as long each transport takes with it."""
    best = {name: min(times) for name, times in seconds.items()}
    return {name: round(best[f"{name} with TLS"] / best[name], 3) for name in best if f"{name} with TLS" in best}


@click.command()
@click.option("--tokens", default=7168, show_default=True, help="KV handed over in each turn.")
@click.option("--rounds", default=20, show_default=True, help="Turns of each contestant.")
@click.option("--model-rounds", default=3, show_default=True, help="Turns with the default model; 0: none.")
def main(tokens: int, rounds: int, model_rounds: int) -> None:
    """GB/s and seconds per 1,000 tokens of KV for each transport, and what hand-offs cost prefill."""
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path(folder) / "members"
        issue_member(open_authority(Path(folder) / "authority"), certificates, "bench", (), 1)
        with in_another_process(functools.partial(serve_bench, certificates)) as addresses:
            pin(0)
            seconds = asyncio.run(take_turns(addresses, tokens, rounds, certificates))
    figures = transfer_figures(seconds, tokens)
    for name, row in figures.items():
        click.echo(f"{name:24} {row['gb_per_s']:7.2f} GB/s {row['s_per_1000_tokens']:9.4f} s per 1,000 tokens")
    tls = cost_of_tls(seconds)
    for name, times in tls.items():
        click.echo(f"{name} with TLS takes {times:.2f} times as long")
    values, model = ratios(seconds), {}
    if model_rounds:
        os.sched_setaffinity(0, cores)  # Another process has the cores of who starts it.
        with in_another_process(serve_model) as addresses:
            pin(0)
            model = asyncio.run(measure_model(addresses["decode"], model_rounds))
        values["prefill slower by"] = model["prefill_slower"]
        values["unhidden part of the time to token 2"] = model["unhidden_share"]
        click.echo(f"a prompt of 1,024 tokens: {model['arrival_to_token_2_s']:.2f} s from arrival to token 2")
        click.echo(f"a hand-off costs prefill {100 * model['prefill_more_cpu_time']:.1f} % of its core's time")
    goals = {name: _judge(name, value) for name, value in values.items()}
    run = {"tokens": tokens, "rounds": rounds}
    click.echo(json.dumps({**run, "ways": figures, "tls": tls, "model": model, "goals": goals}))


def _judge(name: str, value: float) -> dict[str, float | bool]:
    holds, bound = _GOALS[name]
    met = holds(value, bound)
    limit = "at least" if holds is operator.ge else "at most"
    click.echo(f"{name:38} {value:6.3f}  goal: {limit} {bound}: {'met' if met else 'missed'}")
    return {"value": round(value, 4), "goal": bound, "met": met}


if __name__ == "__main__":
    main()
