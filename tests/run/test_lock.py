"""Who holds a folder: told to the second who comes, and to whoever only looks."""

import os
import platform

import pytest

from lm.base.errors import RunError
from lm.run.lock import holder, locked


def test_the_holder_is_named_while_it_holds_and_not_after(tmp_path):
    assert holder(tmp_path) is None
    with locked(tmp_path):
        found = holder(tmp_path)
        assert (found.pid, found.host) == (os.getpid(), platform.node())
        with pytest.raises(RunError) as caught, locked(tmp_path):
            pass
        assert str(found) in str(caught.value)
    assert holder(tmp_path) is None
    with locked(tmp_path):
        pass
