"""Rows as Markdown: one table of what was measured, one of ratios."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.bench.compare.goals import METRICS, Metric, Ratio, Row, ratios
from cluster.bench.compare.loads import LOADS

_SIDE = ("contestant", "mode", "precision")


def markdown(rows: Sequence[Row]) -> str:
    loads = [f"- {name}: {load.what}" for name, load in LOADS.items() if any(row["load"] == name for row in rows)]
    return "\n".join([*_measured(rows), "", *_compared(ratios(rows)), "", *loads])


def _measured(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each contestant; of several rounds the best."""
    yield _line([*_SIDE, *(f"{metric.load}: {metric.what}" for metric in METRICS)])
    yield _line(["---"] * (len(_SIDE) + len(METRICS)))
    for side in dict.fromkeys(tuple(row[key] for key in _SIDE) for row in rows):
        of_side = [row for row in rows if tuple(row[key] for key in _SIDE) == side]
        yield _line([*side, *(_cell(metric, of_side) for metric in METRICS)])


def _cell(metric: Metric, rows: Sequence[Row]) -> str:
    best = metric.best(rows)
    if best is not None:
        return _number(metric, best)
    failed = [row for row in rows if row["load"] == metric.load]
    return f"{failed[0].get('errors', 1)} failed" if failed else "-"


def _compared(found: Sequence[Ratio]) -> Iterable[str]:
    yield _line(["load: figure", "precision", "kvferry", "rival", "ours", "theirs", "ratio", "goal", ""])
    yield _line(["---"] * 9)
    for ratio in found:
        metric = ratio.comparison.metric
        relation = "over" if metric.higher_is_better else "under"
        yield _line(
            [
                f"{metric.load}: {metric.what}",
                ratio.kind,
                f"{ratio.ours['mode']} {ratio.ours['precision']}",
                " ".join(ratio.rival[key] for key in _SIDE),
                _number(metric, ratio.ours),
                _number(metric, ratio.rival),
                f"{ratio.value:.2f}",
                "" if ratio.goal is None else f"{relation} {ratio.goal:g}",
                {None: "", True: "met", False: "missed"}[ratio.met],
            ]
        )


def _number(metric: Metric, row: Row) -> str:
    value = metric.of(row)
    assert value is not None
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
