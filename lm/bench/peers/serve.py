"""The far end of a peer: run as a script, it prepares one workload and then times it as often as it is asked.

`python serve.py FILE.py` loads FILE.py, whose `setup(spec)` returns (facts, run): plain JSON, and a function that does
k steps and returns when they are done. Requests and answers are lines of JSON: {"setup": spec} -> {"facts": ...},
{"run": k} -> {"seconds": s}; a failure is {"error": "one line"}. The end of the input ends the program.
Only the standard library is used here, because the interpreter is somebody else's.
"""

import importlib.util
import json
import os
import sys
import time


def main(path: str) -> None:
    """Answers requests on standard input until it ends."""
    # What libraries print must not mix with the answers: file descriptor 1 becomes standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict
            if "setup" in request:
                begun = time.perf_counter()
                facts, run = _load(path).setup(request["setup"])
                answer = {"facts": {**facts, "setup_seconds": time.perf_counter() - begun}}
            elif run is None:
                raise RuntimeError("asked to run before it was set up")
            else:
                begun = time.perf_counter()
                run(request["run"])
                answer = {"seconds": time.perf_counter() - begun}
        except Exception as error:  # noqa: BLE001  # whatever it is, the other side names it
            first = (str(error).strip() or "no message").splitlines()[0]
            answer = {"error": f"{type(error).__name__}: {first[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


def _load(path: str):
    spec = importlib.util.spec_from_file_location("peer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
