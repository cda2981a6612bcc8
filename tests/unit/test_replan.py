"""Before and after a replan together: every sequence exactly as often as each epoch takes it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.alignment import Alignment
from megatron_hbp.lineage import lineage_problems
from megatron_hbp.replan import replan, rest_of
from megatron_hbp.weights import epoch_ids

LEVELS = (Level(64, 1), Level(256, 4))


def _lens(num=300, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.integers(2, 60, num), rng.integers(65, 256, num // 15), [0]])


def _ids(plan: Plan, first: int, end: int) -> list[int]:
    """What the plan trains in steps first .. end - 1."""
    steps = np.array([first, end]) * plan.num_microbatches
    low, high = plan.pack_offsets[plan.microbatch_offsets[steps]]
    return plan.sequence_ids[low:high].tolist()


def _trained_by_epoch(chain: list[tuple[Plan, int]]) -> dict[int, list[int]]:
    """Epoch in the whole run: ids trained when each plan is left after so many steps."""
    trained: dict[int, list[int]] = {}
    for plan, steps in chain:
        for epoch in range(plan.epochs):
            first, end = (min(steps, int(s)) for s in plan.epoch_offsets[epoch : epoch + 2])
            trained.setdefault(plan.first_epoch + epoch, []).extend(_ids(plan, first, end))
    return trained


def _assert_every_epoch_whole(chain: list[tuple[Plan, int]]) -> None:
    first = chain[0][0]
    kept = np.flatnonzero(first.seq_lens)
    trained = _trained_by_epoch(chain)
    assert sorted(trained) == list(range(first.epochs))
    for epoch, ids in trained.items():
        wanted = kept
        if first.source_weights is not None:
            wanted = epoch_ids(
                first.seq_lens, first.source_ids, first.source_weights, first.seed, epoch
            )
        assert sorted(ids) == wanted.tolist(), epoch


def _assert_good(plan: Plan, parent: Plan, lens: np.ndarray) -> None:
    assert plan.audit(lens) == []
    assert lineage_problems(plan, parent) == []


@st.composite
def _runs(draw):
    """Lengths, settings of a first plan, and where it stops and goes on, twice."""
    num = draw(st.integers(8, 250))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    lens = np.exp(rng.normal(3.0, 1.1, num)).astype(np.int64).clip(0, 400)
    lens[0] = 20
    lens = lens.astype(draw(st.sampled_from([np.int32, np.int64])))
    first = {
        "num_ranks": draw(st.sampled_from([4, 8])),
        "num_microbatches": draw(st.integers(1, 3)),
        "epochs": 3,
        "seed": draw(st.integers(0, 99)),
        "mixing": draw(st.sampled_from(["auto", "step"])),
        "overlong": draw(st.sampled_from(["drop", "truncate"])),
        "packer": draw(st.sampled_from(["best_fit", "next_fit"])),
    }
    if draw(st.booleans()):
        first["source_ids"] = np.arange(num) % 3
        first["source_weights"] = draw(st.sampled_from([(1, 2, 0), (0.4, 1.7, 1), (1, 1, 1)]))
    changes = [
        {
            "num_ranks": draw(st.sampled_from([1, 2, 4, 8, 16])),
            "num_microbatches": draw(st.integers(1, 4)),
            "num_stages": draw(st.sampled_from([1, 2])),
        }
        for _ in range(2)
    ]
    for change in changes:
        if change["num_ranks"] < 4:
            change["levels"] = (Level(256, 1),)
    return lens, first, changes, [draw(st.floats(0, 1)) for _ in range(2)]


def _stop(plan: Plan, share: float) -> int:
    """A step to stop after: ends of epochs as often as places within them."""
    places = [0, *plan.epoch_offsets[1:-1].tolist(), plan.num_steps - 1]
    places += list(range(1, plan.num_steps))[:: max(1, plan.num_steps // len(places))]
    return places[min(len(places) - 1, int(share * len(places)))]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(_runs())
def test_no_sequence_is_lost_or_trained_again(run):
    """Three epochs, weights and repeats, two replans at any place for any other layout."""
    lens, first, changes, shares = run
    plan = build_plan(lens, LEVELS, **first)
    chain = []
    for change, share in zip(changes, shares, strict=True):
        consumed = _stop(plan, share)
        chain.append((plan, consumed))
        plan = replan(plan, consumed, **change)
        _assert_good(plan, chain[-1][0], lens)
        assert plan.num_ranks == change["num_ranks"]
    chain.append((plan, plan.num_steps))
    _assert_every_epoch_whole(chain)
    assert plan.steps_before == sum(steps for _, steps in chain[:2])
    assert plan.slots_before == sum(p.slots_per_step * steps for p, steps in chain[:2])


def test_every_step_of_every_epoch():
    lens = _lens(90)
    plan = build_plan(lens, LEVELS, 4, 2, epochs=3)
    for consumed in range(plan.num_steps):
        new = replan(plan, consumed, num_ranks=8, num_microbatches=3)
        _assert_good(new, plan, lens)
        _assert_every_epoch_whole([(plan, consumed), (new, new.num_steps)])


def test_at_the_end_of_an_epoch_nothing_is_carried():
    """Other epochs keep their number, and with it their repeats and, on the same ranks, order."""
    lens = _lens()
    plan = build_plan(
        lens, LEVELS, 8, 2, epochs=3, source_ids=np.arange(len(lens)) % 2, source_weights=(0.5, 1.5)
    )
    end = int(plan.epoch_offsets[1])
    same = replan(plan, end)
    assert same.carried_ids is None
    assert same.first_epoch == 1
    assert same.counts()["sequences_carried"] == 0
    assert same.sequence_ids.tolist() == _ids(plan, end, plan.num_steps)
    within = replan(plan, end + 1)
    assert within.first_epoch == 1
    assert within.counts()["sequences_carried"] == len(within.carried_ids)
    assert sorted(_ids(plan, end + 1, int(plan.epoch_offsets[2]))) == within.carried_ids.tolist()
    last = int(plan.epoch_offsets[2])
    assert _ids(within, within.epoch_offsets[1], within.num_steps) == _ids(
        plan, last, plan.num_steps
    )


def test_a_replan_at_its_first_step_hands_on_what_was_carried():
    lens = _lens()
    plan = build_plan(lens, LEVELS, 8, 2, epochs=2)
    new = replan(plan, 3, num_ranks=4)
    newer = replan(new, 0, num_ranks=16)
    np.testing.assert_array_equal(newer.carried_ids, new.carried_ids)
    assert (newer.steps_before, newer.slots_before) == (3, 48)
    _assert_good(newer, new, lens)
    assert replan(plan, 0).carried_ids is None


@pytest.mark.parametrize("num_ranks", [16, 4])
def test_br_j07_other_ranks_train_the_rest(num_ranks):
    """GBS 16, DP 8, stopped at step 50: on 16 or 4 ranks every sample of the rest, none again."""
    lens = np.random.default_rng(7).integers(8, 64, 1800)
    plan = build_plan(lens, [Level(64, 1)], 8, 2, epochs=2)
    assert plan.slots_per_step == 16
    assert plan.epoch_offsets[1] > 60
    new = replan(plan, 50, num_ranks=num_ranks, num_microbatches=16 // num_ranks)
    assert new.slots_per_step == 16
    _assert_good(new, plan, lens)
    before = _ids(plan, 0, 50)
    of_steps_51_to_60 = _ids(new, 0, 10)
    assert len(set(of_steps_51_to_60)) == len(of_steps_51_to_60) > 0
    assert not set(of_steps_51_to_60) & set(before)
    assert sorted([*before, *_ids(new, 0, int(new.epoch_offsets[1]))]) == list(range(1800))
    _assert_every_epoch_whole([(plan, 50), (new, new.num_steps)])
    # the batch does not change, so the set of the rest does not depend on the ranks
    other = replan(plan, 50, num_ranks=8)
    np.testing.assert_array_equal(new.carried_ids, other.carried_ids)
    assert new.num_steps == other.num_steps


def test_same_inputs_same_bytes_also_from_disk(tmp_path):
    lens = _lens()
    plan = build_plan(lens, LEVELS, 8, 2, epochs=2, source_ids=np.arange(len(lens)) % 3)
    plan.save(tmp_path / "plan")
    new = replan(plan, 2, num_ranks=4)
    again = replan(Plan.load(tmp_path / "plan"), 2, num_ranks=4)
    assert new.hash() == again.hash()
    new.save(tmp_path / "new")
    loaded = Plan.load(tmp_path / "new")
    assert loaded.hash() == new.hash()
    assert loaded.parent_hash == plan.hash()
    _assert_good(loaded, plan, lens)


def test_what_is_not_asked_for_stays():
    lens = _lens()
    plan = build_plan(
        lens,
        LEVELS,
        8,
        4,
        2,
        num_virtual_stages=2,
        epochs=2,
        seed=5,
        packer="isf",
        max_mixing=1.5,
        overlong="drop",
        alignment=Alignment(16, (16, 16)),
        corpus_hash="a" * 64,
        corpus_paths=("/corpus",),
    )
    new = replan(plan, 2)
    for name in (
        *("levels", "num_ranks", "num_microbatches", "num_stages", "num_virtual_stages", "seed"),
        *("packer", "mixing", "max_mixing", "overlong", "alignment", "corpus_hash", "alike"),
        *("corpus_paths", "tokens_in", "seq_lens_hash", "first_trained_hash"),
    ):
        assert getattr(new, name) == getattr(plan, name), name
    assert new.alike
    assert not replan(plan, 2, mixing="microbatch").alike
    # an order that was asked for stays one; without stages it could be either
    assert not replan(dataclasses.replace(plan, alike=False), 2).alike
    assert replan(dataclasses.replace(plan, alike=False, num_stages=1), 2, num_stages=2).alike
    other = replan(plan, 2, levels=[Level(128, 1), Level(256, 2)])
    assert other.alignment == Alignment(1, (1, 1))
    assert other.token_budget == 128
    _assert_good(other, plan, lens)


def test_truncated_sequences_stay_as_they_are():
    """A longer level does not bring back what was cut, and does not drop it."""
    lens = np.concatenate([_lens(60), [500, 700]])
    plan = build_plan(lens, LEVELS, 4, 2, epochs=2, overlong="truncate")
    new = replan(plan, 1, levels=[Level(256, 1), Level(1024, 4)])
    np.testing.assert_array_equal(new.seq_lens, plan.seq_lens)
    assert new.seq_lens[-1] == 256
    assert new.truncated_ids.tolist() == plan.truncated_ids.tolist() == [65, 66]
    _assert_good(new, plan, lens)


def test_levels_must_hold_what_is_not_trained():
    lens = np.array([50, 40, 30, 20, 10, 200, 60, 60])
    plan = build_plan(lens, LEVELS, 4, 1, epochs=2)
    with pytest.raises(
        ValueError,
        match=r"sequence 5 keeps 200 tokens and is not trained yet, but the longest level holds "
        r"128; 1 of 8 such sequences are over-long; .* add a level of 200 tokens or more",
    ):
        replan(plan, 1, levels=[Level(64, 1), Level(128, 2)])
    # in the last epoch only what it still trains counts
    last = int(plan.epoch_offsets[1])
    for consumed in range(last + 1, plan.num_steps):
        waiting = lens[rest_of(plan, consumed).carried_ids].max()
        if waiting <= 64:
            new = replan(plan, consumed, levels=[Level(64, 1)])
            _assert_good(new, plan, lens)
            break
    else:
        pytest.fail("the long sequence is trained last: choose another seed")


def test_the_curriculum_goes_on_for_as_many_tokens():
    lens = _lens(600)
    plan = build_plan(lens, LEVELS, 4, 2, epochs=2, curriculum_steps=9)
    cases = [
        ({}, 3, 6),
        ({"num_ranks": 8}, 3, 3),
        ({"num_ranks": 8}, 4, 3),  # 5 steps of 8 slots are 2.5 of 16
        ({"num_microbatches": 1}, 3, 12),
        ({}, 9, 0),
        ({}, 12, 0),
        ({"curriculum_steps": 2}, 3, 2),
    ]
    for change, consumed, left in cases:
        new = replan(plan, consumed, **change)
        assert new.curriculum_steps == left
        _assert_good(new, plan, lens)
        early = new.microbatch_level[: left * new.num_microbatches]
        assert (early == 0).all()
    with pytest.raises(ValueError, match="curriculum_steps is 6, but no level has CP 1; use 0"):
        replan(plan, 3, levels=[Level(256, 4)])
    with pytest.raises(ValueError, match=r"curriculum_steps is 99, but .* at most \d+ steps of CP"):
        replan(plan, 3, curriculum_steps=99)


@pytest.mark.parametrize(
    ("consumed", "text"),
    [
        (-1, "-1 steps are consumed, the plan has 9: name the plan that was trained"),
        (10, "10 steps are consumed, the plan has 9: name the plan that was trained"),
        (9, "all 9 steps of the plan are trained, nothing is left to plan; .* --finetune"),
    ],
)
def test_steps_that_cannot_be(consumed, text):
    plan = build_plan(np.full(36, 64), LEVELS, 4)
    with pytest.raises(ValueError, match=text):
        replan(plan, consumed)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_ranks": 6}, "CP size 4 does not divide 6 ranks"),
        ({"num_microbatches": 0}, "num_microbatches is 0; it must be at least 1"),
        ({"mixing": "never"}, "mixing is 'never'; it must be one of auto"),
        ({"num_stages": 2, "num_virtual_stages": 2, "num_microbatches": 3}, "no multiple of 2 pip"),
        ({"alignment": Alignment(48, (1, 1))}, "the token budget S is 64, but it must be a mult"),
        ({"curriculum_steps": -1}, "curriculum_steps is -1; it must be at least 0"),
    ],
)
def test_layouts_that_cannot_be(change, text):
    plan = build_plan(np.full(36, 64), LEVELS, 4)
    with pytest.raises(ValueError, match=text):
        replan(plan, 3, **change)


def _pair():
    lens = _lens()
    plan = build_plan(lens, LEVELS, 4, 2, epochs=2, source_ids=np.arange(len(lens)) % 2)
    return plan, replan(plan, 5, num_ranks=8)


def test_lineage_finds_what_is_lost_and_what_is_trained_again():
    plan, new = _pair()
    ids = new.sequence_ids.copy()
    first, last = ids[0], ids[len(new.carried_ids) - 1]
    ids[len(new.carried_ids) - 1] = first
    assert lineage_problems(dataclasses.replace(new, sequence_ids=ids), plan) == [
        f"epoch 0: 1 sequences are lost [{last}]",
        f"epoch 0: 1 sequences are trained again [{first}]",
    ]
    earlier = dataclasses.replace(new, parent_steps=4, steps_before=4, slots_before=32)
    assert any("are lost" in text for text in lineage_problems(earlier, plan))
    later = dataclasses.replace(new, parent_steps=6, steps_before=6, slots_before=48)
    assert any("are trained again" in text for text in lineage_problems(later, plan))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parent_hash": None}, "the plan has no parent, this one is"),
        ({"parent_hash": "b" * 64}, "the plan goes on from bbbb"),
        ({"parent_steps": 10**6}, "goes on after step 1000000 of a parent of"),
        ({"parent_steps": -1}, "goes on after step -1 of a parent of"),
        ({"seed": 9}, "seed is not the parent's"),
        ({"corpus_hash": "c"}, "corpus_hash is not the parent's"),
        ({"source_ids": None}, "source_ids are not the parent's"),
        ({"seq_lens": np.ones(321, dtype=np.int32)}, "seq_lens are not the parent's"),
        ({"first_epoch": 1}, "first_epoch is 1, it must be 0"),
        ({"steps_before": 4}, "steps_before is 4, it must be 5"),
        ({"slots_before": 4}, "slots_before is 4, it must be 40"),
    ],
)
def test_lineage_finds_what_differs(change, text):
    plan, new = _pair()
    found = " | ".join(lineage_problems(dataclasses.replace(new, **change), plan))
    assert text in found


def test_audit_holds_the_first_epoch_to_what_is_carried():
    _, new = _pair()
    for carried in (new.carried_ids[1:], np.append(new.carried_ids, new.carried_ids[-1]), None):
        found = dataclasses.replace(new, carried_ids=carried).audit()
        assert any(text.startswith("epoch 0: ") for text in found)


def test_audit_knows_the_epoch_of_weights():
    lens = _lens()
    plan = build_plan(
        lens, LEVELS, 4, 2, epochs=3, source_ids=np.arange(len(lens)) % 2, source_weights=(0.5, 1)
    )
    new = replan(plan, int(plan.epoch_offsets[1]), num_ranks=8)
    assert new.audit(lens) == []
    assert dataclasses.replace(new, first_epoch=0).audit()
