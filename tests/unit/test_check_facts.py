"""Questions and answers between `hbp check` and its child."""

from megatron_hbp.check.facts import Facts, Question
from tests.unit import check_samples


def test_a_question_comes_back_equal(tmp_path):
    question = Question(
        flags=["--lr", "1e-5"],
        gpus=16,
        gpus_per_node=8,
        capability=(9, 0),
        transformer_engine="2.8",
        lengths=None,
        workspace=str(tmp_path),
    )
    assert Question.load(question.save()) == question


def test_facts_come_back_equal(tmp_path):
    facts = check_samples.facts(tmp_path, problems=["one"], notes=["two"], steps_done=3)
    facts.save(tmp_path)
    assert Facts.load(tmp_path) == facts


def test_no_answer_is_told_apart(tmp_path):
    assert Facts.load(tmp_path) is None
