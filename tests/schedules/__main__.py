"""python -m tests.schedules SEED [LAST]: play the schedules of these seeds.

The first that fails is made small and printed as a test. Exit code 1 when there is one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from tests.schedules.play import play
from tests.schedules.schedule import Schedule, as_code, draw
from tests.schedules.shrink import shrink


def main(arguments: list[str]) -> int:
    first, last = int(arguments[0]), int(arguments[-1])
    logging.disable()
    for seed in range(first, last + 1):
        failure = failure_of(draw(seed))
        if failure is not None:
            print(f"seed {seed} fails: {failure!r}\nmaking it small ...")
            small = shrink(draw(seed), fails_like(failure))
            print(f"{failure_of(small)!r}\n\n{as_test(small, seed)}")
            return 1
    print(f"{last + 1 - first} schedules, none fails")
    return 0


def failure_of(schedule: Schedule) -> Exception | None:
    try:
        play(schedule)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is what was looked for.
        return error
    return None


def fails_like(failure: Exception) -> Callable[[Schedule], bool]:
    """A cut may bring up another fault than the one that is sought: its kind must stay."""
    return lambda schedule: type(failure_of(schedule)) is type(failure)


def as_test(schedule: Schedule, seed: int) -> str:
    code = as_code(schedule).replace("\n", "\n    ")
    return f"def test_what_seed_{seed}_found():\n    play({code})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
