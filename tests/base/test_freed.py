"""Freed memory is used again without asking the system for it."""

import platform
import subprocess
import sys

import pytest

from lm.base import freed

PROGRAM = """
import resource, sys
import numpy as np
from lm.base.freed import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def use():
    np.empty(2**20, np.float64).fill(1.0)
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 2**20 * 8 // 4096  # of the array: the least that one new mapping costs, with pages of 4 KiB
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")


def faults(how, environment=None):
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    return int(done.stdout)


@glibc
def test_a_process_that_keeps_its_memory_maps_no_page_twice():
    assert faults("kept") < PAGES


@glibc
def test_the_environment_says_the_same_to_a_program_that_is_started(monkeypatch):
    for name, value in freed.environment().items():
        monkeypatch.setenv(name, value)
    assert faults("as it comes") < PAGES
