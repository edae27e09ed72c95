"""What a read of KV waits for: nothing less than the launch of its layers, and no more than their group's."""

from __future__ import annotations

from itertools import count

from workers.engine.layer_events import LayerEvents


class Launched:
    """An event as the number of the launch that it was recorded behind."""

    clock = count(1)

    def __init__(self) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = next(Launched.clock)


def test_a_read_waits_for_the_group_of_its_last_layer() -> None:
    events = LayerEvents(10, Launched, layers_per_group=4)
    assert events.of(10).at == 0, "nothing is launched yet: an event that nobody waits for"
    launched = [0] * 10
    for layer in range(10):
        launched[layer] = next(Launched.clock)
        events.layer_done(layer)
    group_end = [3, 3, 3, 3, 7, 7, 7, 7, 9, 9]
    for layer_end in range(1, 11):
        last = group_end[layer_end - 1]
        assert launched[last] < events.of(layer_end).at
        assert last == 9 or events.of(layer_end).at < launched[last + 1]


def test_a_later_step_never_makes_an_earlier_one_seem_done_sooner() -> None:
    events = LayerEvents(4, Launched, layers_per_group=2)
    for layer in range(4):
        events.layer_done(layer)
    before = [events.of(end).at for end in range(1, 5)]
    events.layer_done(1)
    assert [events.of(end).at >= at for end, at in enumerate(before, 1)] == [True] * 4
    events.all_done()
    assert len({events.of(end).at for end in range(1, 5)}) == 1
    assert events.of(1).at > max(before)
