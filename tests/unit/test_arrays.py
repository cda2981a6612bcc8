"""Damaged .npy files: every one is a ValueError, whatever numpy makes of it."""

import numpy as np
import pytest

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.arrays import load_array
from megatron_hbp.cli import main


def test_an_array_comes_back(tmp_path):
    path, array = tmp_path / "a.npy", np.arange(6, dtype=np.int32)
    np.save(path, array)
    np.testing.assert_array_equal(load_array(path), array)
    assert isinstance(load_array(path), np.memmap)
    assert not isinstance(load_array(path, mapped=False), np.memmap)
    with pytest.raises(FileNotFoundError):
        load_array(tmp_path / "b.npy")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mapped", [True, False])
def test_any_byte_of_the_header_and_any_cut(tmp_path, mapped):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(6, dtype=np.int32))
    whole = path.read_bytes()
    header = len(whole) - 24
    damaged = [whole[:length] for length in range(len(whole))]
    for place in range(header):
        for change in (0x01, 0x20, 0x80, 0xFF):
            damaged.append(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            load_array(path, mapped=mapped)
        except ValueError:
            refused += 1
    assert refused > len(damaged) // 2  # the others changed the padding, or the shape and type


def test_a_damaged_header_is_told_by_plans_and_commands(tmp_path, capsys):
    lens = np.full(8, 5)
    build_plan(lens, [Level(16, 1)], 2).save(tmp_path / "plan")
    file = tmp_path / "plan" / "sequence_ids.npy"
    content = file.read_bytes().replace(b"'shape'", b"'shape~")  # numpy: a TokenError
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"the plan in \S+ is damaged \(.*sequence_ids.npy"):
        Plan.load(tmp_path / "plan")
    argv = ["plan", "--lengths", str(file), "--level", "16:1", "--ranks", "2"]
    assert main(argv) == 2
    assert "sequence_ids.npy cannot be read" in capsys.readouterr().err
