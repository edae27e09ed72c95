"""The command `kvferry`. Exit codes: 0 done, 1 failed, 2 wrong usage or config.

Errors are one line on stderr. Each command loads what it needs only when it runs, so that --help is quick.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from contextlib import ExitStack, closing, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from cluster.cli_certs import certs
from cluster.cli_config import config
from cluster.cli_control import flip, restart, scale
from cluster.cli_jobs import jobs, submit
from cluster.cli_target import name_option as _name
from cluster.cli_target import running_target as _running_target
from cluster.cli_target import target_option as _target
from cluster.cli_top import top
from cluster.plan.command import plan
from workers.errors import ConfigError, InvalidRequestError, KVFerryError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from cluster.client import Prompt
    from protos.router_pb2 import GetStatusResponse, Trace


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvferry", message="%(package)s %(version)s")
def cli() -> None:
    """Prefill/decode-disaggregated LLM inference."""


@cli.command()
@click.argument("config", required=False, metavar="[CONFIG]", type=click.Path())
@click.option("--detach", is_flag=True, help="Return when the cluster is ready; `kvferry down` stops it.")
@click.option("--allow-faults", is_flag=True, help="Inject the config's faults, to test what survives them.")
def up(config: str | None, detach: bool, allow_faults: bool) -> None:
    """Start a cluster and wait until it is ready.

    CONFIG is a YAML file, or the name of one that comes with kvferry: local, colocated, gpu, two-node. Without one it
    is local: SmolLM2-135M-Instruct on the CPU, one prefill and one decode worker.
    """
    from cluster import up as process
    from cluster.config import load_config

    settings = load_config(config, allow_faults)
    if detach:
        state = process.detach(settings, config)
        click.echo(process.ready_line(settings.name, state.http_endpoint, state.grpc_endpoint))
    else:
        process.serve(settings, functools.partial(print, file=sys.stdout, flush=True))


@cli.command()
@_name
def down(name: str) -> None:
    """Stop a cluster and wait until all of it is gone."""
    from cluster import up as process

    if not process.down(name):
        raise UnavailableError(f"no cluster named {name} runs here")
    click.echo(f"{name} is down")


@cli.command()
@_name
@_target
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(name: str, target: str | None, as_json: bool) -> None:
    """Show the router, the workers and their blocks."""
    from cluster import render
    from cluster.client import Client

    answers: list[GetStatusResponse] = []
    for one in (target or _running_target(name)).split(","):
        with Client(one) as client, suppress(UnavailableError) if answers else nullcontext():
            answers.append(client.status())
    answer = render.of_all_routers(answers)
    if as_json:
        click.echo(json.dumps(render.status_object(answer), indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(render.status_title(answer), highlight=False, soft_wrap=True)
    console.print(render.status_table(answer))


@cli.command("wait-idle")
@click.option("--settle-s", type=float, default=0.0, show_default=True, help="Wait at least so long.")
@click.option("--timeout-s", type=float, default=60.0, show_default=True, help="Wait no longer.")
@_name
@_target
def wait_idle(settle_s: float, timeout_s: float, name: str, target: str | None) -> int:
    """Wait until a router has no requests left; exit code 1 when it still has some."""
    from cluster.client import Client
    from cluster.idle import wait_idle

    with Client(target or _running_target(name)) as client:
        num_left = wait_idle(client.status, settle_s, timeout_s)
    click.echo(f"{num_left} requests are left")
    return 1 if num_left else 0


@cli.command()
@_name
@click.option("--target", "targets", metavar="HOST:PORT", multiple=True, help="Of every router of the cluster.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(name: str, targets: tuple[str, ...], as_json: bool) -> int:
    """Account for every KV block and every request of a running cluster; exit code 1 when something leaks."""
    from cluster import render
    from cluster.client import Client
    from cluster.verify import verify

    with ExitStack() as stack:
        clients = [stack.enter_context(Client(target)) for target in targets or _running_target(name).split(",")]
        report = verify(lambda: [client.audit() for client in clients], lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(render.audit_object(report), indent=2))
    else:
        from rich.console import Console

        Console().print(render.audit_table(report))
        click.echo(render.audit_verdict(report))
    return 0 if report.clean else 1


@cli.command()
@click.argument("request_id", metavar="ID")
@_name
@_target
def trace(request_id: str, name: str, target: str | None) -> None:
    """Show what became of a request: its tries, its workers, and where its time went.

    ID is the answer's id, or what was sent as X-Request-Id. Requests that run are known, and the latest that ended.
    """
    from rich.console import Console

    from cluster import render_trace
    from cluster.client import Client

    traces: list[Trace] = []
    unknown: KVFerryError | None = None
    # Each router knows its own.
    for one in (target or _running_target(name)).split(","):
        with Client(one) as client:
            try:
                traces += client.trace(request_id)
            except (NotFoundError, UnavailableError) as error:
                unknown = error if unknown is None or isinstance(error, NotFoundError) else unknown
    if unknown is not None and not traces:
        raise unknown
    console = Console(width=None if sys.stdout.isatty() else 100)
    for told in traces:
        console.print(render_trace.title(told), highlight=False, soft_wrap=True)
        console.print(render_trace.table(told))
        for line in render_trace.failures(told):
            console.print(line, highlight=False, soft_wrap=True)


@cli.command()
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user's message, through the model's chat template.")
@click.option("--max-tokens", type=int, help="Longest answer.")
@click.option("--temperature", type=float, help="0: greedy.")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int, help="0: all tokens.")
@click.option("--min-p", type=float, help="Keep what is at least this fraction as likely as the likeliest.")
@click.option("--repetition-penalty", type=float, help="1: none.")
@click.option("--presence-penalty", type=float, help="0: none.")
@click.option("--frequency-penalty", type=float, help="0: none.")
@click.option("--seed", type=int)
@click.option("--min-tokens", type=int, help="Shortest answer.")
@click.option("--stop", multiple=True, help="Ends the answer. May be given more than once.")
@click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="May be given more than once.")
@click.option("--ignore-eos", is_flag=True, default=None)
@click.option("--model", default="", help="Needed only where several are served.")
@click.option("--request-id", default="")
@click.option("--timeout-s", type=float, help="Give up after so long.")
@_name
@_target
def generate(prompt: str, chat: bool, name: str, target: str | None, **options: Any) -> None:
    """Stream the answer to PROMPT ("-": read it from stdin) to the terminal."""
    from cluster.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    whole: Prompt = [{"role": "user", "content": text}] if chat else text
    with Client(target or _running_target(name)) as client, closing(client.stream(whole, **options)) as chunks:
        shown = ""
        try:
            for chunk in chunks:
                shown += chunk.text
                click.echo(chunk.text, nl=False)
                sys.stdout.flush()
        finally:
            if shown and not shown.endswith("\n"):
                click.echo()


@cli.group()
def keys() -> None:
    """API keys of a router (router.api_keys)."""


@keys.command("new")
@click.option("--tenant", required=True, help="Whose it is; several keys may be one tenant's.")
@click.option("--requests-per-minute", type=click.IntRange(1), help="None: any number.")
@click.option("--tokens-per-minute", type=click.IntRange(1), help="Of prompts and answers. None: any number.")
@click.option("--max-priority", type=int, default=0, show_default=True, help="The most urgent it may ask for.")
@click.option("--admin", is_flag=True, help="It may see what is every tenant's: `kvferry verify`.")
def keys_new(**entry: Any) -> None:
    """Print a new key, which is nowhere else, and the line of the file of keys that lets it in."""
    from cluster.keys import new_key

    key, line = new_key(entry)
    click.echo(f"{key}\n\nAdd below `keys:` of the file that router.api_keys names:\n{line}")


cli.add_command(config)
cli.add_command(scale)
cli.add_command(flip)
cli.add_command(restart)
cli.add_command(certs)
cli.add_command(submit)
cli.add_command(jobs)
cli.add_command(plan)
cli.add_command(top)


def run(arguments: list[str] | None = None) -> int:
    """The exit code."""
    try:
        result = cli.main(arguments, prog_name="kvferry", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message())
        return 2
    except click.ClickException as exc:
        return _fail(f"{exc.format_message()}; see `kvferry --help`", 2)
    except (ConfigError, InvalidRequestError) as exc:
        return _fail(exc.message, 2)
    except KVFerryError as exc:
        return _fail(exc.message, 1)
    except (KeyboardInterrupt, click.Abort):
        return _fail("stopped", 1)
    except BrokenPipeError:
        # The reader of our output is gone: so is the point of going on, and of Python's flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as exc:  # noqa: BLE001  (the last border: a person gets a line, never a traceback)
        return _fail(f"internal error: {type(exc).__name__}: {exc}", 1)


def _fail(message: str, code: int) -> int:
    click.echo(f"kvferry: {' '.join(message.split())}", err=True)
    return code


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
