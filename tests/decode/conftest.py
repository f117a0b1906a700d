import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """Most of the time here goes into compiling tiny programs, of which each runs for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
