"""Which transport two workers take, from what each allows and can."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from tests.factories import make_request, make_worker
from tests.fake_model import expected_tokens
from tests.workers.pair import copy_of
from workers.config import TransferConfig
from workers.errors import ConfigError, LayoutMismatchError
from workers.kv_transfer.available import open_transports
from workers.kv_transfer.base import Refusal
from workers.kv_transfer.nccl import NcclTransport
from workers.kv_transfer.pair_group import Gloo
from workers.kv_transfer.shm import ShmTransport


def ask(prefill_setting: str, decode_setting: str) -> tuple[list[int], list[str]]:
    """The tokens of one answer, and the transports in use."""

    async def main() -> tuple[list[int], list[str]]:
        network = SimNetwork()
        prefill, decode = (
            make_worker(network.host(), incarnation=f"{i:032x}", transfer={"transport": setting})
            for i, setting in enumerate((prefill_setting, decode_setting))
        )
        await prefill.start()
        await decode.start()
        request = make_request(20)
        try:
            grant = decode.reserve(copy_of(request))
            (first,) = await prefill.prefill(copy_of(request), grant)
            tokens = list(first.token_ids)
            async for step in decode.outputs.stream("router-1"):
                tokens += [token for output in step for token in output.token_ids]
                if step[-1].finish_reason:
                    break
            return tokens, [peer.transport for peer in prefill.stats().peers]
        finally:
            await prefill.stop()
            await decode.stop()

    return run(main())


@pytest.mark.parametrize(
    ("prefill", "decode", "taken"),
    [
        ("auto", "auto", "shm"),
        ("auto", "grpc", "grpc"),
        ("grpc", "auto", "grpc"),
        ("shm", "auto", "shm"),
        ("auto", "shm", "shm"),
        ("shm", "shm", "shm"),
        ("grpc", "grpc", "grpc"),
    ],
)
def test_the_best_that_both_allow_is_taken_and_told(prefill, decode, taken):
    request = make_request(20)
    assert ask(prefill, decode) == (expected_tokens(request.prompt_token_ids, request.params), [taken])


@pytest.mark.parametrize(("prefill", "decode"), [("shm", "grpc"), ("grpc", "shm")])
def test_two_that_have_none_in_common_are_refused_by_name(prefill, decode):
    with pytest.raises(LayoutMismatchError, match=f"cannot go by {prefill} .* takes nothing from here") as caught:
        ask(prefill, decode)
    assert caught.value.param == "transport"


def test_another_host_is_served_by_grpc_when_auto_and_refused_when_shm_is_forced(monkeypatch):
    # Two hosts are two worlds of process ids: what one offers, the other cannot open.
    monkeypatch.setattr(ShmTransport, "refusal", lambda self, offer: Refusal("it is on another host"))
    assert ask("auto", "auto")[1] == ["grpc"]
    with pytest.raises(LayoutMismatchError, match="cannot go by shm"):
        ask("shm", "auto")


def test_a_machine_without_shared_memory_says_so_at_once(monkeypatch):
    def no_memfd(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", no_memfd)
    network = SimNetwork().host()
    with pytest.raises(ConfigError, match=r"memfd .* set transfer\.transport: grpc"):
        open_transports(TransferConfig(transport="shm"), "cpu", network, "a" * 32)
    assert list(open_transports(TransferConfig(transport="auto"), "cpu", network, "a" * 32).offers()) == ["grpc"]


def test_nccl_asked_for_by_name_is_refused_where_there_are_no_gpus():
    network = SimNetwork().host()
    nccl = TransferConfig(transport="nccl")
    with pytest.raises(ConfigError, match=r"device is cpu; set device: cuda, or transfer\.transport: gloo") as caught:
        open_transports(nccl, "cpu", network, "a" * 32)
    assert caught.value.param == "transfer.transport"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without an NVIDIA GPU")
def test_nccl_is_for_who_names_it_and_says_what_it_needs():
    network = SimNetwork().host()
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU .* set transfer\.transport: grpc"):
        open_transports(TransferConfig(transport="nccl"), "cuda", network, "a" * 32)
    transports = open_transports(TransferConfig(transport="auto"), "cuda", network, "a" * 32)
    assert list(transports.offers()) == ["shm", "grpc"]


def test_gloo_is_taken_only_by_two_that_ask_for_it():
    with pytest.raises(LayoutMismatchError, match="cannot go by shm, grpc"):
        ask("auto", "gloo")
    with pytest.raises(LayoutMismatchError, match="cannot go by gloo"):
        ask("gloo", "auto")


def test_one_gpu_is_not_both_ends_of_a_group():
    class Card(Gloo):
        def __init__(self, uuid: bytes) -> None:
            self.uuid = uuid

        def identity(self) -> bytes:
            return self.uuid

    network = SimNetwork().host()
    one, other = (NcclTransport(Card(uuid), network, "a" * 32) for uuid in (b"GPU-1", b"GPU-2"))
    assert one.refusal(other.offer()) is None
    assert one.refusal(one.offer()) == Refusal("both are on one GPU, which NCCL takes once")


def test_the_other_transports_do_not_load_torch():
    script = """
import sys
from tests.factories import make_config
from workers.worker import Worker
for transport in ("auto", "grpc", "shm"):
    Worker(make_config(transfer={"transport": transport}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
