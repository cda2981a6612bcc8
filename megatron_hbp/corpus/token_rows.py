"""Rows that hold token ids already, with labels or masks that say what is trained.

Guarantees:
- a token is trained only if every one of the labels and masks given says so;
- labels are Hugging Face's: labels[i] is -100 or input_ids[i]; others are refused, not shifted;
- padding goes, by the attention mask; a hole in it, or a row of several packed samples, is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hbp.corpus.row_values import RowError, type_name

ATTENTION_MASK = "attention_mask"
POSITIONS = "position_ids"
IGNORED_LABEL = -100


@dataclass(frozen=True)
class TokenRow:
    """tokens: int64 [n], n >= 2. mask: uint8 [n], 1 = the token is trained as a target.

    At least one token after the first is trained. Ids are not checked against a vocabulary.
    """

    tokens: np.ndarray
    mask: np.ndarray


def read_tokens(
    row: Mapping[str, Any], tokens_key: str, labels_key: str | None, mask_keys: list[str]
) -> TokenRow:
    """A row of token ids. labels_key and mask_keys: keys that the row has, at least one of them.

    Raises RowError.
    """
    tokens = _whole_numbers(row[tokens_key], tokens_key)
    if len(tokens) == 0:
        raise RowError("no token", f"no token: {tokens_key} is empty")
    if tokens.min() < 0:
        raise RowError("negative token id", f"negative token id: {tokens.min()} in {tokens_key}")
    trained = np.ones(len(tokens), dtype=bool)
    if labels_key is not None:
        trained &= _labelled(row[labels_key], labels_key, tokens, tokens_key)
    for key in mask_keys:
        trained &= _mask(row[key], key, tokens, tokens_key)
    kept = _not_padding(row, tokens, tokens_key)
    tokens, trained = tokens[kept], trained[kept]
    _check_one_sample(row, kept)
    if not trained[1:].any():
        raise RowError("no trained token")
    return TokenRow(tokens, trained.view(np.uint8))


def _whole_numbers(value: Any, key: str) -> np.ndarray:
    array = _array(value, key)
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() >= 2**63):
        raise _not_numbers(key, "whole numbers")
    return array.astype(np.int64, copy=False)


def _array(value: Any, key: str) -> np.ndarray:
    """[n] of any numeric or boolean type."""
    if not isinstance(value, (list, np.ndarray)):
        raise RowError(f"{key} is not a list", f"{key} is {type_name(value)}, not a list")
    if len(value) == 0:
        return np.zeros(0, dtype=np.int64)
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of several lengths
        raise _not_numbers(key, "numbers") from None
    if array.ndim > 1:
        raise RowError(f"{key} is nested", f"{key} is a list of lists; give one list per row")
    return array


def _not_numbers(key: str, what: str) -> RowError:
    return RowError(f"{key} is not a list of numbers", f"{key} is not a list of {what}")


def _of_length(array: np.ndarray, key: str, tokens: np.ndarray, tokens_key: str) -> np.ndarray:
    if len(array) != len(tokens):
        raise RowError(
            f"{key} and {tokens_key} differ in length",
            f"{key} has {len(array)} entries, {tokens_key} {len(tokens)}",
        )
    return array


def _labelled(value: Any, key: str, tokens: np.ndarray, tokens_key: str) -> np.ndarray:
    """bool [n]: where a label is not -100."""
    labels = _of_length(_whole_numbers(value, key), key, tokens, tokens_key)
    trained = labels != IGNORED_LABEL
    wrong = np.flatnonzero(trained & (labels != tokens))
    if len(wrong) == 0:
        return trained
    text = (
        f"{key}[{wrong[0]}] is {labels[wrong[0]]}, neither -100 nor {tokens_key}[{wrong[0]}] = "
        f"{tokens[wrong[0]]}"
    )
    if len(wrong) > 1 and _equal_where(trained[:-1], labels[:-1], tokens[1:]):
        raise RowError(
            "labels are shifted",
            f"{text}; they look shifted by one, each the token after: give them unshifted",
        )
    if len(wrong) > 1 and _equal_where(trained[1:], labels[1:], tokens[:-1]):
        raise RowError(
            "labels are shifted",
            f"{text}; they look shifted by one, each the token before: give them unshifted",
        )
    raise RowError("labels are not the tokens", text)


def _equal_where(trained: np.ndarray, labels: np.ndarray, tokens: np.ndarray) -> bool:
    return bool(trained.any() and (labels[trained] == tokens[trained]).all())


def _mask(value: Any, key: str, tokens: np.ndarray, tokens_key: str) -> np.ndarray:
    """bool [n] from 0 and 1 or truth values."""
    array = _of_length(_array(value, key), key, tokens, tokens_key)
    if array.dtype == bool:
        return array
    if array.dtype.kind not in "iuf":
        raise _not_numbers(key, "0 and 1")
    mask = array != 0
    if not (array[mask] == 1).all():
        raise RowError(
            f"{key} is not 0 and 1", f"{key} has {array[mask & (array != 1)][0]}; it must be 0 or 1"
        )
    return mask


def _not_padding(row: Mapping[str, Any], tokens: np.ndarray, tokens_key: str) -> slice:
    """The part of a row that its attention mask, where it has one, shows."""
    if row.get(ATTENTION_MASK) is None:
        return slice(0, len(tokens))
    shown = np.flatnonzero(_mask(row[ATTENTION_MASK], ATTENTION_MASK, tokens, tokens_key))
    if len(shown) == 0:
        raise RowError("no token", f"no token: {ATTENTION_MASK} is 0 everywhere")
    if shown[-1] - shown[0] + 1 != len(shown):
        hole = int(shown[np.flatnonzero(np.diff(shown) > 1)[0]]) + 1
        raise RowError(
            f"hole in {ATTENTION_MASK}", f"hole in {ATTENTION_MASK}: 0 at {hole}, 1 on both sides"
        )
    return slice(int(shown[0]), int(shown[-1]) + 1)


def _check_one_sample(row: Mapping[str, Any], kept: slice) -> None:
    """Positions that start again show samples packed into one row, which would see each other."""
    value = row.get(POSITIONS)
    if not isinstance(value, (list, np.ndarray)):
        return
    try:
        positions = np.asarray(value[kept])
    except ValueError:  # lists of several lengths
        raise _not_numbers(POSITIONS, "whole numbers") from None
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        return
    if (np.diff(positions.astype(np.int64)) != 1).any():
        raise RowError(
            "packed row", f"packed row: {POSITIONS} starts again inside; give one sample per row"
        )
