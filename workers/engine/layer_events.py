"""How far a GPU has come in the steps launched on it, by groups of layers: so that KV of the first layers leaves while
the last are computed. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Recordable(Protocol):
    def record(self) -> None:
        """It happens when the GPU gets to here in the current stream."""


Event = TypeVar("Event", bound=Recordable)

# Waiting for each layer apart would cost an event a layer in every step.
LAYERS_PER_GROUP = 4


class LayerEvents(Generic[Event]):
    """The thread that launches steps records; others ask what to wait for, for KV of steps that are launched already.

    They may be given the event of a later step of the same layers: it waits longer, and for no less.
    """

    def __init__(
        self, num_layers: int, make_event: Callable[[], Event], layers_per_group: int = LAYERS_PER_GROUP
    ) -> None:
        """`make_event`: of one that has not been recorded, which nobody waits for."""
        self._make_event = make_event
        self._layers_per_group = layers_per_group
        self._last_layer = num_layers - 1
        self._events = [make_event() for _ in range(-(-num_layers // layers_per_group))]

    def layer_done(self, layer: int) -> None:
        """All of layers [0, layer] of a step is launched."""
        if (layer + 1) % self._layers_per_group == 0 or layer == self._last_layer:
            event = self._make_event()
            event.record()
            # Not before it is recorded: it would let pass.
            self._events[layer // self._layers_per_group] = event

    def all_done(self) -> None:
        """A whole step is launched, none of whose layers was told of."""
        event = self._make_event()
        event.record()
        self._events = [event] * len(self._events)

    def of(self, layer_end: int) -> Event:
        """When it happens, the KV of layers [0, layer_end) is there."""
        return self._events[(layer_end - 1) // self._layers_per_group]
