"""A peer without any library: it says what it was told and writes down whose turn it was."""

import os
import time
from pathlib import Path


def setup(spec: dict):
    print("what libraries print does not disturb the answers")
    if spec.get("fail") == "setup":
        raise ModuleNotFoundError("No module named 'torch'\nand more lines")
    turns = 0

    def run(count: int) -> None:
        nonlocal turns
        turns += 1
        if spec.get("fail") == "run" and turns == 2:
            os._exit(3)
        with Path(spec["log"]).open("a") as log:
            log.write(f"{spec['name']} {count}\n")
        time.sleep(0.001 * count)

    return {"loss": spec.get("loss", 1.0)}, run
