"""Workers of which one listens no more, and workers that cannot exchange KV."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HANDLE = "router/worker_handle.py"
OVER_HTTP = "tests/router/test_unfit_over_http.py"
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
    Mutant(
        "two workers that cannot exchange KV are known before any request",
        "E2",
        "router/pairs.py",
        "            await prefill.connect(decode)",
        "            pass",
        (
            "tests/router/test_pairs.py::test_no_more_than_32_pairs_are_connected_before_there_is_kv",
            f"{OVER_HTTP}::test_a_forced_transport_that_cannot_work_is_refused_at_start_up_in_readiness_and_in_answers",
        ),
    ),
    Mutant(
        "a pair that a hand-off found unfit gets no other",
        "E2",
        "router/router.py",
        "pairs.refuse(*pair, error)",
        "failures = error",
        ("tests/router/test_pairs.py::test_a_pair_that_was_not_asked_in_time_is_known_from_its_first_hand_off",),
        # It costs no try, so that it is tried for ever.
        hangs=True,
    ),
    Mutant(
        "no try is lost to workers that do not fit",
        "E2",
        "router/router.py",
        "                if was_unfit:",
        "                if False:",
        ("tests/router/test_pairs.py::test_no_try_is_counted_for_pairs_that_do_not_fit",),
    ),
    Mutant(
        "auto says why it takes no better transport",
        "E6",
        "workers/kv_transfer/transports.py",
        "reasons.append(",
        "str(",
        (f"{OVER_HTTP}::test_auto_goes_by_grpc_and_says_why_not_by_memory",),
    ),
    Mutant(
        "one actor's beat does not end the others",
        "E5",
        "cluster/ray_calls.py",
        "except ray.exceptions.RayError as exc:\n        return Health",
        "except ray.exceptions.ActorUnavailableError as exc:\n        return Health",
        ("tests/cluster/test_beats.py::test_a_beat_that_fails_is_the_trouble_of_one",),
    ),
)
