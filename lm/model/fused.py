"""Which attention a step is compiled with: the plain one, or the kernel of the platform that it is compiled for.

Kernels never hold a T x T array of scores. TPU: Pallas splash attention, which ships with JAX. NVIDIA: cuDNN's, through
`jax.nn.dot_product_attention`. They compute what `attend` computes under `causal_mask`, up to rounding. The one place
that chooses is `choose`; whoever gives the model no choice gets the plain one.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from lm.model.attention import USUAL, Attention, Plain, Scoring, scaled
from lm.model.config import Dtype, ModelConfig
from lm.model.execution import Products

BLOCKS = (512, 256, 128)  # of queries and of keys that splash attention holds at once: the largest that divides T
CUDNN_WIDEST = 128  # head width that cuDNN's backward pass takes on every GPU since Ampere


class Kernel(enum.StrEnum):
    """A fused attention."""

    SPLASH = "splash attention (Pallas)"
    CUDNN = "cuDNN attention"

    @property
    def products(self) -> Products:
        """Scores are computed again backward: once by cuDNN (Dao 2023, arXiv:2307.08691), by splash attention in each
        of its two kernels, of which the one for queries computes 3 products and the one for keys and values 4."""
        return Products(backward=7 if self is Kernel.SPLASH else 5, causal=True)


@dataclasses.dataclass(frozen=True)
class Fused:
    """A kernel that each device runs on its own rows and heads; the sequence stays whole.

    `rows` and `heads` are the mesh axes of the batch and of the heads, `windows` the model's `window_kinds`.
    """

    kernel: Kernel
    mesh: Mesh
    rows: tuple[str, ...]
    heads: tuple[str, ...]
    windows: tuple[int | None, ...] = (None,)

    @property
    def products(self) -> Products:
        """What the kernel executes."""
        return self.kernel.products

    def sees(self, length: int, segments_BT: jax.Array | None, window: int | None) -> tuple[Any, ...]:
        """The document ids and, where layers differ in it, whether there is the window: the mask is in the kernel."""
        del length
        return (segments_BT,) if len(self.windows) == 1 else (segments_BT, jnp.array(window is not None))

    def __call__(
        self, q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, seen: tuple[Any, ...], scoring: Scoring
    ) -> jax.Array:
        """Runs the kernel in a `shard_map`; rows or heads that do not divide over their axes stay whole."""
        rows = self.rows if q_BTHC.shape[0] % self._size(self.rows) == 0 else None
        heads = self.heads if q_BTHC.shape[2] % self._size(self.heads) == 0 else None
        if heads and k_BSKC.shape[2] % self._size(heads):  # a device's query heads would find no keys: copy them
            k_BSKC, v_BSKC = (jnp.repeat(x, q_BTHC.shape[2] // x.shape[2], axis=2) for x in (k_BSKC, v_BSKC))
        spec, ids = PartitionSpec(rows, None, heads), PartitionSpec(rows)
        run = splash if self.kernel is Kernel.SPLASH else cudnn

        def on_one_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, *windowed: jax.Array):
            branches = [partial(run, window=window, scoring=scoring) for window in self.windows]
            return (
                jax.lax.cond(windowed[0], *branches, q, k, v, segments) if windowed else branches[0](q, k, v, segments)
            )

        whole = [PartitionSpec()] * (len(self.windows) - 1)
        return jax.shard_map(
            on_one_device, mesh=self.mesh, in_specs=(spec, spec, spec, ids, *whole), out_specs=spec, check_vma=False
        )(q_BTHC, k_BSKC, v_BSKC, *seen)

    def __str__(self) -> str:
        return str(self.kernel)

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


def choose(config: ModelConfig, length: int, mesh: Mesh, rules: Sequence[tuple[str, Any]]) -> Attention:
    """The attention for rows of `length` tokens on the devices of `mesh`, laid out by `rules`.

    A `Plain` says why it is no kernel.
    """
    if config.encoder is not None:
        return Plain("no kernel here is for a decoder behind an encoder")
    device = mesh.devices.flat[0]
    batch, sequence, heads = (_axes(name, rules) for name in ("batch", "sequence", "heads"))
    if device.platform not in ("tpu", "gpu") or (device.platform == "gpu" and "NVIDIA" not in device.device_kind):
        return Plain(f"there is no kernel for {device.device_kind}")
    if any(mesh.shape[axis] > 1 for axis in sequence):
        return Plain("the sequence is spread over devices")
    kernel = Kernel.SPLASH if device.platform == "tpu" else Kernel.CUDNN
    misfit = _splash_misfit(length) if kernel is Kernel.SPLASH else _cudnn_misfit(config, length)
    return Plain(misfit) if misfit else Fused(kernel, mesh, batch, heads, config.window_kinds)


def splash(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segments_BT: jax.Array | None,
    window: int | None,
    scoring: Scoring = USUAL,
    interpret: bool = False,
) -> jax.Array:
    """`attend` under `causal_mask` as JAX's Pallas kernel for TPU, on one device; T is a multiple of 128.

    Blocks of keys that no query sees are left out. `interpret` runs it on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, T, H, _ = q_BTHC.shape
    block = next(block for block in BLOCKS if T % block == 0)
    mask = masks.CausalMask((T, T)) if window is None else masks.LocalMask((T, T), (window - 1, 0), 0)
    blocks = kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * H),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scoring.softcap,
        interpret=interpret,
    )
    q_BHTC, k_BKSC, v_BKSC = (x.swapaxes(1, 2) for x in (scaled(q_BTHC, scoring), k_BSKC, v_BSKC))
    ids = None if segments_BT is None else kernels.SegmentIds(segments_BT, segments_BT)
    return jax.vmap(kernel)(q_BHTC, k_BKSC, v_BKSC, ids).swapaxes(1, 2)


def cudnn(
    q_BTHC: jax.Array,
    k_BSKC: jax.Array,
    v_BSKC: jax.Array,
    segments_BT: jax.Array | None,
    window: int | None,
    scoring: Scoring = USUAL,
) -> jax.Array:
    """`attend` under `causal_mask` as cuDNN's kernel, which has no soft cap of scores.

    Documents cost a mask [B, 1, T, T] in the inputs' type.
    """
    mask_B1TS = None if segments_BT is None else segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    left = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTHC,
        k_BSKC,
        v_BSKC,
        mask=mask_B1TS,
        scale=scoring.scale,
        is_causal=True,
        local_window_size=left,
        implementation="cudnn",
    )


def _splash_misfit(length: int) -> str:
    return f"{length} tokens are no multiple of {BLOCKS[-1]}" if length % BLOCKS[-1] else ""


def _cudnn_misfit(config: ModelConfig, length: int) -> str:
    if config.dtype is not Dtype.BFLOAT16:
        return f"cuDNN has no {config.dtype}"
    if config.attention_softcap is not None:
        return f"cuDNN has no soft cap of scores (attention_softcap {config.attention_softcap})"
    if config.head_width % 8 or config.head_width > CUDNN_WIDEST:
        return f"head width {config.head_width} is no multiple of 8 up to {CUDNN_WIDEST}"
    return f"{length} tokens are an odd number" if length % 2 else ""


def _axes(name: str, rules: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    entry = next((axes for logical, axes in rules if logical == name), None)
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
