"""Where the time of a request went."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, attrgetter


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where a request's time went, in seconds. `transfer_s` overlaps `prefill_s`; `transfer_unhidden_s` does not."""

    queued_s: float = 0.0
    prefill_queued_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_unhidden_s: float = 0.0
    decode_queued_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: Timeline) -> Timeline:
        return Timeline(*map(add, _phases(self), _phases(other)))

    def __or__(self, later: Timeline) -> Timeline:
        """What two who told of one try have told: each phase grows, so that the longer is the later."""
        return Timeline(*map(max, _phases(self), _phases(later)))

    @property
    def total_s(self) -> float:
        """From arrival to the last token. The transfer counts with the part of it that prefill did not hide."""
        parts = (self.queued_s, self.prefill_queued_s, self.prefill_s, self.transfer_unhidden_s)
        return sum(parts) + self.decode_queued_s + self.decode_s


_phases = attrgetter(*Timeline.__slots__)
NO_TIME = Timeline()
