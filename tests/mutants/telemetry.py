"""What a cluster tells of itself is true, and telling it harms nobody."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NVML_TESTS = "tests/workers/test_nvml.py"
SPAN_TESTS = "tests/router/test_spans.py"
LOG_TESTS = "tests/cluster/test_logs.py"
COUNT_TESTS = "tests/workers/test_hand_off_counts.py"

TELEMETRY = (
    Mutant(
        "a GPU that does not answer takes no other with it",
        "",
        "workers/nvml.py",
        "except nvml.NVMLError:",
        "except ZeroDivisionError:",
        (
            f"{NVML_TESTS}::test_a_gpu_that_is_lost_takes_no_other_with_it[nvmlDeviceGetUUID]",
            f"{NVML_TESTS}::test_memory_is_told_of_the_gpus_that_answer",
        ),
    ),
    Mutant(
        "without a driver there are no GPUs, and no error",
        "",
        "workers/nvml.py",
        "except pynvml.NVMLError:",
        "except ZeroDivisionError:",
        (f"{NVML_TESTS}::test_without_a_driver_there_are_none",),
    ),
    Mutant(
        "an aborted hand-off is one that has ended",
        "",
        "workers/decode.py",
        "self.counts.failed(hand_off, AbortedError)",
        "pass",
        (f"{COUNT_TESTS}::test_every_way_in_which_a_hand_off_ends_is_counted_once",),
    ),
    Mutant(
        "spans are made when the last output is on its way",
        "",
        "router/traces.py",
        "asyncio.get_running_loop().call_soon(self.on_end, trace)",
        "self.on_end(trace)",
        (f"{SPAN_TESTS}::test_the_answer_does_not_wait_for_its_spans",),
    ),
    Mutant(
        "a client's own trace is gone on with",
        "",
        "router/spans.py",
        "if trace.traceparent else None",
        "if False else None",
        (f"{SPAN_TESTS}::test_a_client_that_traces_itself_decides_whether_and_where[01-True]",),
    ),
    Mutant(
        "what is printed is kept out of a log of objects",
        "",
        "cluster/logs.py",
        "printed_beside(log) if as_json else log",
        "log",
        (f"{LOG_TESTS}::test_every_line_is_an_object_and_what_is_printed_lies_beside",),
    ),
)
