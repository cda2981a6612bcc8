"""The lengths that a recipe names, from a table or an array."""

from pathlib import Path

import numpy as np

from megatron_hbp import length_table
from megatron_hbp.arrays import load_array
from megatron_hbp.packing import check_lengths


def read_lengths(file: Path) -> np.ndarray:
    """int32 or int64 [n], tokens. Raises ValueError for a file that holds no lengths."""
    if file.suffix.lower() == ".csv":
        return length_table.read_lengths(file)
    try:
        array = load_array(file, mapped=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"lengths {file} cannot be read ({error}); give a .csv or .npy") from None
    check_lengths(array, f"lengths {file}")
    return array
