"""Rows copied by the extension and by numpy, against slices of bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workers.kv_transfer import rows
from workers.kv_transfer.rows import copy_rows, copy_with_numpy, pieces_of

COPIES = {"numpy": copy_with_numpy, "compiled": vars(rows)["_copy"]}


@pytest.fixture(params=COPIES)
def copy(request, monkeypatch):
    if request.param == "compiled" and not rows.compiled():
        pytest.skip("the extension was not built: no compiler here")
    monkeypatch.setattr(rows, "_copy", COPIES[request.param])
    return copy_rows


# Under and over what is copied by streaming stores, in strides of theirs and not.
@pytest.mark.parametrize("row_bytes", [1, 48, 511, 512, 640, 700, 12288])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("offset", [0, 32, 5])
def test_each_row_comes_to_its_place_and_nothing_else_changes(copy, row_bytes, num_rows, offset):
    chosen = random.Random(row_bytes * num_rows)
    source = np.frombuffer(chosen.randbytes(50 * row_bytes + 3), np.uint8)
    target = np.frombuffer(bytearray(chosen.randbytes(60 * row_bytes + offset)), np.uint8)[offset:]
    of, to = (np.array(chosen.sample(range(limit), num_rows), np.int64) for limit in (50, 60))
    want = bytearray(target)
    for there, here in zip(to, of, strict=True):
        want[there * row_bytes : (there + 1) * row_bytes] = source[here * row_bytes : (here + 1) * row_bytes].tobytes()
    copy(target, to, source, of, row_bytes)
    assert target.tobytes() == want


@pytest.mark.parametrize("row_bytes", [16, 100_000, 1_000_000])
def test_pieces_are_the_rows_in_order(copy, row_bytes):
    source = np.frombuffer(random.Random(1).randbytes(9 * row_bytes), np.uint8)
    of = np.array([8, 0, 0, 3, 7, 1] * 3, np.int64)
    want = b"".join(source[row * row_bytes : (row + 1) * row_bytes].tobytes() for row in of)
    assert b"".join(piece.tobytes() for piece in pieces_of(source, of, row_bytes)) == want


@pytest.mark.parametrize(("to", "of"), [([0, 4], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 4]), ([0, 1], [-1, 0])])
def test_a_row_outside_is_refused_and_nothing_is_copied(copy, to, of):
    source, target = np.ones(4 * 512 + 511, np.uint8), np.zeros(4 * 512 + 511, np.uint8)
    with pytest.raises(IndexError, match="is not among the 4"):
        copy(target, np.array(to), source, np.array(of), 512)
    assert not target.any()


def test_as_many_rows_are_copied_from_as_to(copy):
    memory = np.zeros(1024, np.uint8)
    with pytest.raises(ValueError, match="rows"):
        copy(memory[:512], np.array([0]), memory[512:], np.array([0, 0]), 16)
