"""Durable jobs: accepted is on disk, and each prompt is answered once, whatever becomes of routers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

QUEUE, STORE, DATABASE = "router/jobs/queue.py", "router/jobs/store.py", "router/jobs/database.py"
QUEUE_TESTS, JOB_TESTS = "tests/router/test_job_queue.py", "tests/router/test_jobs.py"
TERMS_TESTS = "tests/router/test_job_terms.py"
CLIENT_TESTS = "tests/cluster/test_client_jobs.py"

JOBS = (
    Mutant(
        "a job's tokens are its tenant's",
        "-",
        "router/jobs/tenant.py",
        "found = keys.of_tenant(claim.tenant) if keys else None",
        "found = None",
        ("tests/router/test_job_tenants.py::test_the_answers_of_a_job_cost_its_tenants_tokens_and_wait_for_them",),
    ),
    Mutant(
        "a prompt under lease is nobody else's",
        "-",
        QUEUE,
        ".where(PromptRow.leased_until_s <= now_s)",
        ".where(PromptRow.num_attempts >= 0)",
        (f"{QUEUE_TESTS}::test_two_routers_never_hold_the_same_prompt[sqlite]",),
    ),
    Mutant(
        "the tenant with the fewest prompts at work goes next",
        "-",
        QUEUE,
        "tenant = min(found, key=lambda one: at_work[one])",
        "tenant = max(found, key=lambda one: at_work[one])",
        ("tests/router/test_job_tenants.py::test_one_tenants_many_jobs_do_not_hold_up_anothers",),
    ),
    Mutant(
        "a job is not held to the SLO of requests that somebody waits for",
        "-",
        "router/forecast.py",
        "        if request.job:\n            return\n",
        "",
        ("tests/router/test_job_tenants.py::test_a_job_is_not_held_to_the_slo_of_requests_that_somebody_waits_for",),
    ),
    Mutant(
        "the first answer to a prompt stays",
        "-",
        QUEUE,
        "if job is None or not session.execute(gone.returning(PromptRow.position)).all():",
        "if job is None:",
        (f"{QUEUE_TESTS}::test_when_a_lease_ends_another_answers_and_the_first_answer_stays[sqlite]",),
    ),
    Mutant(
        "a cancelled job has no prompts left",
        "-",
        "router/jobs/end.py",
        "    _drop(session, row, PromptRow, PromptRow.job_key == row.key)\n",
        "",
        (f"{QUEUE_TESTS}::test_a_cancelled_job_takes_no_more_answers[sqlite]",),
    ),
    Mutant(
        "what is accepted is synced to the disk",
        "-",
        DATABASE,
        '"synchronous = FULL"',
        '"synchronous = OFF"',
        ("tests/router/test_job_database.py::test_what_is_answered_is_synced_to_the_disk",),
    ),
    Mutant(
        "an answer after a crash has the id and the seed of the first try",
        "-",
        "router/jobs/records.py",
        'return f"{self.job_id}.{self.index}"',
        'return f"{self.job_id}.{self.index}.{id(self)}"',
        (f"{JOB_TESTS}::test_the_next_router_goes_on_with_the_same_ids_and_seeds",),
    ),
    Mutant(
        "jobs take no more than their part of a router",
        "-",
        "router/jobs/runner.py",
        "room = self._config.max_in_flight - len(self._running)",
        "room = self._config.max_in_flight",
        (f"{JOB_TESTS}::test_no_more_prompts_are_at_work_than_may_be",),
    ),
    Mutant(
        "requests that somebody waits for go before jobs",
        "-",
        "router/jobs/records.py",
        "JOB_PRIORITY = 100",
        "JOB_PRIORITY = 0",
        ("tests/router/test_job_tenants.py::test_a_request_that_somebody_waits_for_goes_before_a_job",),
    ),
    Mutant(
        "jobs that run are no reason to refuse a request",
        "-",
        "router/forecast.py",
        "max(0, _num_running(worker) - worker.num_jobs)",
        "_num_running(worker)",
        (f"{TERMS_TESTS}::test_jobs_that_run_are_no_reason_to_refuse_a_request_for_its_tpot",),
    ),
    Mutant(
        "jobs take no more of a batch than the SLO leaves",
        "-",
        "router/forecast.py",
        "if not request.job or self._slo.tpot_ms is None or not worker.num_jobs:",
        "if True:",
        (f"{TERMS_TESTS}::test_jobs_take_no_more_of_a_batch_than_the_slo_leaves",),
    ),
    Mutant(
        "a job is no more urgent than its key may be",
        "-",
        "router/jobs/tenant.py",
        "max(JOB_PRIORITY, caller.key.max_priority) if caller else JOB_PRIORITY",
        "JOB_PRIORITY",
        (
            f"{TERMS_TESTS}"
            "::test_a_job_goes_behind_what_somebody_waits_for_and_before_nothing_that_its_key_may_not[200-200]",
        ),
    ),
    Mutant(
        "a job's times are not those of requests that somebody waits for",
        "-",
        "router/answer.py",
        "self._timed = not request.terms.job",
        "self._timed = True",
        (f"{TERMS_TESTS}::test_a_jobs_prompts_have_metrics_of_their_own_and_none_of_those_that_somebody_waits_for",),
    ),
    Mutant(
        "what is the cluster's fault is tried again",
        "-",
        "router/jobs/runner.py",
        "if isinstance(error, _ABSENT):\n            return True",
        "if False:\n            return True",
        (f"{JOB_TESTS}::test_a_prompt_waits_for_workers_for_as_long_as_it_takes",),
    ),
    Mutant(
        "a short job does not wait for the end of a long one",
        "-",
        QUEUE,
        ".order_by(PromptRow.position, PromptRow.job_key)",
        ".order_by(PromptRow.job_key, PromptRow.position)",
        (f"{QUEUE_TESTS}::test_a_short_job_does_not_wait_for_the_end_of_a_long_one[sqlite]",),
    ),
    Mutant(
        "a tenant's job is nobody else's",
        "-",
        STORE,
        "chosen = select(JobRow).where(JobRow.tenant == tenant, JobRow.id == job_id)",
        "chosen = select(JobRow).where(JobRow.id == job_id)",
        (f"{QUEUE_TESTS}::test_a_tenant_sees_its_own_jobs_only[sqlite]",),
    ),
    Mutant(
        "a tenant's uploads have a bound",
        "-",
        "router/batches/file_store.py",
        "if num_there + num_bytes > quota_bytes:",
        "if num_bytes > quota_bytes:",
        ("tests/router/test_file_quota.py::test_a_tenants_files_have_a_quota_that_deleting_gives_back",),
    ),
    Mutant(
        "a job submitted twice is one job",
        "-",
        STORE,
        "if there is not None:",
        "if False:",
        (f"{JOB_TESTS}::test_submitting_again_under_an_id_makes_no_second_job",),
    ),
    Mutant(
        "a client reads on where it was when its router goes",
        "-",
        "cluster/jobs.py",
        "request.start = result.place + 1",
        "request.start = 0",
        (f"{CLIENT_TESTS}::test_a_job_goes_on_for_its_client_when_the_router_that_it_asks_goes",),
    ),
    Mutant(
        "routers that do not share their jobs are refused",
        "-",
        "cluster/config.py",
        "if self.router.replicas > 1 and self.jobs.url is None:",
        "if False:",
        ("tests/cluster/test_config.py::test_routers_that_cannot_stand_side_by_side_are_refused",),
    ),
)
