"""Profiles: files that come back equal, and files that are refused."""

import json
from dataclasses import replace

import pytest

from megatron_hbp.level import Level
from megatron_hbp.profile import Point, Profile, check_profile_matches
from megatron_hbp.run_layout import RunLayout

LAYOUT = RunLayout(num_ranks=32, num_microbatches=8, tp_size=2)
POINTS = (
    Point(Level(16384, 1, 28), 2.65),
    Point(Level(131072, 8, 28), 3.05, 131072, 2.0e9, 40, 70 * 2**30),
    Point(Level(131072, 8, "full"), 3.2, 131000, 2.0e9),
)
PROFILE = Profile("llama-3.1-8b", "h100-80gb", LAYOUT, POINTS)


def test_a_saved_profile_loads_equal(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_layers_of_chunks_come_back(tmp_path):
    layout = replace(LAYOUT, num_stages=2, chunk_layers=(18, 14))
    Profile("llama-3.1-8b", "h100-80gb", layout, POINTS).save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").layout == layout


def test_the_example_of_the_documentation_loads(tmp_path, request):
    text = (request.config.rootpath / "docs" / "profile.md").read_text(encoding="utf-8")
    block = text.split("```json\n")[1].split("```")[0]
    (tmp_path / "profile.json").write_text(block)
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.points[1].level == Level(131072, 8, 28)


def _document(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    return json.loads((tmp_path / "profile.json").read_text())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format_version",), 2, "format version 2 is not 1"),
        (("format_version",), None, "format version None is not 1"),
        (("model",), 5, "model is 5; give it a text"),
        (("points",), {}, "points is not a list"),
        (("points",), [], "no points; measure at least one"),
        (("speed",), 1, "the file: speed is unknown"),
        (("layout", "num_ranks"), 0, "num_ranks is 0; give a whole number"),
        (("layout", "tp_size"), 2.0, "tp_size is 2.0; give a whole number"),
        (("layout", "sequence_parallel"), 1, "sequence_parallel is 1; give true or false"),
        (("layout", "chunk_layers"), ["32"], "chunk_layers is .* give whole numbers"),
        (("layout", "chunk_layers"), 32, "chunk_layers is 32; give whole numbers"),
        (("layout", "cp_size"), 8, "layout: cp_size is unknown"),
        (("points", 0), 7, "point 1 is not an object"),
        (("points", 0, "level"), 16384, "point 1: level is 16384"),
        (("points", 0, "level"), "16K:1", "point 1: level '16K:1' is not PACK_LEN:CP"),
        (("points", 1, "level"), "131071:8", "point 2: level 131071:8: pack_len must be"),
        (("points", 1, "seconds"), 0, "point 2: .*seconds is 0; give a finite number above 0"),
        (("points", 1, "seconds"), "3.05", "point 2: .*seconds is '3.05'; give a number"),
        (("points", 1, "seconds"), float("nan"), "seconds is nan; give a finite number"),
        (("points", 1, "seconds"), float("inf"), "seconds is inf; give a finite number"),
        (("points", 1, "seconds"), None, "seconds is None; give a number"),
        (("points", 1, "seconds"), 10**400, "seconds is 10*; give a finite number"),
        (("points", 1, "squares"), 10**400, "squares is 10*; give a finite number"),
        (("points", 1, "tokens"), 131073, "131073 tokens do not fit in its pack of 131072"),
        (("points", 1, "tokens"), 1.5, "tokens is 1.5; give a number"),
        (("points", 1, "tokens"), None, "tokens and squares belong together"),
        (("points", 1, "squares"), 1e8, "squares is 100000000.0, but the squared lengths"),
        (("points", 1, "squares"), 1e12, "squares is 1000000000000.0, but the squared lengths"),
        (("points", 1, "memory_bytes"), True, "memory_bytes is True; give a number"),
        (("points", 1, "milliseconds"), 3, "point 2: milliseconds is unknown"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, place, value, message):
    document = _document(tmp_path)
    *parents, last = place
    target = document
    for key in parents:
        target = target[key]
    target[last] = value
    (tmp_path / "profile.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as error:
        Profile.load(tmp_path / "profile.json")
    assert "profile.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["model", "device", "layout", "points"])
def test_missing_keys_are_named(tmp_path, key):
    document = _document(tmp_path)
    del document[key]
    (tmp_path / "profile.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"the file: {key} is missing"):
        Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff\xfe\x00", b'{"format_version": 1', b"[" * 100_000, b"1" * 5000],
)
def test_files_that_are_no_profile(tmp_path, content):
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"profile .*profile\.json"):
        Profile.load(tmp_path / "profile.json")
    with pytest.raises(ValueError, match=r"there is no profile .*other\.json"):
        Profile.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Profile.load(tmp_path)


def test_a_level_twice_needs_other_lengths():
    with pytest.raises(ValueError, match="131072:8:28 is there twice with the same lengths"):
        replace(PROFILE, points=(*POINTS, replace(POINTS[1], seconds=4.0)))
    longer = replace(POINTS[1], squares=4.0e9)
    assert len(replace(PROFILE, points=(*POINTS, longer)).points) == 4
    with pytest.raises(ValueError, match="16384:1:28 is there twice"):
        replace(PROFILE, points=(POINTS[0], POINTS[0]))


def test_another_model_device_or_layout_is_refused():
    check_profile_matches(PROFILE, model="LLaMA-3.1-8B", device="h100-80gb", layout=LAYOUT)
    more_ranks = replace(LAYOUT, num_ranks=64, num_microbatches=1)
    check_profile_matches(PROFILE, model="llama-3.1-8b", device="h100-80gb", layout=more_ranks)
    with pytest.raises(ValueError, match=r"measured for model 'llama-3\.1-8b', not 'deepseek-v2'"):
        check_profile_matches(PROFILE, model="deepseek-v2", device="h100-80gb", layout=LAYOUT)
    with pytest.raises(ValueError, match="measured for device 'h100-80gb', not 'a100-80gb'"):
        check_profile_matches(PROFILE, model="llama-3.1-8b", device="a100-80gb", layout=LAYOUT)
    with pytest.raises(ValueError, match="measured with tp_size 2, not 1"):
        check_profile_matches(
            PROFILE, model="llama-3.1-8b", device="h100-80gb", layout=replace(LAYOUT, tp_size=1)
        )
