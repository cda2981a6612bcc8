"""Reading .npy files: whatever is wrong with the content of one is a ValueError."""

import os

import numpy as np


def load_array(path: str | os.PathLike, *, mapped: bool = True) -> np.ndarray:
    """The array of a .npy file, memory-mapped and read-only or (mapped=False) in memory.

    Pickled objects are refused. Raises ValueError when the file is damaged or no array, OSError
    when it cannot be read.
    """
    try:
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (OSError, ValueError):
        raise
    except Exception as error:  # numpy parses the header as Python: it raises what that does
        raise ValueError(f"{os.fspath(path)} is no whole array ({error})") from None
