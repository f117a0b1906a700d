"""Whether a run fits its tokenizer and its devices: refused here, rather than wrong deep inside a compiled step."""

import math

from jax.sharding import Mesh

from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer
from lm.parallel.rules import check_divides, cut_over
from lm.train.config import AnyRun, RunConfig


def check_vocabulary(config: AnyRun, tokenizer: Tokenizer) -> None:
    """Refuses a vocabulary that is not the tokenizer's; parameters that come from elsewhere may have more rows.

    Raises:
      UsageError: naming both sizes.
    """
    spare = config.model.vocab_size - tokenizer.vocab_size
    from_elsewhere = isinstance(config, RunConfig) and config.init_from is not None
    if spare < 0 or (spare and not from_elsewhere):
        raise UsageError(
            f"vocab_size is {config.model.vocab_size}, and the tokenizer has {tokenizer.vocab_size} entries",
            where="config.model",
            do="Set --config.model.vocab_size to the tokenizer's, or name another --config.data.tokenizer.",
        )


def check_mesh(config: RunConfig, mesh: Mesh) -> None:
    """Refuses what the mesh cannot cut into equal parts, and the sequence of a recurrent model at all.

    Raises:
      UsageError: naming every dimension that does not divide, its size, and the mesh axes with their sizes.
    """
    model = config.model
    over = [axis for axis in cut_over(config.mesh.rules).get("sequence", ()) if mesh.shape[axis] > 1]
    if model.mixer.recurrent and over:
        raise UsageError(
            f"the sequence is cut over {' x '.join(over)}, and mixer is {model.mixer}: positions wait for one another",
            where="config.mesh",
            do="Use another axis.",
        )
    if model.mixer.recurrent:
        widths = {"hidden": ("d_model", model.d_model)}
    else:
        widths = {
            "heads": ("n_head", model.n_head),
            "kv_heads": ("n_kv_head", model.kv_heads),
            "head": ("d_head", model.head_width),
        }
    sizes = {
        "batch": ("rows a microbatch (batch_size / accumulate)", config.batch_size // config.accumulate),
        "sequence": ("context_length", model.context_length),
        "keys": ("context_length", model.context_length),
        "position": ("positions of the table", model.position_count),
        "embed": ("d_model", model.d_model),
        "norm": ("d_model", model.d_model),
        "mlp": ("d_ff", model.d_ff),
        **widths,
        "vocab": ("vocab_size", model.vocab_size),
        "layers": ("n_layer", math.gcd(model.n_layer, model.encoder.n_layer if model.encoder else 0)),
        **({"experts": ("experts.count", model.experts.count)} if model.experts else {}),
        **({"patch": ("patch_width", model.patch_width)} if model.patch_width else {}),
    }
    check_divides(sizes, mesh, config.mesh.rules)
