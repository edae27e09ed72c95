"""Frames: whatever happens to one on its way, it is either what was sent or refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.kv_transfer.unsent import encode, verify
from workers.errors import FrameError
from workers.kv_transfer.frame import HEADER_BYTES, Frame, decode, ranges_of_frames
from workers.kv_transfer.layout import KVLayout

LAYOUT = KVLayout("f", num_layers=3, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
FRAME = Frame(7, "0123456789abcdef" * 2, 1, 3, 4, 9, bytes(range(160)) + bytes(160))


def take(data: bytes, request_id: str = "r") -> Frame:
    frame, checksum = decode(data)
    verify(frame, checksum, request_id)
    return frame


def test_a_frame_arrives_as_it_was_sent():
    data = encode(FRAME, "r")
    frame = take(data)
    assert dataclasses.replace(frame, payload=bytes(frame.payload)) == FRAME
    assert len(data) == HEADER_BYTES + len(FRAME.payload)
    assert frame.expected_bytes(LAYOUT) == 2 * 5 * 2 * 4 * 4 == len(FRAME.payload)


def test_every_flipped_bit_of_every_byte_is_found():
    data = encode(FRAME, "r")
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(FrameError):
                take(bytes(damaged))


def test_every_truncation_and_any_excess_is_found():
    data = encode(FRAME, "r")
    for end in range(len(data)):
        with pytest.raises(FrameError):
            take(data[:end])
    with pytest.raises(FrameError):
        take(data + b"\0")


@given(st.binary(max_size=200))
def test_noise_is_no_frame(data):
    with pytest.raises(FrameError):
        take(data)


def test_a_frame_of_another_request_is_found():
    with pytest.raises(FrameError, match="checksum mismatch in the KV of request other, layers"):
        take(encode(FRAME, "r"), "other")


@pytest.mark.parametrize(
    "changed",
    [
        {"grant_id": 8},
        {"incarnation": "f" * 32},
        {"layer_start": 0},
        {"layer_end": 2},
        {"token_start": 3},
        {"token_end": 8},
    ],
)
def test_the_checksum_binds_a_frame_to_its_place(changed):
    _, checksum = decode(encode(FRAME, "r"))
    verify(FRAME, checksum, "r")
    with pytest.raises(FrameError):
        verify(dataclasses.replace(FRAME, **changed), checksum, "r")


@pytest.mark.parametrize("empty", [{"layer_end": 1}, {"token_end": 4}])
def test_an_empty_range_is_no_frame(empty):
    with pytest.raises(FrameError):
        take(encode(dataclasses.replace(FRAME, payload=b"", **empty), "r"))


def test_frames_overlap_when_they_share_a_layer_of_a_token():
    def at(layers: tuple[int, int], tokens: tuple[int, int]) -> Frame:
        return Frame(7, FRAME.incarnation, *layers, *tokens, b"")

    def cells(frame: Frame) -> set[tuple[int, int]]:
        layers = range(frame.layer_start, frame.layer_end)
        return {(layer, token) for layer in layers for token in range(frame.token_start, frame.token_end)}

    ranges = [(a, b) for a in range(4) for b in range(a + 1, 5)]
    frames = [at(layers, tokens) for layers in ranges for tokens in ranges]
    for one in frames:
        assert one.area == len(cells(one))
        for other in frames:
            assert one.overlaps(other) == bool(cells(one) & cells(other))
            assert one.same_range(other) == (cells(one) == cells(other))


@given(st.integers(0, 5000), st.integers(1, 200_000), st.integers(1 << 10, 64 << 20))
def test_frames_come_as_near_to_their_target_as_whole_layers_allow(start, num_tokens, frame_bytes):
    ranges = list(ranges_of_frames(LAYOUT, start, start + num_tokens, frame_bytes))
    frames = [Frame(7, FRAME.incarnation, *layers, *tokens, b"") for layers, tokens in ranges]
    assert sum(frame.area for frame in frames) == LAYOUT.num_layers * num_tokens
    assert len(set(ranges)) == len(ranges)
    assert max(frame.expected_bytes(LAYOUT) for frame in frames) <= frame_bytes
    layers, tokens = ranges[0]
    whole = frame_bytes // ((tokens[1] - tokens[0]) * LAYOUT.token_bytes_per_layer)
    assert layers == (0, min(whole, LAYOUT.num_layers))
    for _, (_, last) in ranges:
        assert last == start + num_tokens or last % LAYOUT.block_size == 0
    block_bytes = LAYOUT.block_size * LAYOUT.token_bytes_per_layer
    assert tokens[1] == start + num_tokens or tokens[1] - start > (frame_bytes // block_bytes - 1) * LAYOUT.block_size


def test_frames_cover_each_layer_of_each_token_once():
    ranges = list(ranges_of_frames(LAYOUT, 3, 40, 9 * LAYOUT.token_bytes_per_layer))
    cells = [(layer, token) for layers, tokens in ranges for layer in range(*layers) for token in range(*tokens)]
    assert sorted(cells) == [(layer, token) for layer in range(LAYOUT.num_layers) for token in range(3, 40)]
