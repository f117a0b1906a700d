from collections.abc import Iterator

import jax
import pytest

from tests.run.conftest import small_disk  # noqa: F401

_CACHE = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One compilation cache for these tests and for the processes that they start, as a sweep has."""
    values = {**_CACHE, "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
    before = {name: getattr(jax.config, name) for name in values}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
