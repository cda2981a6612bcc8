"""A plan saves and loads bit for bit, finds damage, and its audit finds every kind of violation."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.alignment import Alignment
from megatron_hbp.audit import array_hash
from megatron_hbp.cost import PackCost
from megatron_hbp.replan import replan

LEVELS = [Level(64, 1), Level(256, 4)]
ARRAYS = [
    f.name for f in dataclasses.fields(Plan) if f.type == "np.ndarray" or "ndarray" in str(f.type)
]


def _lens():
    rng = np.random.default_rng(0)
    return np.concatenate([rng.integers(2, 60, 200), rng.integers(65, 300, 20), [0, 1]])


@pytest.fixture
def plan():
    """What is left of another plan after a step, so that it has every array and setting."""
    parent = build_plan(
        _lens(),
        LEVELS,
        8,
        2,
        epochs=2,
        overlong="drop",
        curriculum_steps=2,
        first_trained=np.ones(222, dtype=int),
        source_ids=np.arange(222) % 3,
        corpus_paths=("/somewhere",),
    )
    return replan(parent, 1)


def _set(plan, name, index, value):
    array = getattr(plan, name).copy()
    array[index] = value
    return dataclasses.replace(plan, **{name: array})


def _found(plan, seq_lens=None):
    return " | ".join(plan.audit(seq_lens))


def test_good_plan(plan):
    assert plan.audit() == []
    assert plan.audit(_lens()) == []
    assert plan.audit(_lens().astype(np.int32)) == []


def test_accessors(plan):
    assert plan.token_budget == 64
    assert plan.epochs == 2
    assert plan.num_steps == len(plan.microbatch_level) // 2
    assert len(plan.pack_level()) == plan.num_packs
    long = int(np.flatnonzero(plan.microbatch_level == 1)[0])
    first = plan.microbatch_offsets[long]
    assert [plan.pack_index(long, rank) for rank in (0, 3, 4, 7)] == [
        (first, 0),
        (first, 3),
        (first + 1, 0),
        (first + 1, 3),
    ]
    counts = plan.counts()
    assert counts["sequences_in"] == 222
    assert counts["sequences_kept"] + counts["sequences_dropped"] == 222
    assert counts["dropped: empty"] == counts["dropped: no trainable token"] == 1
    assert counts["dropped: over-long"] == (_lens() > 256).sum()
    assert json.loads(json.dumps(counts)) == counts


def test_save_and_load(plan, tmp_path):
    folder = tmp_path / "new" / "plan"
    plan.save(folder)
    assert list(folder.parent.iterdir()) == [folder]  # no scratch folder stays
    loaded = Plan.load(folder)
    assert loaded.hash() == plan.hash()
    assert (plan.folder, loaded.folder) == (None, folder)
    assert plan.slots_per_step == 16
    for field in dataclasses.fields(Plan):
        found, wanted = getattr(loaded, field.name), getattr(plan, field.name)
        if wanted is not None and field.name in ARRAYS:
            np.testing.assert_array_equal(found, wanted)
            assert found.dtype == wanted.dtype
        else:
            assert found == wanted
    document = json.loads((folder / "plan.json").read_text())
    assert document["counts"] == plan.counts()
    assert document["metrics"] == plan.metrics()
    assert document["epochs"] == 2
    plan.save(folder)  # the same plan again is left alone
    other = build_plan(_lens(), LEVELS, 8, 2, overlong="drop")
    with pytest.raises(ValueError, match="exists and is not this plan; name another folder"):
        other.save(folder)


def test_arrays_that_need_not_be_there(tmp_path):
    plan = build_plan(_lens(), LEVELS, 8, overlong="drop")
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan")
    assert loaded.source_ids is loaded.carried_ids is None


def test_hash_covers_what_shapes_training(plan):
    same = dataclasses.replace(plan, corpus_paths=("/elsewhere",))
    assert same.hash() == plan.hash()
    for field in dataclasses.fields(Plan):
        if field.name == "corpus_paths":
            continue
        value = getattr(plan, field.name)
        if field.name in ARRAYS:
            changed = np.ones(1, dtype=np.int32) if value is None else np.append(value, 1)
        elif field.name == "levels":
            changed = (Level(64, 1, 3), Level(256, 4))
        elif field.name == "alignment":
            changed = Alignment(2, (1, 1))
        elif field.name == "cost":
            changed = PackCost(linear=1.0)
        elif field.name == "source_weights":
            changed = (1.0, 2.0)
        elif isinstance(value, int | float):
            changed = value + 1
        else:
            changed = "other"
        assert dataclasses.replace(plan, **{field.name: changed}).hash() != plan.hash(), field.name


def test_array_hash_is_of_values():
    assert array_hash(np.array([1, 2], np.int32)) == array_hash(np.array([1, 2], np.int64))
    assert array_hash(np.array([1, 2])) != array_hash(np.array([2, 1]))


@pytest.mark.parametrize("name", [*ARRAYS, "plan.json"])
def test_every_changed_byte_is_found(tmp_path, name):
    plan = build_plan(_lens(), LEVELS, 8, overlong="truncate", source_ids=np.arange(222))
    plan = replan(plan, 1)
    folder = tmp_path / "plan"
    plan.save(folder)
    path = folder / (name if name == "plan.json" else f"{name}.npy")
    data = bytearray(path.read_bytes())
    data[data.index(b'"seed": 1234') + 11 if name == "plan.json" else -1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not match its hash"):
        Plan.load(folder)
    Plan.load(folder, verify=False)


def test_half_written_and_foreign_plans(plan, tmp_path):
    with pytest.raises(ValueError, match=r"holds no plan.json; make the plan with `hbp plan"):
        Plan.load(tmp_path)
    folder = tmp_path / "plan"
    plan.save(folder)
    document = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(document[: len(document) // 2])
    with pytest.raises(ValueError, match=r"plan.json is damaged"):
        Plan.load(folder)
    (folder / "plan.json").write_text(
        document.replace('"format_version": 3', '"format_version": 99')
    )
    with pytest.raises(ValueError, match="has format version 99, this release reads 3"):
        Plan.load(folder)
    (folder / "plan.json").write_text(document.replace('"packer"', '"pakker"'))
    with pytest.raises(ValueError, match=r"is damaged .*packer"):
        Plan.load(folder)
    (folder / "plan.json").write_text(document)
    (folder / "sequence_ids.npy").write_bytes((folder / "sequence_ids.npy").read_bytes()[:150])
    with pytest.raises(ValueError, match="is damaged"):
        Plan.load(folder)
    (folder / "sequence_ids.npy").unlink()
    with pytest.raises(ValueError, match=r"is damaged .*sequence_ids"):
        Plan.load(folder)


def test_a_failed_save_leaves_nothing(plan, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        plan.save(tmp_path / "plan")
    assert list(tmp_path.iterdir()) == []


def test_another_writer_of_the_same_plan_is_harmless(plan, tmp_path, monkeypatch):
    folder = tmp_path / "plan"
    save = np.save

    def save_while_another_finishes(*args, **kwargs):
        monkeypatch.setattr(np, "save", save)
        plan.save(folder)
        save(*args, **kwargs)

    monkeypatch.setattr(np, "save", save_while_another_finishes)
    plan.save(folder)
    assert Plan.load(folder).hash() == plan.hash()
    assert list(tmp_path.iterdir()) == [folder]


def test_audit_finds_shape_violations(plan):
    assert "does not run from 0" in _found(_set(plan, "pack_offsets", 0, 1))
    assert "pack_offsets decreases at entry" in _found(_set(plan, "pack_offsets", 1, 10**6))
    assert "does not run from 0" in _found(_set(plan, "epoch_offsets", -1, 10**6))
    assert "names a level that does not exist" in _found(_set(plan, "microbatch_level", 0, 7))
    assert "names a sequence that does not exist" in _found(_set(plan, "sequence_ids", 0, 10**6))
    cut = dataclasses.replace(plan, microbatch_level=plan.microbatch_level[:-1])
    assert "differ in length" in _found(cut)
    assert "are not whole steps" in _found(dataclasses.replace(plan, num_microbatches=7))
    assert "dropped_ids and dropped_reason differ" in _found(
        dataclasses.replace(plan, dropped_reason=plan.dropped_reason[1:])
    )
    assert "does not divide 9 ranks" in _found(dataclasses.replace(plan, num_ranks=9))


def test_audit_finds_layout_violations(plan):
    wide = dataclasses.replace(plan, num_ranks=16)
    assert "has 8 packs, its level needs 16" in _found(wide)
    assert "has 2 packs, its level needs 4" in _found(wide)
    mixed = dataclasses.replace(plan, mixing="step")
    assert "mixes levels although mixing is 'step'" in _found(mixed)
    late = dataclasses.replace(plan, curriculum_steps=plan.num_steps)
    assert "a curriculum step trains a level with CP above 1" in _found(late)


def test_audit_finds_content_violations(plan):
    longest = int(np.argmax(plan.seq_lens))
    short = int(np.flatnonzero(plan.pack_level() == 0)[0])
    assert f"pack {short} holds" in _found(
        _set(plan, "sequence_ids", plan.pack_offsets[short], longest)
    )
    repeated = _found(_set(plan, "sequence_ids", 0, plan.sequence_ids[-1]))
    assert "epoch 0: 1 kept sequences are in no pack" in repeated
    assert "1 are repeated" in repeated
    assert "epoch 1" not in repeated
    assert "a pack holds a dropped or empty sequence" in _found(
        _set(plan, "sequence_ids", 0, plan.dropped_ids[0])
    )
    offsets = plan.pack_offsets.copy()
    end = plan.microbatch_offsets[plan.num_microbatches]
    offsets[: end + 1] = 0
    empty = dataclasses.replace(plan, pack_offsets=offsets)
    assert "step 0 holds only fillers: it has no trained token" in _found(empty)
    wide = dataclasses.replace(plan, alignment=Alignment(1, (64, 64)))
    assert "tokens, its level allows 64" in _found(wide)


def test_audit_finds_account_violations(plan):
    lens = _lens()
    assert "tokens in" in _found(dataclasses.replace(plan, tokens_in=plan.tokens_in + 1))
    assert "dropped_ids are not exactly" in _found(
        dataclasses.replace(
            plan, dropped_ids=plan.dropped_ids[1:], dropped_reason=plan.dropped_reason[1:]
        )
    )
    assert "made from other lengths" in _found(plan, lens + 1)
    shifted = dataclasses.replace(
        plan, tokens_dropped=plan.tokens_dropped - 1, tokens_truncated=plan.tokens_truncated + 1
    )
    assert "does not match the input lengths" in _found(shifted, lens)
    assert "truncated_ids are not exactly" in _found(
        dataclasses.replace(plan, truncated_ids=np.array([3])), lens
    )


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "source_ids"])
def test_audit_never_crashes_on_damage(plan, name):
    """Whatever one array holds, the audit answers in words; and it finds most of it.

    Source ids only label sequences: there is nothing to violate.
    """
    array = getattr(plan, name)
    rng = np.random.default_rng(0)
    damaged = [array[:-1], array[:0], np.append(array, array[:1])]
    for _ in range(30):
        changed = array.copy()
        if len(changed):
            changed[rng.integers(len(changed))] += rng.choice([-5, -1, 1, 3, 100])
            damaged.append(changed)
    for value in damaged:
        broken = dataclasses.replace(plan, **{name: value})
        if np.array_equal(value, array):
            continue
        if name in ("dropped_reason", "pack_offsets"):  # some changes give another good plan
            broken.audit(_lens())
        else:
            assert broken.audit(_lens()) != []
