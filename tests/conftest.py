"""Shared by all tests: strict broadcasting, and the one way to published data."""

import os
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published data and texts (`LM_SHARED`, default `../shared`); the test is skipped without it."""
    folder = Path(os.environ.get("LM_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder of published data at {folder} (set LM_SHARED)")
    return folder
