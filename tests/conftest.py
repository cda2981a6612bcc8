"""Fixtures shared by all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator:
    """Forked gloo jobs with megatron loaded; skipped where the `train` extra is not installed."""
    pytest.importorskip("megatron.training", reason="needs the extra [train]")
    from tests.distributed.cluster import Cluster

    started = Cluster()
    yield started
    started.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real SFT rows and tokenizers beside the checkout; tests that need them skip without."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder
