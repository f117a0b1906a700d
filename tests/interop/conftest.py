from tests.decode.conftest import compiled_quickly  # noqa: F401
