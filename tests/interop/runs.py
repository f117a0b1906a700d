"""Run folders of random parameters, as `lm train` leaves them but without training."""

import contextlib
from pathlib import Path
from typing import Any

from lm.base.config import to_dict
from lm.base.files import write_json
from lm.data.tokenizer import ByteTokenizer
from lm.model.config import FeedForward, ModelConfig, Norm, Positions
from lm.run.checkpoint import Checkpoints
from lm.run.folder import RunFolder
from tests.model import variants

LLAMA = variants.tiny(vocab_size=257, n_kv_head=2, d_head=6, tied_embedding=False)
GPT2 = variants.tiny(
    vocab_size=257, norm=Norm.LAYERNORM, feed_forward=FeedForward.GELU, positions=Positions.LEARNED, bias=True
)


def make_run(path: Path, model: ModelConfig, params: Any = None) -> Path:
    """A run folder with one checkpoint of the model's own random parameters, or of these."""
    run = RunFolder(path)
    path.mkdir()
    config = {"model": to_dict(model), "data": {"tokenizer": "bytes"}}
    write_json(run.config, {"config": config, "identity": {"tokenizer": ByteTokenizer().fingerprint}})
    with contextlib.closing(Checkpoints(run.checkpoints, keep=1)) as checkpoints:
        checkpoints.save(0, {"params": variants.parameters(model) if params is None else params}, {})
    return path
