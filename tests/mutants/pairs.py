"""Workers of which one listens no more, and workers that cannot exchange KV."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HANDLE = "router/worker_handle.py"
LISTENERS = "tests/router/test_listeners.py"

PAIRS = (
    Mutant(
        "a stream that cannot be read is a broken one, and is opened again",
        "E5",
        HANDLE,
        "except Exception as exc:  # Nobody else would listen,",
        "except ZeroDivisionError as exc:  #",
        (f"{LISTENERS}::test_a_stream_that_cannot_be_read_is_a_broken_one_and_is_opened_again",),
    ),
    Mutant(
        "one output that cannot be read takes no others with it",
        "E5",
        "router/outputs.py",
        "except Exception as exc:  # Of a worker",
        "except ZeroDivisionError as exc:  #",
        (f"{LISTENERS}::test_an_output_that_cannot_be_read_costs_its_own_request_a_try_and_no_other",),
    ),
    Mutant(
        "a look that fails is not the last",
        "E5",
        HANDLE,
        "except Exception as exc:  # Nobody else would look.",
        "except ZeroDivisionError as exc:",
        (f"{LISTENERS}::test_a_look_that_fails_is_told_and_is_not_the_last",),
    ),
    Mutant(
        "a worker that can step no more ends",
        "E5",
        "workers/worker.py",
        "self._on_broken(KVFerryError(",
        "print((",
        (f"{LISTENERS}::test_a_worker_that_can_step_no_more_is_gone_for_all_to_see",),
    ),
)
