"""The model is in memory once: measured where it is far larger than all else that a process holds."""

import subprocess
import sys

import numpy as np
import pytest

from lm.base.files import write_json
from lm.data.tokenizer import ByteTokenizer
from lm.interop.families import layout_for
from lm.interop.placement import by_tensor, parameter_shapes, places
from lm.interop.tensors import Tensor, write_sharded
from lm.interop.vocabulary import write_tokenizer
from lm.model.config import Dtype
from tests.model import variants

LARGE = variants.tiny(vocab_size=8000, n_layer=8, d_model=768, n_head=8, d_ff=2112, tied_embedding=False)
MEASURED = """
import sys, threading, time
from pathlib import Path
from lm.interop import exporting, importing

def held():  # without pages of files
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], held())
        time.sleep(0.002)

peak, before = [0], held()
threading.Thread(target=watch, daemon=True).start()
{"import": importing.import_model, "export": exporting.export_model}[sys.argv[1]](*map(Path, sys.argv[2:]))
print(peak[0] - before)
"""


def peak(*arguments) -> int:
    """Bytes that a process of its own holds at most, beyond its libraries."""
    done = subprocess.run([sys.executable, "-c", MEASURED, *map(str, arguments)], capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count of anonymous pages")
def test_never_two_copies(tmp_path):
    layout, shapes = layout_for(LARGE), parameter_shapes(LARGE)
    tensors = by_tensor(places(layout, shapes))
    (tmp_path / "hf").mkdir()
    ids = write_tokenizer(ByteTokenizer(), tmp_path / "hf", LARGE.context_length)
    write_json(tmp_path / "hf" / "config.json", {**layout.write(LARGE), **ids, "torch_dtype": "float32"})
    random = np.random.default_rng(0)
    made = [
        Tensor(name, held[0].of, lambda n=held[0].of: random.random(n, np.float32)) for name, held in tensors.items()
    ]
    write_sharded(tmp_path / "hf", made, Dtype.FLOAT32, 10**8)
    model = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    # Measured: 1.61 times the model in and 1.53 out, most of what is more within Orbax.
    assert peak("import", tmp_path / "hf", tmp_path / "run") < 1.9 * model
    assert peak("export", tmp_path / "run", tmp_path / "out") < 1.9 * model
