"""Defences against what breaks such systems in the field, and the tests that go red without them.

Each row switches one defence off by replacing one piece of source. `scenario` is a kind of fault of scenarios.py, every
one of which has a row. Snippets are short, so that changes beside them leave the table as it is.
"""

from __future__ import annotations

from tests.mutants.aborts import ABORTS
from tests.mutants.bounds import BOUNDS
from tests.mutants.death import DEATH
from tests.mutants.door import DOOR
from tests.mutants.frames import FRAMES
from tests.mutants.front import FRONT
from tests.mutants.injected import INJECTED
from tests.mutants.jobs import JOBS
from tests.mutants.layouts import LAYOUTS
from tests.mutants.meaning import MEANING
from tests.mutants.operations import OPERATIONS
from tests.mutants.pairs import PAIRS
from tests.mutants.pressure import PRESSURE
from tests.mutants.replicas import COPIES
from tests.mutants.routing import ROUTING
from tests.mutants.security import SECURITY
from tests.mutants.telemetry import TELEMETRY
from tests.mutants.weights import WEIGHTS
from tests.mutants.wrong_output import WRONG_OUTPUT

MUTANTS = (
    *ABORTS,
    *WRONG_OUTPUT,
    *MEANING,
    *PRESSURE,
    *DEATH,
    *COPIES,
    *FRAMES,
    *INJECTED,
    *LAYOUTS,
    *WEIGHTS,
    *OPERATIONS,
    *PAIRS,
    *ROUTING,
    *DOOR,
    *FRONT,
    *JOBS,
    *BOUNDS,
    *TELEMETRY,
    *SECURITY,
)
