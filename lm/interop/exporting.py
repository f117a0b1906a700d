"""`lm export`: a run becomes a Hugging Face folder that `transformers` loads."""

import functools
from pathlib import Path

import numpy as np
from flax import traverse_util

from lm.base.files import refuse_filled, whole_folder, write_json
from lm.interop.families import layout_for
from lm.interop.layout import Layout
from lm.interop.placement import Place, by_tensor, places
from lm.interop.tensors import Tensor, write_sharded
from lm.interop.vocabulary import write_tokenizer
from lm.model.config import Dtype
from lm.run.restore import load_model

SHARD_BYTES = 5_000_000_000


def export_model(
    run: Path | str, out: Path, *, dtype: Dtype = Dtype.FLOAT32, shard_bytes: int = SHARD_BYTES
) -> tuple[Layout, list[Path]]:
    """Writes the folder `out`, whole or not at all; returns the layout that says the model and the files of tensors.

    Args:
      run: a run folder, local or gs://.
      dtype: of the tensors; bfloat16 rounds them to the nearest.
      shard_bytes: a file is no larger, unless a single tensor is.

    Raises:
      UsageError: `out` holds something, not a run folder, or no layout holds this model.
      RunError: no usable checkpoint, or a full disk.
    """
    refuse_filled(out)
    loaded = load_model(run)
    layout = layout_for(loaded.model)
    leaves = {path: np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(loaded.params, sep="/").items()}
    tensors = by_tensor(places(layout, {path: leaf.shape for path, leaf in leaves.items()}))

    def made(held: list[Place]) -> np.ndarray:
        return np.concatenate([place.theirs(leaves[place.leaf]) for place in held], axis=-1)

    with whole_folder(out) as part:
        ids = write_tokenizer(loaded.tokenizer, part, loaded.model.context_length)
        write_json(part / "config.json", {**layout.write(loaded.model), **ids, "torch_dtype": dtype.value})
        names = write_sharded(
            part,
            [Tensor(name, held[0].of, functools.partial(made, held)) for name, held in tensors.items()],
            dtype,
            shard_bytes,
        )
    return layout, [out / path.name for path in names]
