"""power_of_two: the less loaded of two that are drawn by lot.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001. Where several routers see loads that are
old, the best of all would draw all of them at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.least_loaded import work
from router.policies.load import Load, ToPlace


def power_of_two(candidates: Sequence[Load], to_place: ToPlace) -> list[int]:
    """The lot is a function of the request id, so that a run can be repeated."""
    order = list(range(len(candidates)))
    random.Random(f"{to_place.role}\0{to_place.request_id}").shuffle(order)
    order[:2] = sorted(order[:2], key=lambda i: work(candidates[i], to_place.role))
    return order
