"""Whether a run fits its tokenizer and its devices: refused here, rather than wrong deep inside a compiled step."""

from jax.sharding import Mesh

from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer
from lm.parallel.rules import check_divides
from lm.train.config import RunConfig


def check_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuses a vocabulary that is not the tokenizer's; parameters that come from elsewhere may have more rows.

    Raises:
      UsageError: naming both sizes.
    """
    spare = config.model.vocab_size - tokenizer.vocab_size
    if spare < 0 or (spare and config.init_from is None):
        raise UsageError(
            f"vocab_size is {config.model.vocab_size}, and the tokenizer has {tokenizer.vocab_size} entries",
            where="config.model",
            do="Set --config.model.vocab_size to the tokenizer's, or name another --config.data.tokenizer.",
        )


def check_mesh(config: RunConfig, mesh: Mesh) -> None:
    """Refuses what the mesh cannot cut into equal parts.

    Raises:
      UsageError: naming every dimension that does not divide, its size, and the mesh axes with their sizes.
    """
    model = config.model
    sizes = {
        "batch": ("rows a microbatch (batch_size / accumulate)", config.batch_size // config.accumulate),
        "sequence": ("context_length", model.context_length),
        "keys": ("context_length", model.context_length),
        "position": ("context_length", model.context_length),
        "embed": ("d_model", model.d_model),
        "norm": ("d_model", model.d_model),
        "mlp": ("d_ff", model.d_ff),
        "heads": ("n_head", model.n_head),
        "kv_heads": ("n_kv_head", model.kv_heads),
        "head": ("d_head", model.head_width),
        "vocab": ("vocab_size", model.vocab_size),
        "layers": ("n_layer", model.n_layer),
        **({"experts": ("experts.count", model.experts.count)} if model.experts else {}),
    }
    check_divides(sizes, mesh, config.mesh.rules)
