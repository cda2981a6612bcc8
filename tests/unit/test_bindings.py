"""The compiled kernels refuse wrong arguments with TypeError or ValueError; they never crash."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_hbp import _C
from tests.unit.kernel_cases import items_of

ITEMS = items_of([5, 3, 4], _C.ITEM32)
PACKS = np.array([0, 1, 0], dtype=np.int32)
STARTS = np.array([0, 2])
GROUPS = np.array([0, 0], dtype=np.int32)
BINS = np.array([4])
COSTS = np.array([1.0, 2.0])
LENGTHS = np.array([5, 3, 4])
LIMITS = np.array([3, 5])
DEVIATIONS = np.array([[1, -1], [-1, 1]])
PEAKS = np.array([3, 0])
BOUNDS = np.array([0, 4, 10], dtype=np.int32)
LENGTHS_64 = np.array([4, 5])
TOKENS = np.arange(8, dtype=np.int32)
MASKS = np.ones(8, dtype=np.uint8)
WEIGHTS = np.ones(2, dtype=np.float32)
NO_ROOM = "starts must leave room"

GOOD = {
    "survey": (LENGTHS,),
    "shuffled_by_level": (LENGTHS, LIMITS, 1, PACKS),
    "shuffled_by_level_wide": (LENGTHS, LIMITS, 1, PACKS.astype(np.int64)),
    "sort_descending": (ITEMS, 1),
    "best_fit": (ITEMS, 10, 1, True, PACKS),
    "first_fit": (ITEMS, 10, 1, PACKS),
    "next_fit": (ITEMS, 10, 1, PACKS),
    "iterative_sampling": (ITEMS, 10, 1, 9, 3, 1, PACKS),
    "look_ahead": (ITEMS, 10, 1, 1, PACKS),
    "greedy_fill": (ITEMS, 1, STARTS, 0, PACKS),
    "empty_packs": (ITEMS,),
    "group": (ITEMS, PACKS, 2),
    "gather": (ITEMS, PACKS, STARTS),
    "sum_packs": (ITEMS, PACKS, 2),
    "spread_packs": (ITEMS, PACKS, 16, 1, np.array([0]), 1, 2),
    "class_tokens": (ITEMS, PACKS, GROUPS, 1, BINS, PACKS, 2),
    "replica_order": (COSTS, STARTS, 1, 2),
    "mixed_steps": (DEVIATIONS, 1, 1, PEAKS),
    "pack_layout": (BOUNDS, LENGTHS_64, 0, 10),
    "pack_tokens": (BOUNDS, LENGTHS_64, 0, 10, GROUPS, STARTS, [TOKENS], [MASKS]),
    "pack_targets": (BOUNDS, LENGTHS_64, 0, 10, GROUPS, STARTS, [TOKENS], [MASKS], WEIGHTS),
}
WRITTEN = {  # arguments that a kernel writes to
    "sort_descending": (0,),
    "iterative_sampling": (0, 6),
    "best_fit": (4,),
    "first_fit": (3,),
    "next_fit": (3,),
    "look_ahead": (4,),
    "greedy_fill": (0, 2, 4),
    "spread_packs": (1,),
}

# arguments that may be None
OPTIONAL = {
    "shuffled_by_level": (3,),
    "shuffled_by_level_wide": (3,),
    "best_fit": (4,),
    "first_fit": (3,),
    "next_fit": (3,),
    "iterative_sampling": (6,),
    "look_ahead": (4,),
    "class_tokens": (5,),
    "mixed_steps": (3,),
}

# kernel, place of the argument, value, what the message says
WRONG_VALUES = [
    ("shuffled_by_level", 0, np.array([5, 6, 4]), "less than 0 tokens or more than 5"),
    ("shuffled_by_level", 0, np.array([-1, 3, 4]), "less than 0 tokens or more than 5"),
    ("shuffled_by_level", 1, np.array([], dtype=np.int64), "must name a level"),
    ("shuffled_by_level", 1, np.array([5, 4]), "limits must ascend"),
    ("shuffled_by_level", 1, np.array([-1, 4]), "limits must ascend"),
    ("shuffled_by_level", 1, np.array([2**31]), "limits must ascend"),
    ("shuffled_by_level", 3, np.array([0, 3], dtype=np.int32), "indices of seq_lens"),
    ("shuffled_by_level", 3, np.array([-1], dtype=np.int32), "indices of seq_lens"),
    ("greedy_fill", 1, 0, "multiple must be"),
    ("greedy_fill", 2, np.array([-1]), "spaces must be 0 to"),
    ("greedy_fill", 2, np.array([2**31]), "spaces must be 0 to"),
    ("greedy_fill", 4, PACKS[:2], "equally long"),
    ("group", 1, np.array([0, 2, 0], dtype=np.int32), "below the number of packs"),
    ("group", 1, np.array([0, -1, 0], dtype=np.int32), "below the number of packs"),
    ("group", 2, 0, "below the number of packs"),
    ("group", 2, -5, "below the number of packs"),
    ("group", 1, PACKS[:2], "equally long"),
    ("gather", 1, PACKS[:2], "equally long"),
    ("gather", 2, np.array([0]), "below the number of packs"),
    ("gather", 2, np.array([0, 3]), NO_ROOM),
    ("gather", 2, np.array([-1, 2]), NO_ROOM),
    ("gather", 2, np.array([2**63 - 1, 2]), NO_ROOM),
    ("sum_packs", 2, 1, "below the number of packs"),
    ("spread_packs", 4, np.array([2]), "chosen must name packs"),
    ("spread_packs", 4, np.array([-1]), "chosen must name packs"),
    ("spread_packs", 5, -1, "num_new must be 0 to 2147483647"),
    ("spread_packs", 5, 2**62, "num_new must be 0 to 2147483647"),
    ("spread_packs", 2, 0, "capacity must be 1 to 2147483647"),
    ("spread_packs", 3, 0, "multiple must be 1 to 2147483647"),
    ("class_tokens", 2, np.array([0, 1], dtype=np.int32), "group_of must name groups"),
    ("class_tokens", 2, np.array([0, -1], dtype=np.int32), "group_of must name groups"),
    ("class_tokens", 3, 0, "group_of must name groups"),
    ("class_tokens", 3, -1, "must be 0 to 2147483647"),
    ("class_tokens", 3, 2**62, "must be 0 to 2147483647"),
    ("class_tokens", 5, PACKS[:2], "source_of must cover every id"),
    ("class_tokens", 5, np.array([0, 1, 2], dtype=np.int32), "source_of must name sources"),
    ("class_tokens", 5, np.array([0, 1, -1], dtype=np.int32), "source_of must name sources"),
    ("class_tokens", 6, -1, "must be 0 to 2147483647"),
    ("replica_order", 0, np.array([1.0, np.nan]), "costs must be finite"),
    ("replica_order", 0, np.array([1.0, np.inf]), "costs must be finite"),
    ("replica_order", 1, np.array([0, 1]), "starts must run from 0"),
    ("replica_order", 1, np.array([1, 2]), "starts must run from 0"),
    ("replica_order", 1, np.array([], dtype=np.int64), "starts must run from 0"),
    ("replica_order", 1, np.array([0, 0, 2]), "replicas must divide the ranks"),
    ("replica_order", 1, np.array([0, 3, 2]), "replicas must divide the ranks"),
    ("replica_order", 1, np.array([0, -(2**63), 2]), "replicas must divide the ranks"),
    ("replica_order", 2, 0, "starts must run from 0"),
    ("replica_order", 3, 0, "starts must run from 0"),
    ("replica_order", 3, 3, "replicas must divide the ranks"),
    ("mixed_steps", 0, DEVIATIONS[0], "two-dimensional"),
    ("mixed_steps", 0, np.array([[-(2**63)], [0]]), "too large"),
    ("mixed_steps", 3, np.array([-1, 1]), "0 or more"),
    ("mixed_steps", 3, np.array([2**62, 1]), "fit sums"),
    ("mixed_steps", 3, np.array([1]), "one entry per micro-batch"),
    ("mixed_steps", 1, 0, "per_step must divide"),
    ("mixed_steps", 1, 3, "per_step must divide"),
    ("pack_layout", 2, 2**63 - 1, "the part must lie in the pack"),
    ("pack_tokens", 3, 2**63 - 1, "the part must lie in the pack"),
    ("pack_targets", 5, np.array([2**63 - 1, 0]), "a sequence must lie in its corpus"),
]
for _name in ("best_fit", "first_fit", "next_fit", "iterative_sampling", "look_ahead"):
    WRONG_VALUES += [
        (_name, 0, items_of([5, 11], _C.ITEM32), "equally long"),
        (_name, 0, items_of([5, 11, 1], _C.ITEM32), "sequence 1 takes 11 tokens; it must be 1 to"),
        (_name, 0, items_of([0, 5, 1], _C.ITEM32), "sequence 0 takes 0 tokens"),
        (_name, 0, items_of([5, -5, 1], _C.ITEM32), "sequence 1 takes -5 tokens"),
        (_name, 1, 0, "capacity must be 1 to 2147483647"),
        (_name, 1, -1, "capacity must be 1 to 2147483647"),
        (_name, 1, 2**31, "capacity must be 1 to 2147483647"),
        (_name, 2, 0, "multiple must be 1 to 2147483647"),
        (_name, 2, 2**63 - 1, "multiple must be 1 to 2147483647"),
        (_name, 2, 11, "takes 11 tokens; it must be 1 to 10"),
    ]


def call(name, at=None, value=None):
    arguments = [a.copy() if isinstance(a, np.ndarray) else a for a in GOOD[name]]
    if at is not None:
        arguments[at] = value
    return getattr(_C, name)(*arguments)


def test_every_kernel_is_typed_and_tested_here():
    kernels = {name for name in dir(_C) if inspect.isroutine(getattr(_C, name))}
    kernels = {name for name in kernels if not name.startswith("_")}
    types = Path(inspect.getfile(_C)).with_name("_C.pyi").read_text(encoding="utf-8")
    assert kernels == set(re.findall(r"^def (\w+)", types, re.MULTILINE))
    assert kernels == set(GOOD)
    for name in kernels:
        declared = re.search(rf"^def {name}\((.*?)\) ->", types, re.MULTILINE | re.DOTALL)
        assert declared
        signature = re.search(
            rf"^\s*(?:\d+\. )?{name}\((\w+: .*)\) ->", getattr(_C, name).__doc__, re.M
        )
        assert signature
        wanted = re.findall(r"(\w+): ", signature[1])
        assert re.findall(r"(\w+): ", declared[1]) == wanted, name


def test_more_packs_than_memory():
    """Sizes whose bytes do not fit 64 bits are not taken for small ones."""
    for num_packs in (2**60, 2**62):
        with pytest.raises((MemoryError, ValueError)):
            _C.sum_packs(ITEMS, PACKS, num_packs)
        with pytest.raises((MemoryError, ValueError)):
            _C.group(ITEMS, PACKS, num_packs)
        with pytest.raises((MemoryError, ValueError)):
            _C.spread_packs(ITEMS, PACKS.copy(), 16, 1, STARTS[:1], 1, num_packs)
        with pytest.raises((MemoryError, ValueError)):
            _C.replica_order(COSTS, STARTS, 1, num_packs)


def test_room_for_packs():
    for dtype in (_C.ITEM32, _C.ITEM64):
        room = _C.empty_packs(items_of([5, 3, 4], dtype))
        assert room.dtype == dtype["id"]
        assert room.shape == (3,)


@pytest.mark.parametrize("name", GOOD)
def test_good_arguments_are_taken(name):
    call(name)


@pytest.mark.parametrize(("name", "at", "value", "message"), WRONG_VALUES)
def test_wrong_value(name, at, value, message):
    with pytest.raises(ValueError, match=message):
        call(name, at, value)


@pytest.mark.parametrize("name", GOOD)
def test_wrong_types_and_shapes(name):
    for at, argument in enumerate(GOOD[name]):
        wrong = [None, "text", [1, 2], 0.5]
        if isinstance(argument, np.ndarray):
            wrong += [np.array(["a"]), argument.tolist(), 7]
            wrong += [np.zeros(len(argument), dtype=np.complex128)]
            if argument.dtype.names is None:
                wrong += [argument.astype(np.int16), argument.astype(np.uint64)]
                wrong += [argument.astype(argument.dtype.newbyteorder())]
                wrong += [argument.astype(np.float32 if argument.dtype.kind != "f" else np.float16)]
            else:
                wrong += [argument["length"].copy(), argument.astype([("id", "i4"), ("len", "i8")])]
            if len(argument) > 1:
                wrong += [np.repeat(argument, 2, axis=0)[::2]]  # not contiguous
            if argument.ndim == 1 and name != "empty_packs":
                wrong += [
                    argument.reshape(1, -1),
                    argument.reshape(-1, 1),
                    argument[:1].reshape(()),
                ]
        else:
            wrong += [np.zeros(3), 2**64]
        for value in wrong:
            may_be_none = value is None and at in OPTIONAL.get(name, ())
            if may_be_none or isinstance(argument, bool):
                continue
            with pytest.raises((TypeError, ValueError)):
                call(name, at, value)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_must_be_writeable(name):
    for at in WRITTEN[name]:
        locked = GOOD[name][at].copy()
        locked.flags.writeable = False
        with pytest.raises(ValueError, match="not writeable"):
            call(name, at, locked)
