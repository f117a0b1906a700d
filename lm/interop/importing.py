"""`lm import`: a Hugging Face folder becomes a run folder, as if trained here.

Nothing is written before config.json, tokenizer and every tensor's name, shape and type have been checked. The model is
in memory once: each leaf is filled tensor by tensor from the files.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from lm.base.config import content_hash, to_dict
from lm.base.errors import UsageError
from lm.base.files import read_object, refuse_filled, sha256_file, whole_folder, write_json
from lm.base.progress import bar
from lm.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from lm.interop.families import layout_called
from lm.interop.layout import Layout
from lm.interop.placement import Place, Shape, by_tensor, parameter_shapes, places
from lm.interop.tensors import HEAD, Source
from lm.interop.vocabulary import TOKENIZER, spec_of
from lm.model.accounting import count_parameters
from lm.model.config import Dtype, ModelConfig
from lm.run.checkpoint import Checkpoints
from lm.run.folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Imported:
    """What was read: the family, our configuration and the number of parameters."""

    model_type: str
    model: ModelConfig
    parameters: int


def import_model(folder: Path, out: Path, *, dtype: Dtype | None = None, tokenizer: str | None = None) -> Imported:
    """Writes the run folder `out`, whole or not at all.

    Args:
      folder: config.json, tokenizer.json and model.safetensors or shards with their index.
      dtype: that products are computed in; None: what config.json says (float16 becomes float32). Parameters are
        float32, which holds all three exactly.
      tokenizer: 'bytes' or a tokenizer.json to take instead of the folder's own.

    Raises:
      UsageError: `out` holds something, or the folder is not one that is supported; the message names the field or
        tensor.
      RunError: a damaged file, or a full disk.
    """
    refuse_filled(out)
    where = folder / "config.json"
    values = _read_config(where)
    layout = layout_called(values.get("model_type"), str(where))
    model = layout.read(values, str(where))
    if dtype is not None:
        model = dataclasses.replace(model, dtype=dtype)
    spec = spec_of(folder, tokenizer, values)
    known = load_tokenizer(spec)
    if known.vocab_size > model.vocab_size:
        raise UsageError(f"vocab_size is {model.vocab_size}, and the tokenizer has {known.vocab_size} entries",
                         where=str(where))  # fmt: skip
    shapes = parameter_shapes(model)
    found = places(layout, shapes)
    with Source(folder, layout.prefix, layout.buffers) as source:
        _check(source, layout, model, by_tensor(found))
        with whole_folder(out) as part, bar("importing", total=len(shapes)) as told:
            params = {}
            for done, (leaf, shape) in enumerate(shapes.items()):
                told.update(done, leaf)
                params[leaf] = _leaf(source, shape, found[leaf])
            told.update(len(shapes), "saving")
            run = RunFolder(part)
            with contextlib.closing(Checkpoints(run.checkpoints, keep=1)) as checkpoints:
                checkpoints.save(0, {"params": traverse_util.unflatten_dict(params, sep="/")}, {})
            said = known.spec
            if isinstance(known, HuggingFaceTokenizer):
                shutil.copyfile(known.path, part / TOKENIZER)
                said = "#".join([TOKENIZER, *known.spec.split("#")[1:]])
            identity = {
                "tokenizer": known.fingerprint,
                "weights": content_hash([sha256_file(path) for path in source.files], 64),
            }
            config = {"model": to_dict(model), "data": {"tokenizer": said}}
            write_json(run.config, {"config": config, "identity": identity})
    return Imported(layout.model_type, model, count_parameters(model).total)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError("there is no such file", where=str(path), do="Name a folder in the Hugging Face format.")
    return read_object(path)


def _check(source: Source, layout: Layout, model: ModelConfig, tensors: Mapping[str, Sequence[Place]]) -> None:
    """Sees that the tensors are those of this model; a tied head may be there a second time."""
    table = f"{layout.prefix}{layout.modules['embedding']}.weight"
    source.check({name: held[0].of for name, held in tensors.items()}, [HEAD] if model.tied_embedding else [])
    if model.tied_embedding and HEAD in source and not np.array_equal(source.read(HEAD), source.read(table)):
        raise UsageError(f"tie_word_embeddings is true, and {HEAD} differs from {table}", where=str(source.folder),
                         do="Set it to false if the head is one of its own.")  # fmt: skip


def _leaf(source: Source, shape: Shape, held: Sequence[Place]) -> jax.Array:
    filled = np.empty(shape, np.float32)
    for place in held:
        filled[place.index] = place.ours(source.read(place.tensor))
    # Orbax copies NumPy's arrays before it saves them, and only reads jax's.
    return jax.device_put(filled, jax.devices("cpu")[0])
