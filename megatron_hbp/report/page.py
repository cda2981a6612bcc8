"""One self-contained HTML page about a plan: what it saves, why, and what else there would be.

Guarantees (asserted by tests/unit/test_report_page.py and tests/unit/test_report_command.py):
- nothing is loaded from anywhere; figures are SVG of our own, tables and words need no script;
- the same plan and settings give the same bytes: no date, no random name;
- every number in a <data> element is the plan's or the metrics' own;
- names from users cannot break out of where they stand;
- a page appears complete or not at all, and replaces nothing but a page.
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from megatron_hbp.cost_model import CostModel
from megatron_hbp.plan import FORMAT_VERSION, Plan
from megatron_hbp.report import page_time
from megatron_hbp.report.compare import HEADINGS
from megatron_hbp.report.page_front import front_figure, front_rows
from megatron_hbp.report.page_lengths import account, histogram, level_bars, level_facts
from megatron_hbp.report.page_methods import HBP, compare_methods
from megatron_hbp.report.page_words import (
    balance_words,
    front_words,
    glance,
    headline,
    run_words,
    summary,
)
from megatron_hbp.report.pareto import GOALS, search
from megatron_hbp.report.text import plan_sources
from megatron_hbp.report.words import method_name, percent
from megatron_hbp.simulate import simulate

_MARKER = "<!doctype html><!-- made by hbp report -->"
_SOURCES_SHOWN = 50
_MORE_IS_BETTER = ("tokens_per_rank", "modelled_efficiency", "modelled_efficiency_step")


def page_html(
    plan: Plan,
    cost: CostModel,
    *,
    assumed: Iterable[str] = (),
    step_log: str | Path | None = None,
    front: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> str:
    """The page's text.

    cost: of the model, GPUs and layout that the plan is for. assumed: sentences about what of them
    the user has not given. step_log: the folder of --hbp-step-log of a run of the plan. front: with
    the search over other settings. progress: called with lines of text.
    Raises ValueError when cost is for another layout, or the step log for another plan.
    """
    timeline = simulate(plan, cost)
    measured = None if step_log is None else page_time.measured(timeline, step_log)
    methods = compare_methods(plan, timeline, cost, progress)
    compared, gpu_days, usual = methods.compared, methods.gpu_days, methods.usual
    histogram_figure, histogram_rows = histogram(plan)
    facts = level_facts(plan)
    sources = plan_sources(plan, np.asarray(plan.seq_lens))
    columns = [(key, heading) for key, heading in HEADINGS.items() if key in compared[HBP]]
    values: dict[str, Any] = {
        "plan": plan,
        "plan_hash": plan.hash(),
        "headline": headline(gpu_days, usual),
        "summary": list(summary(gpu_days, usual, compared)),
        "facts": list(glance(plan, gpu_days, compared)),
        "counts": plan.counts(),
        "account": account(plan),
        "run_words": run_words(plan),
        "trained_tokens": int(timeline.tokens.sum()),
        "sources": sources[:_SOURCES_SHOWN],
        "more_sources": max(0, len(sources) - _SOURCES_SHOWN),
        "histogram": histogram_figure,
        "histogram_rows": histogram_rows,
        "levels": facts,
        "level_bars": level_bars(facts),
        "balance_words": balance_words(compared, usual),
        "usual": usual,
        "before": methods.heat_maps[usual],
        "after": methods.heat_maps[HBP],
        "time": {
            "assumptions": [*assumed, *page_time.assumptions(plan, cost)],
            "words": list(page_time.words(timeline)),
            "runs": page_time.run_figures(
                {n: methods.timelines[n] for n in (usual, HBP) if n in methods.timelines}
            ),
            "steps": page_time.step_figures(timeline),
            "measured": measured,
            "rows": page_time.method_rows(gpu_days),
            "impossible": methods.impossible,
        },
        "compared": compared,
        "columns": columns,
        "best": {key: _best(compared, key) for key, _ in columns},
        "front": None,
        "goals": GOALS,
        "settings": _settings(plan),
    }
    if front:
        found = search(plan, progress)
        figure, data = front_figure(found)
        values["front"] = {
            "figure": figure,
            "data": data,
            "rows": front_rows(found),
            "words": front_words(found),
        }
    page = _environment().get_template("page.html.j2").render(values)
    return f"{_MARKER}\n{page}\n"


def check_output(path: Path) -> None:
    """Raises ValueError when no page can be written there, or something else would be lost."""
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it, or name another place for the page")
    if not path.exists():
        return
    with open(os.devnull if path.is_dir() else path, "rb") as file:
        ours = file.read(len(_MARKER)) == _MARKER.encode()
    if not ours:
        raise ValueError(
            f"{path} exists and is not a page of hbp report; name another file or remove it"
        )


def write_page(path: Path, html: str) -> None:
    """Writes the page, whole or not at all. Raises ValueError as check_output() does."""
    check_output(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(html)
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _best(compared: dict[str, dict[str, float]], key: str) -> set[str]:
    """The methods whose figure, as it is printed, is the best; none where all are alike."""
    shown = {name: round(values[key], 4) for name, values in compared.items()}
    best = (max if key in _MORE_IS_BETTER else min)(shown.values())
    names = {name for name, value in shown.items() if value == best}
    return set() if len(names) == len(shown) else names


def _settings(plan: Plan) -> list[tuple[str, str]]:
    rows = {
        "plan hash": plan.hash(),
        "levels": " ".join(map(str, plan.levels)),
        "ranks": plan.num_ranks,
        "micro-batches a step": plan.num_microbatches,
        "pipeline stages": f"{plan.num_stages} ({plan.num_virtual_stages} virtual)",
        "epochs": plan.epochs,
        "steps": plan.num_steps,
        "packer": plan.packer,
        "mixing": f"{plan.mixing}, at most {plan.max_mixing:g}" if plan.max_mixing else plan.mixing,
        "curriculum steps": plan.curriculum_steps,
        "over-long sequences": plan.overlong,
        "balanced by": plan.cost or "attention cost",
        "alignment": plan.alignment,
        "source weights": plan.source_weights,
        "seed": plan.seed,
        "lengths hash": plan.seq_lens_hash,
        "mask hash": plan.first_trained_hash,
        "corpus hash": plan.corpus_hash,
        "corpus": ", ".join(plan.corpus_paths) or None,
        "goes on from plan": plan.parent_hash,
        "plan format": FORMAT_VERSION,
        "megatron_hbp": metadata.version("megatron_hbp"),
        "numpy": np.__version__,
    }
    return [(name, str(value)) for name, value in rows.items() if value is not None]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_hbp.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda at: f"{at:.3f}".rstrip("0").rstrip(".") + "%"
    environment.filters["share"] = lambda part: percent(part, 2)
    environment.filters["number"] = _number
    environment.filters["method"] = method_name
    return environment


def _number(value: float, digits: int) -> str:
    """Large numbers with a digit or two, small ones with `digits`."""
    return f"{value:,.{1 if abs(value) >= 1000 else 2 if abs(value) >= 100 else digits}f}"
