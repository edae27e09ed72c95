"""Rows copied by the extension and by numpy, against slices of bytes; their checksums, against a CRC-32C library."""

from __future__ import annotations

import random

import google_crc32c
import numpy as np
import pytest

from workers.kv_transfer import rows
from workers.kv_transfer.rows import copy_and_check, copy_rows, copy_with_numpy, crcs_of

COPIES = {"numpy": copy_with_numpy, "compiled": vars(rows)["_copy"]}


@pytest.fixture(params=COPIES, autouse=True)
def each_way(request, monkeypatch):
    if request.param == "compiled" and not rows.compiled():
        pytest.skip("the extension was not built: no compiler here, or no x86")
    monkeypatch.setattr(rows, "_copy", COPIES[request.param])


# Under and over what is copied by streaming stores, in strides of theirs and not.
@pytest.mark.parametrize("row_bytes", [1, 48, 511, 512, 640, 700, 12288])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("offset", [0, 32, 5])
@pytest.mark.parametrize("checked", [True, False])
def test_each_row_comes_to_its_place_and_nothing_else_changes(row_bytes, num_rows, offset, checked):
    chosen = random.Random(row_bytes * num_rows)
    source = np.frombuffer(chosen.randbytes(50 * row_bytes + 3), np.uint8)
    target = np.frombuffer(bytearray(chosen.randbytes(60 * row_bytes + offset)), np.uint8)[offset:]
    of, to = (np.array(chosen.sample(range(limit), num_rows), np.int64) for limit in (50, 60))
    want = bytearray(target)
    for there, here in zip(to, of, strict=True):
        want[there * row_bytes : (there + 1) * row_bytes] = source[here * row_bytes : (here + 1) * row_bytes].tobytes()
    if checked:
        copy_and_check(target, to, source, of, row_bytes, row_bytes)
    else:
        copy_rows(target, to, source, of, row_bytes)
    assert target.tobytes() == want


# Units of one stride, of some, of none that fits, and of bytes that are no whole words.
@pytest.mark.parametrize(
    ("row_bytes", "unit_bytes"), [(12288, 768), (1024, 128), (640, 640), (768, 96), (35, 7), (1, 1)]
)
@pytest.mark.parametrize("num_rows", [0, 1, 9, 300])
@pytest.mark.parametrize("copied", [True, False])
def test_each_unit_has_the_crc_that_a_library_computes(row_bytes, unit_bytes, num_rows, copied):
    chosen = random.Random(row_bytes + num_rows)
    source = np.frombuffer(chosen.randbytes(320 * row_bytes), np.uint8)
    target = np.zeros(320 * row_bytes, np.uint8)
    of, to = (np.array(chosen.sample(range(320), num_rows), np.int64) for _ in "to")
    whole = b"".join(source[row * row_bytes : (row + 1) * row_bytes].tobytes() for row in of)
    want = [google_crc32c.value(whole[at : at + unit_bytes]) for at in range(0, len(whole), unit_bytes)]
    if copied:
        assert copy_and_check(target, to, source, of, row_bytes, unit_bytes).tolist() == want
    else:
        assert crcs_of(source, of, row_bytes, unit_bytes).tolist() == want


@pytest.mark.parametrize(("to", "of"), [([0, 4], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 4]), ([0, 1], [-1, 0])])
def test_a_row_outside_is_refused_and_nothing_is_copied(to, of):
    source, target = np.ones(4 * 512 + 511, np.uint8), np.zeros(4 * 512 + 511, np.uint8)
    with pytest.raises(IndexError, match="is not among the 4"):
        copy_rows(target, np.array(to), source, np.array(of), 512)
    with pytest.raises(IndexError, match="is not among the 4"):
        copy_and_check(target, np.array(to), source, np.array(of), 512, 512)
    assert not target.any()


def test_a_checksum_of_a_row_outside_is_refused():
    with pytest.raises(IndexError, match="is not among the 4"):
        crcs_of(np.ones(4 * 512, np.uint8), np.array([0, 4]), 512, 512)


def test_as_many_rows_are_copied_from_as_to():
    memory = np.zeros(1024, np.uint8)
    with pytest.raises(ValueError, match="rows"):
        copy_rows(memory[:512], np.array([0]), memory[512:], np.array([0, 0]), 16)
