"""A finished sweep with planted truth, made once: tests read it, and copy it before they change it."""

import shutil
from pathlib import Path

import pytest

from tests.scaling.synthetic import write_sweep


@pytest.fixture(scope="session")
def synthetic_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "synthetic")


@pytest.fixture
def sweep_copy(synthetic_sweep: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(synthetic_sweep, tmp_path / "sweep"))
