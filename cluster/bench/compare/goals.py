"""What is compared with what, and the ratios that are aimed for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = Mapping[str, Any]
# equal: the same precision on both sides; best: each side's better one.
Kind = Literal["equal", "best"]


@dataclass(frozen=True, slots=True)
class Metric:
    load: str
    what: str
    # Keys from a row to the number.
    path: tuple[str, ...]
    higher_is_better: bool = False

    def of(self, row: Row) -> float | None:
        """None: the row is of another load, has no such number, or has errors among its answers."""
        value: Any = row if row["load"] == self.load and not row.get("errors") else None
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else float(value)

    def best(self, rows: Iterable[Row]) -> Row | None:
        found = [row for row in rows if self.of(row) is not None]
        choose: Callable[..., Row] = max if self.higher_is_better else min
        return choose(found, key=self.of) if found else None


TTFT_ONE = Metric("one", "TTFT p50, ms", ("ttft_ms", "p50"))
TPOT_ONE = Metric("one", "TPOT p50, ms", ("tpot_ms", "p50"))
BATCH = Metric("batch16", "output tokens/s", ("out_tok_s",), higher_is_better=True)
TTFT_LONG = Metric("long", "TTFT p50, ms", ("ttft_ms", "p50"))
TTFT_MIXED = Metric("mixed", "TTFT p50, ms", ("ttft_ms", "p50"))
ITL_MIXED = Metric("mixed", "ITL p99, ms", ("itl_ms", "p99"))
CAPACITY = Metric("capacity", "requests/s", ("rate",), higher_is_better=True)
READY = Metric("start", "seconds to ready", ("ready_s",))
METRICS = (TTFT_ONE, TPOT_ONE, BATCH, TTFT_LONG, TTFT_MIXED, ITL_MIXED, CAPACITY, READY)


@dataclass(frozen=True, slots=True)
class Side:
    """Whose rows count. None: any."""

    names: tuple[str, ...]
    mode: str | None = None

    def of(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row["contestant"] in self.names and self.mode in (None, row["mode"])]


@dataclass(frozen=True, slots=True)
class Comparison:
    metric: Metric
    ours: Side
    rival: Side
    # The ratio ours / rival that is aimed for.
    goals: Mapping[Kind, float] = field(default_factory=dict)
    # Of ours, only rows of this precision count.
    precision: str | None = None


_ANY, _COLOCATED, _APART = Side(("kvferry",)), Side(("kvferry",), "colocated"), Side(("kvferry",), "1P1D")
_VLLM, _VLLM_APART = Side(("vllm",), "colocated"), Side(("vllm",), "1P1D")
_LLAMA, _TRANSFORMERS = Side(("llama.cpp",)), Side(("transformers",))
_RIVALS = Side(("vllm", "llama.cpp", "transformers"))

COMPARISONS: Sequence[Comparison] = (
    Comparison(TPOT_ONE, _COLOCATED, _VLLM, {"equal": 0.8}),
    Comparison(TPOT_ONE, _APART, _LLAMA, {"equal": 0.7}),
    Comparison(TPOT_ONE, _COLOCATED, _TRANSFORMERS),
    Comparison(BATCH, _ANY, _VLLM, {"equal": 1.2, "best": 2.0}),
    Comparison(BATCH, _ANY, _LLAMA),
    Comparison(TTFT_LONG, _APART, _VLLM, {"best": 0.9}, precision="int8_dynamic"),
    Comparison(TTFT_LONG, _ANY, _LLAMA),
    Comparison(ITL_MIXED, _APART, _VLLM, {"best": 0.12}),
    Comparison(ITL_MIXED, _APART, _VLLM_APART, {"best": 0.4}),
    Comparison(TTFT_MIXED, _APART, _VLLM_APART, {"best": 0.15}),
    Comparison(TTFT_MIXED, _ANY, _VLLM),
    Comparison(CAPACITY, _APART, _RIVALS, {"best": 2.0}),
    Comparison(CAPACITY, _APART, _COLOCATED, {"best": 1.2}),
    Comparison(READY, _ANY, _VLLM, {"best": 0.35}),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    comparison: Comparison
    kind: Kind
    ours: Row
    rival: Row

    @property
    def value(self) -> float:
        """Infinite where the rival managed nothing."""
        ours, rival = self.comparison.metric.of(self.ours), self.comparison.metric.of(self.rival)
        assert ours is not None
        assert rival is not None
        return ours / rival if rival else float("inf")

    @property
    def goal(self) -> float | None:
        return self.comparison.goals.get(self.kind)

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value > self.goal if self.comparison.metric.higher_is_better else self.value < self.goal


def ratios(rows: Sequence[Row], comparisons: Iterable[Comparison] = COMPARISONS) -> list[Ratio]:
    """Whatever of it was measured, each side by its best row."""
    return [ratio for comparison in comparisons for ratio in _ratios(rows, comparison)]


def _ratios(rows: Sequence[Row], comparison: Comparison) -> list[Ratio]:
    metric = comparison.metric
    ours, rivals = comparison.ours.of(rows), comparison.rival.of(rows)
    if comparison.precision:
        ours = [row for row in ours if row["precision"] == comparison.precision]
    precisions = sorted({row["precision"] for row in ours} & {row["precision"] for row in rivals})
    pairs: list[tuple[Kind, Row | None, Row | None]] = [
        ("equal", metric.best(_of_precision(ours, one)), metric.best(_of_precision(rivals, one))) for one in precisions
    ]
    pairs.append(("best", metric.best(ours), metric.best(rivals)))
    return [Ratio(comparison, kind, mine, theirs) for kind, mine, theirs in pairs if mine and theirs]


def _of_precision(rows: Iterable[Row], precision: str) -> list[Row]:
    return [row for row in rows if row["precision"] == precision]
