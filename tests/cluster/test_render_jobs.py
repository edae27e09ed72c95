"""The table of `kvferry jobs`, on a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from cluster.job_records import JobInfo, new_job_id
from cluster.records import Usage
from cluster.render_jobs import jobs_table
from workers.timeline import Timeline


def shown(*infos: JobInfo) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(jobs_table(infos))
    return captured.get().splitlines()


def job(job_id: str, num_completion_tokens: int = 999_999) -> JobInfo:
    usage = Usage(0, num_completion_tokens, 0)
    times = (1_700_000_000.0, 1_700_000_100.0, 1_700_600_000.0)
    return JobInfo(job_id, "completed", 50_000, 50_000, 50_000, usage, Timeline(), *times)


def test_the_largest_job_has_one_line_with_all_of_it():
    job_id = new_job_id()
    head, line, more = shown(job(job_id), job(job_id, 12_345_678_901))
    assert head.split() == ["job", "status", "answered", "failed", "tokens", "submitted", "kept", "until"]
    assert line.split()[:5] == [job_id, "completed", "50000/50000", "50000", "999999"]
    assert len(line.split()) == 9
    assert more.split()[4] == "12.3G"


def test_of_an_id_that_is_longer_nothing_is_lost_and_the_rest_stays_on_its_line():
    job_id = "a-job-of-somebody-elses-choice-" * 3
    _, line, *rest = shown(job(job_id))
    assert line.split()[1:5] == ["completed", "50000/50000", "50000", "999999"]
    assert line.split()[0] + "".join(rest).replace(" ", "") == job_id
