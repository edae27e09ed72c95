"""`kvferry submit` and `kvferry jobs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from cluster.cli_target import name_option, running_target, target_option
from workers.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.client import Job, JobResult

_output = click.option(
    "--output", type=click.Path(dir_okay=False), help="Write the answers there, one JSON object a line."
)


@click.command()
@click.argument("file", type=click.Path())
@click.option("--wait", is_flag=True, help="Until all prompts are answered; then print the answers.")
@_output
@click.option("--max-tokens", type=int, help="Longest answer, where a line says nothing else.")
@click.option("--temperature", type=float, help="Where a line says nothing else. 0: greedy.")
@click.option("--model", default="", help="Needed only where several are served.")
@name_option
@target_option
def submit(file: str, wait: bool, output: str | None, name: str, target: str | None, **options: Any) -> int:
    """Submit the prompts of FILE, one JSON object a line, as a job that outlives this command and the router.

    A line is {"prompt": ...} or {"messages": [...]}, with options of its own beside it.
    """
    from cluster.client import Client

    with Client(target or running_target(name)) as client:
        job = client.submit(Path(file), **options)
        click.echo(job.id, err=wait or output is not None)
        if not wait and output is None:
            click.echo(f"{job.info.num_prompts} prompts; `kvferry jobs {job.id} --results` waits for them", err=True)
            return 0
        return _write(job, output)


@click.command()
@click.argument("job_id", required=False)
@click.option("--results", is_flag=True, help="Print the answers as they come, until the job's end.")
@click.option("--cancel", is_flag=True, help="Give up what has no answer yet.")
@click.option("--delete", is_flag=True, help="Remove it with its answers; after --cancel, if it has not ended.")
@_output
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@name_option
@target_option
def jobs(
    job_id: str | None,
    results: bool,
    cancel: bool,
    delete: bool,
    output: str | None,
    as_json: bool,
    **where: str | None,
) -> int:
    """List jobs, or show one: its state, its answers."""
    from cluster import render_jobs
    from cluster.client import Client

    if job_id is None and (results or cancel or delete or output):
        raise InvalidRequestError(
            "--results, --cancel, --delete and --output need the id of a job; `kvferry jobs` lists them"
        )
    with Client(where["target"] or running_target(str(where["name"]))) as client:
        if job_id is not None and cancel:
            client.jobs.cancel(job_id)
        if job_id is not None and delete:
            client.jobs.delete(job_id)
            click.echo(f"{job_id} is deleted", err=True)
            return 0
        if job_id is not None and (results or output):
            return _write(client.jobs.get(job_id), output)
        infos = [client.jobs.info(job_id)] if job_id is not None else client.jobs.list()
    if as_json:
        objects = [render_jobs.job_object(info) for info in infos]
        click.echo(json.dumps(objects[0] if job_id is not None else {"jobs": objects}, indent=2))
        return 0
    from rich.console import Console

    Console().print(render_jobs.jobs_table(infos))
    return 0


def _write(job: Job, output: str | None) -> int:
    """All answers as they come; 1 when some of them are errors or missing."""
    from cluster.render_jobs import result_object

    with _opened(output) as lines:
        for result in _shown(job, job.results()):
            lines.write(json.dumps(result_object(result)) + "\n")
            lines.flush()
    info = job.refresh()
    if info.num_answered - info.num_failed == info.num_prompts:
        return 0
    click.echo(
        f"kvferry: {info.id} is {info.status}: {info.num_failed} of {info.num_prompts} prompts failed, "
        f"{info.num_prompts - info.num_answered} have no answer",
        err=True,
    )
    return 1


@contextmanager
def _opened(output: str | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = Path(output).open("w", encoding="utf-8")  # noqa: SIM115  (closed below; only opening may fail so)
    except OSError as exc:
        raise InvalidRequestError(f"{output}: {exc.strerror}; choose another --output") from None
    with file:
        yield file


def _shown(job: Job, results: Iterable[JobResult]) -> Iterator[JobResult]:
    """With a bar on a terminal's stderr."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(results, "answered", job.info.num_prompts, console=Console(stderr=True))
