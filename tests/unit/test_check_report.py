"""The report of `hbp check`, as text and as JSON."""

import json
import re

import pytest

from megatron_hbp.check.outcome import conclude
from megatron_hbp.check.report import outcome_document, outcome_text
from tests.unit.check_samples import DEVICE, WORDS, facts, recipe


@pytest.fixture
def found(tmp_path):
    return conclude(recipe(parameters=170_000.0), DEVICE, WORDS, facts(tmp_path))


def test_sentences_are_in_both_forms(found):
    found.problems, found.warnings, found.notes = ["a b", "c d"], ["e f"], ["g h"]
    text, document = outcome_text(found), outcome_document(found)
    for one in ("PROBLEM: a b", "PROBLEM: c d", "warning: e f", "note: g h"):
        assert one in text.splitlines()
    assert document["problems"] == ["a b", "c d"]
    assert document["warnings"] == ["e f"]
    assert document["notes"] == ["g h"]


@pytest.mark.parametrize(
    ("problems", "warnings", "last"),
    [
        ([], [], "fits"),
        ([], ["w"], "fits, with 1 warning"),
        ([], ["w", "v"], "fits, with 2 warnings"),
        (["p"], ["w"], "does not fit: 1 problem"),
        (["p", "q"], [], "does not fit: 2 problems"),
    ],
)
def test_the_last_line_is_the_verdict(found, problems, warnings, last):
    found.problems, found.warnings = problems, warnings
    assert outcome_text(found).splitlines()[-1] == last
    assert outcome_document(found)["fits"] is (not problems)


def test_json_has_the_figures_of_the_text(found):
    document = outcome_document(found)
    assert json.loads(json.dumps(document)) == json.loads(json.dumps(document))
    text = outcome_text(found)
    stage = document["stages"][1]
    assert f"{stage['memory_gib']['128:2']['total']:.1f}" in text
    assert f"{document['schedule']['steps']} steps" in text
    assert document["lockstep"]["digest"] in text
    assert len(document["lockstep"]["rank_hashes"]) == 16
    warm_up = document["schedule"]["lr_warmup_steps"]
    assert warm_up == 0.25 * document["schedule"]["steps"]
    assert re.search(r"after \d+ steps, 1e-06 at step \d+", text)


def test_what_was_not_looked_at_is_null(tmp_path):
    nothing = facts(tmp_path, arguments={}, stages=[], plan=None, problems=["no"])
    found = conclude(recipe(), DEVICE, WORDS, nothing)
    document = outcome_document(found)
    for name in ("layout", "parameters", "plan", "lockstep", "schedule", "checkpoints"):
        assert document[name] is None
    assert document["stages"] == []
    assert outcome_text(found).splitlines()[-2:] == ["PROBLEM: no", "does not fit: 1 problem"]


def test_a_plan_without_stages_is_reported(tmp_path):
    """Where the host ends the start after the plan was made, and before a stage is built."""
    found = conclude(recipe(), DEVICE, WORDS, facts(tmp_path, stages=[], problems=["no"]))
    assert found.plan is not None
    assert "PROBLEM: no" in outcome_text(found).splitlines()
