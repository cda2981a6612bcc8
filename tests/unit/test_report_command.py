"""`hbp report` without a browser: the numbers, escaping, determinism, wrong use."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.cli import main
from megatron_hbp.report.compare import HEADINGS, compare_plan
from megatron_hbp.report.page import page_html
from megatron_hbp.report.page_balance import attention_loads, heat_map
from megatron_hbp.report.page_lengths import level_facts
from megatron_hbp.report.page_methods import compare_methods
from megatron_hbp.report.page_time import run_figures, step_figures
from megatron_hbp.report.words import method_name
from megatron_hbp.simulate import simulate
from tests.unit.report_pages import NASTY, Seen, cost_for, rich_plan, small_plan


@pytest.fixture(scope="module")
def rich():
    return rich_plan()


@pytest.fixture(scope="module")
def html(rich):
    return page_html(rich, cost_for(rich))


@pytest.fixture(scope="module")
def seen(html):
    return Seen.of(html)


@pytest.fixture
def saved(tmp_path):
    small_plan().save(tmp_path / "plan")
    return tmp_path / "plan"


def test_every_metric_of_every_method_is_the_one_of_hbp_plan_compare(rich, seen):
    compared = compare_plan(rich, lambda text: None)
    metrics = rich.metrics()
    keys = [key for key in HEADINGS if key in metrics]
    assert len(keys) == len(HEADINGS), "with sources and stages there is each"
    for name, values in compared.items():
        row = seen.row("metrics", method_name(name))
        assert row[1][1] == [values["steps_per_epoch"]]
        assert [cell[1] for cell in row[2:]] == [[values[k], values[f"{k}_bound"]] for k in keys]
    own = [cell[1] for cell in seen.row("metrics", "this plan")[2:]]
    assert own == [[metrics[key], metrics[f"{key}_bound"]] for key in keys]


def test_numbers_are_printed_as_they_are(seen):
    assert len(seen.numbers) > 300
    for value, text in seen.numbers:
        shown = text.replace(",", "")
        digits = len(shown.partition(".")[2]) if "e" not in shown else 0
        least = 1e-3 * abs(value) if "e" in shown or digits > 4 else 0.5 * 10.0**-digits
        assert abs(float(shown) - value) <= least * 1.001, text


def test_sequences_and_tokens_add_up(rich, seen):
    counts = rich.counts()
    rows = {row[0][0]: [cell[1] for cell in row[1:]] for row in seen.rows("account")}
    assert rows["in"] == [[counts["sequences_in"]], [counts["tokens_in"]]]
    assert rows["kept"] == [[counts["sequences_kept"]], [counts["tokens_kept"]]]
    assert rows["dropped"] == [[8], [counts["tokens_dropped"]]]
    assert rows["dropped: empty"] == [[3], []]
    assert rows["dropped: no trainable token"] == [[5], []]
    assert rows["cut to fit"] == [[counts["sequences_truncated"]], [counts["tokens_truncated"]]]
    assert counts["sequences_truncated"] > 0


def test_levels_hold_the_tokens_of_the_plan(rich):
    facts = level_facts(rich)
    lens = rich.seq_lens[rich.sequence_ids].astype(np.int64)
    assert sum(fact.tokens for fact in facts) == lens.sum()
    assert sum(fact.sequences for fact in facts) == len(lens)
    assert sum(fact.fillers for fact in facts) == rich.counts()["filler_packs"]
    assert sum(fact.microbatches for fact in facts) == len(rich.microbatch_level)
    capacity = len(rich.microbatch_level) * rich.num_ranks * rich.token_budget
    assert sum(fact.padding + fact.tokens for fact in facts) == capacity
    for fact in facts:
        assert fact.must_pay + fact.need_not_pay + fact.free == fact.tokens
    must, need_not = sum(f.must_pay for f in facts), sum(f.need_not_pay for f in facts)
    metrics = rich.metrics()
    assert (must + need_not) / lens.sum() == metrics["communication_ratio"]
    assert must / lens.sum() == metrics["communication_ratio_bound"]


def test_fillers_are_shown():
    plan = build_plan(np.full(3, 9), (Level(64, 1),), 4, 2)
    assert [(fact.packs, fact.fillers, fact.padding) for fact in level_facts(plan)] == [
        (8, 5, 8 * 64 - 27)
    ]
    seen = Seen.of(page_html(plan, cost_for(plan), front=False))
    assert seen.row("lengths", "64, CP 1")[4][1] == [5]


def test_level_table(rich, seen):
    for fact in level_facts(rich):
        row = seen.row("lengths", fact.name)
        values = [cell[1] for cell in row[2:7]]
        assert values == [
            [fact.microbatches], [fact.packs], [fact.fillers], [fact.sequences], [fact.tokens]
        ]  # fmt: skip


def test_histogram_table_holds_every_kept_sequence(rich, seen):
    rows = [row for row in seen.rows("lengths") if "-" in row[0][0] and "CP" not in row[0][0]]
    kept = rich.seq_lens[rich.seq_lens > 0]
    assert sum(row[1][1][0] for row in rows) == len(kept)
    assert sum(row[2][1][0] for row in rows) == kept.sum()
    for row in rows:
        low, high = (int(part.replace(",", "")) for part in row[0][0].split(" ")[0].split("-"))
        inside = kept[(kept >= low) & (kept <= high)]
        assert row[1][1] == [len(inside)]
        assert row[2][1] == [inside.sum()]


def test_gpu_days_are_those_of_the_simulator_for_as_many_tokens(rich, seen):
    cost = cost_for(rich)
    timeline = simulate(rich, cost)
    assert seen.row("time", "this plan")[1][1] == [timeline.gpu_days]
    found = compare_methods(rich, timeline, cost, lambda text: None)
    assert found.usual == "2048:4 isf"
    for name, days in found.gpu_days.items():
        assert seen.row("time", method_name(name))[1][1] == [days]
    one_level = found.timelines[found.usual]
    per_token = one_level.gpu_days / one_level.tokens.sum()
    assert found.gpu_days[found.usual] == pytest.approx(per_token * timeline.tokens.sum())
    less = 1 - timeline.gpu_days / found.gpu_days[found.usual]
    assert f"{100 * abs(less):.1f} %" in seen.text().replace("\N{NO-BREAK SPACE}", " ")


def test_parts_of_a_step_fill_it(rich):
    timeline = simulate(rich, cost_for(rich))
    for figure in step_figures(timeline):
        step = int(re.match(r"Step (\d+)", figure.title)[1])
        ends = {}
        for mark in figure.marks:
            assert mark.x == pytest.approx(ends.get(mark.y, 0.0), abs=0.011), "too thin to be seen"
            ends[mark.y] = mark.x + mark.width
        last = float(figure.x_ticks[-1].text)
        assert len(ends) == rich.num_ranks
        for end in ends.values():
            assert end / 100 * last == pytest.approx(timeline.seconds[step], rel=1e-3)


def test_runs_side_by_side_share_a_scale(rich):
    timeline = simulate(rich, cost_for(rich))
    one, other = run_figures({"HBP": timeline, "x": timeline})
    assert one.y_ticks == other.y_ticks
    assert one.marks == other.marks


def test_heat_map_cells_are_shares_of_the_busiest_rank(rich):
    from megatron_hbp.baselines import plan_placement

    placement = plan_placement(rich)
    loads = attention_loads(placement)
    assert loads.shape == (len(rich.microbatch_level), 8)
    assert np.all((loads.max(axis=1) == 1) | (loads.max(axis=1) == 0))
    assert 1 - loads.mean() == pytest.approx(rich.metrics()["attention_balance_ratio"])
    marks = heat_map(placement, "HBP").marks
    assert sum(mark.height for mark in marks) == pytest.approx(24 * 100), "every rank of each"
    for mark in marks:
        column, rank = re.search(r"micro-batch (\d+), ranks? (\d+)", mark.tip).groups()
        assert mark.strength == round(float(loads[int(column), int(rank)]), 3)


def test_names_from_users_stay_where_they_are(html, seen):
    plain = page_html(build_plan(np.array([5, 9, 40]), (Level(64, 4),), 4), cost_for(small_plan()))
    assert seen.tags.count("script") == Seen.of(plain).tags.count("script") == 2
    assert not {"b", "i"} & set(Seen.of(html.partition("<main>")[2]).tags) - {"b", "i"}
    assert "<b>bold" not in html
    assert "<i>" not in html
    names = [row[0][0] for row in seen.rows("account")]
    assert all(name in names for name in NASTY)
    goals = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.S)[1]
    assert "communication_ratio" in json.loads(goals)


def test_nothing_is_loaded(html, seen):
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert all(link.startswith("#") or link == "data:," for link in seen.links)
    assert not {"img", "iframe", "object", "embed"} & set(seen.tags)
    assert html.startswith("<!doctype html>")


def test_links_lead_to_sections_and_ids_are_unique(html, seen):
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(set(ids)) == len(ids)
    assert {link[1:] for link in seen.links if link.startswith("#")} <= set(ids)


def test_without_the_search_there_is_no_front():
    plan = small_plan()
    seen = Seen.of(page_html(plan, cost_for(plan), front=False))
    assert "front" not in seen.tables
    assert "#front" not in seen.links


def test_methods_that_the_model_cannot_run_have_a_reason():
    """Qwen2.5-32B has 40 heads: CP 40 divides them, CP 32 of online scheduling does not."""
    plan = build_plan(np.append(np.full(400, 30), 2000), (Level(64, 1), Level(2560, 40)), 40)
    seen = Seen.of(page_html(plan, cost_for(plan, "qwen2.5-32b"), front=False))
    assert "heads" in seen.row("time", "online")[1][0]
    assert seen.row("time", "online")[1][0].startswith("not possible: ")
    assert seen.row("time", "2560:40 ISF")[1][1][0] > 0


def test_a_plan_that_the_model_cannot_run(tmp_path, capsys):
    build_plan(np.full(9, 9), (Level(64, 64),), 64).save(tmp_path / "plan")
    error = _error(capsys, "report", str(tmp_path / "plan"), "-o", str(tmp_path / "page.html"))
    assert "heads" in error
    assert os.listdir(tmp_path) == ["plan"]


def test_the_same_plan_gives_the_same_bytes(saved, tmp_path):
    pages = []
    for seed in ("1", "2"):
        page = tmp_path / f"{seed}.html"
        subprocess.run(
            [sys.executable, "-m", "megatron_hbp.cli", "report", saved, "-o", page],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]
    shutil.copytree(saved, tmp_path / "copy")
    assert main(["report", str(tmp_path / "copy"), "-o", str(tmp_path / "3.html")]) == 0
    assert (tmp_path / "3.html").read_bytes() == pages[0]


def test_a_page_replaces_a_page_and_nothing_else(saved, tmp_path, capsys):
    page, notes = tmp_path / "page.html", tmp_path / "notes.html"
    argv = ["report", str(saved), "--no-pareto", "-o"]
    for _ in range(2):
        assert main([*argv, str(page)]) == 0
        assert str(page) in capsys.readouterr().out
    notes.write_text("<!doctype html> mine")
    assert "is not a page of hbp report" in _error(capsys, *argv, str(notes))
    assert notes.read_text() == "<!doctype html> mine"
    assert "is not a page of hbp report" in _error(capsys, *argv, str(tmp_path))
    assert "is no folder" in _error(capsys, *argv, str(tmp_path / "none" / "page.html"))
    assert sorted(os.listdir(tmp_path)) == ["notes.html", "page.html", "plan"]


def test_wrong_use(saved, tmp_path, capsys):
    out = ["-o", str(tmp_path / "page.html"), "--no-pareto"]
    assert "holds no plan.json" in _error(capsys, "report", str(tmp_path / "none"), *out)
    assert "llama-3.1-8b" in _error(
        capsys, "report", str(saved), *out, "--model", "gpt", "--device", "h100-80gb"
    )
    assert "--device is missing" in _error(
        capsys, "report", str(saved), *out, "--model", "llama-3.1-8b"
    )
    assert "the plan has 4" in _error(capsys, "report", str(saved), *out, "--ranks", "8")
    assert "rank-*.jsonl" in _error(capsys, "report", str(saved), *out, "--step-log", "/none")
    log = tmp_path / "log"
    log.mkdir()
    (log / "rank-00000.jsonl").write_text('{"plan": "0123456789ab", "start": 0, "rank": 0}\n')
    assert "holds no line of plan" in _error(
        capsys, "report", str(saved), *out, "--step-log", str(log)
    )
    lengths = saved / "seq_lens.npy"
    lengths.write_bytes(lengths.read_bytes()[:-1])
    assert "damaged" in _error(capsys, "report", str(saved), *out)
    assert not (tmp_path / "page.html").exists()


def test_measured_times_beside_predicted_ones(saved, tmp_path):
    plan = Plan.load(saved)
    log = tmp_path / "log"
    log.mkdir()
    predicted = float(simulate(plan, cost_for(plan)).last_stage[0].max())
    name = plan.hash()[:12]
    for rank in range(plan.num_ranks):
        sequences = plan.sequence_ids.tolist() if rank == 0 else []
        lines = [
            {"plan": name, "start": 0, "rank": rank},
            {"plan": name, "step": 0, "rank": rank, "wall_seconds": 4 * predicted}
            | {"microbatches": [{"cpu_seconds": 1.0, "sequences": sequences}]},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (log / f"rank-{rank:05d}.jsonl").write_text(text)
    page = tmp_path / "page.html"
    assert main(["report", str(saved), "-o", str(page), "--step-log", str(log)]) == 0
    seen = Seen.of(page.read_text())
    assert "The measured time is 4 times the predicted one" in seen.text()
    pair = [tip for tip in seen.tips if "measured" in tip or "predicted" in tip]
    assert [tip.split()[-2] for tip in pair] == [f"{4 * predicted:.4g}"] * 2


def test_what_is_assumed_is_said(saved, tmp_path):
    page = tmp_path / "page.html"
    assert main(["report", str(saved), "-o", str(page), "--no-pareto"]) == 0
    text = Seen.of(page.read_text()).text()
    assert "No model was named" in text
    assert "Model llama-3.1-8b: 8.0 billion parameters" in text
    flags = ["--model", "qwen2.5-32b", "--device", "a100-80gb", "--tp", "2"]
    assert main(["report", str(saved), "-o", str(page), "--no-pareto", *flags]) == 0
    text = Seen.of(page.read_text()).text()
    assert "No model was named" not in text
    assert "Model qwen2.5-32b" in text
    assert "8 GPUs = 4 ranks x TP 2" in text


def _error(capsys, *argv):
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("hbp: error: ")]
    assert len(lines) == 1
    return lines[0]
