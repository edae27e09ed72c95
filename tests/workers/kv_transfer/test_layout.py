"""KVLayout: what must be equal, and where KV lies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from workers.errors import LayoutMismatchError
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import slots_of

LAYOUT = KVLayout("f", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
OTHER: dict[str, Any] = {
    "fingerprint": "g",
    "num_layers": 31,
    "num_kv_heads": 5,
    "head_dim": 128,
    "schema_version": 99,
}
CONVERTED: dict[str, Any] = {"block_size": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize("name", OTHER)
def test_a_field_that_cannot_be_converted_must_be_equal(name):
    with pytest.raises(LayoutMismatchError, match=f"differ in {name}.*start both") as caught:
        LAYOUT.require_convertible(dataclasses.replace(LAYOUT, **{name: OTHER[name]}))
    assert caught.value.param == name


def test_the_rest_may_differ():
    assert OTHER.keys() | CONVERTED.keys() == {f.name for f in dataclasses.fields(KVLayout)}
    LAYOUT.require_convertible(dataclasses.replace(LAYOUT, **CONVERTED))


def test_a_dtype_that_nobody_here_knows_cannot_be_cast_to():
    with pytest.raises(LayoutMismatchError, match="differ in dtype: 'float32' here, 'nvfp4' at the peer"):
        LAYOUT.require_convertible(dataclasses.replace(LAYOUT, dtype="nvfp4"))


def test_a_layout_survives_the_wire():
    layout = KVLayout(**{**dataclasses.asdict(LAYOUT), **OTHER, **CONVERTED})
    assert KVLayout.from_proto(layout.to_proto()) == layout


def test_smollm2_needs_46080_bytes_a_token():
    assert LAYOUT.token_bytes == 2 * 30 * 3 * 64 * 4 == 46_080


def test_slots_follow_the_block_table():
    assert slots_of([5, 2, 9], 0, 12, 4).tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 36, 37, 38, 39]
    assert slots_of([5, 2, 9], 3, 9, 4).tolist() == [23, 8, 9, 10, 11, 36]
    assert slots_of([5, 2, 9], 3, 3, 4).tolist() == []
