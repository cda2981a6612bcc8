"""Types of the compiled kernels; see csrc/packing.h."""

import numpy as np

def best_fit(
    seq_lens: np.ndarray, visit: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]: ...
def first_fit(
    seq_lens: np.ndarray, visit: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]: ...
