"""KV from one process to another on the same GPU, as the engine hands it over: by frames of some layers through memory
that both see, while the next frame is gathered, and while the next chunk is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from benchmarks.gpu_clock import seconds
from benchmarks.gpu_model import BLOCK_SIZE, RandomModel
from workers.engine.kv_staging import KVStaging
from workers.engine.layer_events import LayerEvents
from workers.kv_transfer.slots import slots_of

FRAME_BYTES = 4 << 20
# Frames under way: one is written while the next is read.
NUM_ROOMS = 3
TIMEOUT_S = 120


@dataclass(frozen=True)
class Pool:
    """Of the receiver, which has one of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def token_layer_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.shape[4] * self.shape[5] * self.dtype.itemsize


class Receiver:
    """A process that writes frames into its pool; a frame is (room, first layer, end layer)."""

    def __init__(self, pool: Pool, num_tokens: int) -> None:
        self.layers_per_frame = max(1, FRAME_BYTES // (pool.token_layer_bytes * num_tokens))
        self.room_bytes = self.layers_per_frame * pool.token_layer_bytes * num_tokens
        self.memory = SharedMemory(create=True, size=NUM_ROOMS * self.room_bytes)
        context = get_context("spawn")
        self.frames, theirs = context.Pipe()
        arguments = (theirs, self.memory.name, pool, num_tokens, self.room_bytes)
        self._process = context.Process(target=_receive, args=arguments)
        self._process.start()
        theirs.close()
        self.answer()

    def answer(self) -> object:
        """The next thing that it says. TimeoutError when it says nothing."""
        if not self.frames.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiving process said nothing for {TIMEOUT_S} s")
        return self.frames.recv()

    def close(self) -> None:
        self.frames.close()
        self._process.join(TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
        self.memory.close()
        self.memory.unlink()


def _receive(frames: Connection, memory_name: str, pool: Pool, num_tokens: int, room_bytes: int) -> None:
    memory = SharedMemory(memory_name)
    tensor = torch.zeros(pool.shape, dtype=pool.dtype, device=pool.device)
    staging = KVStaging(tensor)
    slots = list(range(num_tokens))
    frames.send("ready")
    while True:
        try:
            room, start, end = frames.recv()
        except EOFError:
            break
        size = (end - start) * pool.token_layer_bytes * num_tokens
        place = _view(memory)[room * room_bytes : room * room_bytes + size]
        staging.write(slots, slice(start, end), place)
        place.release()
        frames.send(_sum_of(tensor[start:end], slots))
    memory.close()


def hand_off(
    receiver: Receiver, pool: torch.Tensor, slots: list[int], staging: KVStaging, events: LayerEvents[Any]
) -> list[object]:
    """All layers of `slots`; what the receiver says of each frame."""
    answers: list[object] = []
    for number, start in enumerate(range(0, pool.shape[0], receiver.layers_per_frame)):
        if number >= NUM_ROOMS:
            answers.append(receiver.answer())
        end = min(start + receiver.layers_per_frame, pool.shape[0])
        offset = number % NUM_ROOMS * receiver.room_bytes
        size = pool[start:end, :, 0, 0].nbytes * len(slots)
        room = _view(receiver.memory)[offset : offset + size]
        staging.read(slots, slice(start, end), room, events.of(end))
        room.release()
        receiver.frames.send((number % NUM_ROOMS, start, end))
    num_frames = -(-pool.shape[0] // receiver.layers_per_frame)
    return answers + [receiver.answer() for _ in range(num_frames - len(answers))]


def hand_off_rows(model: RandomModel, num_tokens: int) -> Iterator[dict[str, object]]:
    """Of a prompt of so many tokens: computed, handed over, and both at once."""
    pool, cuda = model.pool, model.device.type == "cuda"
    slots = slots_of(torch.randperm(pool.shape[2]).tolist(), 0, num_tokens, BLOCK_SIZE).tolist()
    shape = (pool.shape[0], 2, -(-num_tokens // BLOCK_SIZE), *pool.shape[3:])
    receiver = Receiver(Pool(shape, pool.dtype, str(model.device)), num_tokens)
    try:
        staging = KVStaging(pool)
        events: LayerEvents[Any] = LayerEvents(pool.shape[0], torch.cuda.Event if cuda else _NoEvent)
        step = model.step([(0, num_tokens)])

        def compute() -> None:
            model.decoder.watch(events.layer_done)
            model.forward(step)

        def send() -> None:
            hand_off(receiver, pool, slots, staging, events)

        def compute_and_send() -> None:
            compute()
            send()

        sent = hand_off(receiver, pool, slots, staging, events)
        step_layers = receiver.layers_per_frame
        ok = sent == [_sum_of(pool[i : i + step_layers], slots) for i in range(0, pool.shape[0], step_layers)]
        prefill = seconds(compute, model.device, 3)
        alone = min(_wall_s(send, model.device) for _ in range(3))
        both = min(_wall_s(compute_and_send, model.device) for _ in range(3))
        num_bytes = pool[:, :, 0, 0].nbytes * num_tokens
        yield {
            "hand_off": num_tokens,
            "mb": num_bytes / 1e6,
            "ms": alone * 1e3,
            "gb_per_s": num_bytes / alone / 1e9,
            "prefill_ms": prefill * 1e3,
            "both_ms": both * 1e3,
            "not_hidden_ms": (both - prefill) * 1e3,
            "ok": ok,
        }
    finally:
        receiver.close()


def _view(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "not before close"
    return memory.buf


def _sum_of(pool: torch.Tensor, slots: list[int]) -> int:
    """Of the bits of `slots`, exact in whatever order: what was sent and what came must have the same."""
    kept = pool.flatten(2, 3)[:, :, slots].contiguous()
    return int(kept.view(torch.int16).sum(dtype=torch.int64))


def _wall_s(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class _NoEvent:
    """On a CPU a step is computed when its call returns."""

    def record(self) -> None:
        pass
