"""nanoGPT's model and step in PyTorch, written anew: what a good plain training loop does on the same shapes.

Fused query-key-value projection, scaled_dot_product_attention, pre-norm blocks, learned positions, tied head, fused
AdamW with decay on matrices, global-norm clipping. GELU is the tanh form (as in GPT-2 and in ours; nanoGPT itself takes
the exact one). It starts from the parameters that it is given, so that its first loss shows whether it is the same
function. Sizes and arrays are described in `lm.bench.train`.
"""

import contextlib
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and a two-matrix feed-forward, each behind a LayerNorm without bias."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD):
        """One layer of the residual stream."""
        B, T, D = x_BTD.shape
        parts = self.qkv(self.attention_norm(x_BTD)).split(D, dim=2)
        q_BHTC, k_BHTC, v_BHTC = (part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in parts)
        mixed_BHTC = functional.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BHTC.transpose(1, 2).reshape(B, T, D))
        hidden_BTF = functional.gelu(self.up(self.feed_forward_norm(x_BTD)), approximate="tanh")
        return x_BTD + self.down(hidden_BTF)


class Model(nn.Module):
    """Token ids and targets in, mean cross-entropy out."""

    def __init__(self, sizes: dict):
        super().__init__()
        width = sizes["d_model"]
        self.tokens = nn.Embedding(sizes["vocab_size"], width)
        self.positions = nn.Embedding(sizes["context_length"], width)
        self.blocks = nn.ModuleList(Block(width, sizes["n_head"], sizes["d_ff"]) for _ in range(sizes["n_layer"]))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, sizes["vocab_size"], bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs_BT, targets_BT):
        """Nats per token."""
        x_BTD = self.tokens(inputs_BT) + self.positions(torch.arange(inputs_BT.shape[1], device=inputs_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def setup(spec: dict):
    """Builds model and optimizer, does the first step, and returns its loss and gradient norm with the step."""
    if spec["device"] == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("this PyTorch sees no GPU, and ours runs on one")
    torch.set_num_threads(spec["threads"])
    device = torch.device(spec["device"])
    arrays = dict(np.load(spec["arrays"]))
    model = Model(spec["sizes"])
    _copy(model, arrays)
    model.to(device)
    inputs_BT, targets_BT = (
        torch.from_numpy(arrays[name].astype(np.int64)).to(device) for name in ("inputs", "targets")
    )
    optimizer = _adamw(model, spec["optimizer"])
    clip_norm = spec["optimizer"]["clip_norm"]
    forward = torch.compile(model) if spec["compile"] else model
    half = spec["dtype"] == "bfloat16"

    def step():
        with torch.autocast(spec["device"], torch.bfloat16) if half else contextlib.nullcontext():
            loss = forward(inputs_BT, targets_BT)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def run(count: int) -> None:
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    begun = time.perf_counter()
    loss, norm = step()
    facts = {"loss": float(loss), "grad_norm": float(norm), "first_step_seconds": time.perf_counter() - begun,
             "torch": torch.__version__, "threads": torch.get_num_threads()}  # fmt: skip
    run(2)
    return facts, run


def _adamw(model: nn.Module, settings: dict) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings["lr"], betas=(settings["b1"], settings["b2"]), eps=settings["eps"], fused=True
    )


def _copy(model: Model, arrays: dict) -> None:
    """Takes over the given parameters; ours are stacked over layers and multiply from the right."""

    def take(target: torch.Tensor, source: np.ndarray) -> None:
        with torch.no_grad():
            target.copy_(torch.from_numpy(np.ascontiguousarray(source)))

    take(model.tokens.weight, arrays["params/embedding"])
    take(model.positions.weight, arrays["params/position/embedding"])
    take(model.norm.weight, arrays["params/final_norm/scale"])
    for i, block in enumerate(model.blocks):

        def layer(name: str, i: int = i) -> np.ndarray:
            return arrays[f"params/layers/{name}"][i]

        width = layer("attention_norm/scale").shape[0]
        qkv = [layer(f"attention/{part}/kernel").reshape(width, width).T for part in ("query", "key", "value")]
        take(block.qkv.weight, np.concatenate(qkv))
        take(block.out.weight, layer("attention/out/kernel").reshape(width, width).T)
        take(block.up.weight, layer("feed_forward/up/kernel").T)
        take(block.down.weight, layer("feed_forward/down/kernel").T)
        take(block.attention_norm.weight, layer("attention_norm/scale"))
        take(block.feed_forward_norm.weight, layer("feed_forward_norm/scale"))
