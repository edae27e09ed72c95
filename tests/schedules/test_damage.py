"""A schedule's damage to KV gets where it is meant to: where nobody looks at checksums, wrong tokens come of it."""

from __future__ import annotations

import pytest

from tests.schedules.play import play
from tests.schedules.schedule import Ask, Schedule, Spoil

# Its KV is nine tenths of its frame, whichever way that goes.
ASK = Ask(num_prompt_tokens=15)


@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_a_bit_that_flips_in_a_payload_is_noticed_however_it_goes(pulls, part, monkeypatch):
    schedule = Schedule((ASK, Spoil(how="flip", amount=part)), pulls=pulls)
    assert play(schedule).num_answered == 1
    monkeypatch.setattr("workers.kv_transfer.frame.Digest.require", lambda *args: None)
    with pytest.raises(AssertionError):
        play(schedule)


def test_a_bit_that_flips_in_what_is_said_of_a_shared_payload_is_noticed():
    for part in range(20):
        assert play(Schedule((ASK, Spoil(how="flip", amount=part / 200)), pulls=True)).num_answered == 1
