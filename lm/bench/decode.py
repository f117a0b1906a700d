"""`lm bench decode`: tokens/s of greedy answers against Hugging Face transformers, and against the machine's limits.

Everyone has the same random parameters and prompts. A peer is only accepted when it computes our function: the logits
that its answer begins with are ours, and in float32 so are the first tokens of every row (later ones may part where two
logits of a random model are nearly equal).
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from lm.base.progress import bar
from lm.bench import limits
from lm.bench.interleave import Taken, interleave, timed
from lm.bench.machine import Meter
from lm.bench.peer import Peer, find_python, save_start
from lm.bench.rows import Row, Unit
from lm.data.tokenizer import Tokenizer
from lm.decode.generate import Decoder, Session
from lm.decode.request import Request
from lm.model.accounting import Flops, cache_bytes, count_parameters, flops_per_token
from lm.model.config import Dtype, FeedForward, ModelConfig, Norm, Positions
from lm.model.transformer import abstract_variables

PROMPT, ANSWER = 64, 192  # tokens of a row
LONGER = 448  # tokens with room in the larger cache; as many are chosen as in the other
SAME_TOKENS = 32  # of every row, in float32
# Of the largest logit: in float32 the same function differs by rounding, and bfloat16 has 8 bits.
AGREEMENT = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 5e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of random parameters and how many rows it answers at once."""

    model: str
    config: ModelConfig
    batch: int

    @property
    def name(self) -> str:
        """As in the tables of docs/benchmarks.md."""
        return f"{self.model} B{self.batch} {self.config.dtype.value}"


def gpt2(layers: int, width: int, heads: int, vocabulary: int, dtype: Dtype = Dtype.FLOAT32) -> ModelConfig:
    """The choices of GPT-2, with biases."""
    return ModelConfig(
        vocab_size=vocabulary, context_length=1024, n_layer=layers, d_model=width, n_head=heads, d_ff=4 * width,
        norm=Norm.LAYERNORM, feed_forward=FeedForward.GELU, positions=Positions.LEARNED, bias=True, dtype=dtype,
    )  # fmt: skip


def llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int) -> ModelConfig:
    """The choices of Llama 3, tied as in its smallest shape."""
    return ModelConfig(
        vocab_size=vocabulary, context_length=1024, n_layer=layers, d_model=width, n_head=heads, n_kv_head=kv_heads,
        d_ff=hidden, norm=Norm.RMSNORM, feed_forward=FeedForward.SWIGLU, positions=Positions.ROPE, rope_base=500_000.0,
    )  # fmt: skip


_SMALL = gpt2(12, 768, 12, 50257)
CASES = (
    Case("gpt2-124m", _SMALL, 1),
    Case("gpt2-124m", dataclasses.replace(_SMALL, dtype=Dtype.BFLOAT16), 1),
    Case("gpt2-124m", _SMALL, 16),
    Case("llama-124m", llama(12, 768, 12, 12, 2048, 50257), 1),
    Case("llama-124m-gqa4", llama(12, 768, 12, 4, 2048, 50257), 1),
    *(Case(f"L6-D256-V{V}", gpt2(6, 256, 8, V), batch) for V in (256, 50257) for batch in (1, 16)),
)


def bench_decode(
    peer_python: str | None, rounds: int, meter: Meter, cases: Sequence[Case] = CASES
) -> tuple[list[Row], dict[str, Any]]:
    """Measures every case; returns the rows and what ours and each peer said of itself.

    Raises:
      UsageError: `peer_python` is not a program.
    """
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    torch_python = find_python(peer_python, "torch")
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            row, facts[case.name] = _measure(case, torch_python, rounds, meter, Path(folder))
        rows.append(row)
    return rows, facts


def random_params(config: ModelConfig, seed: int = 0) -> Any:
    """Gaussian parameters, none of them zero (biases too), so that no part of a peer's function goes unseen."""
    random = np.random.default_rng(seed)
    shapes = abstract_variables(config)["params"]

    def drawn(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        middle = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(middle + 0.02 * random.standard_normal(shape.shape, np.float32))

    return jax.tree_util.tree_map_with_path(drawn, meta.unbox(shapes))


class Answers:
    """Our side: whole answers to the prompts, with the seconds of prefill, first and second half of each.

    With `room` for more tokens than are chosen the cache is larger.
    """

    def __init__(self, config: ModelConfig, params: Any, prompts_BT: np.ndarray, answer: int, room: int):
        self.decoder = Decoder(config, params, _Ids(config.vocab_size))
        self.prompts, self.answer = list(prompts_BT), answer
        self.request = Request(max_tokens=room, end_ids=())
        self.parts: list[tuple[float, float, float]] = []
        self.first_tokens_BG = self.once()
        self.first_call = sum(self.parts.pop())

    def once(self) -> np.ndarray:
        """Tokens [B, G] of one whole answer."""
        at = [time.perf_counter()]

        def reached(session: Session) -> Session:
            jax.block_until_ready(session.state)
            at.append(time.perf_counter())
            return session

        session = reached(self.decoder.start(self.prompts, self.request))
        session = reached(self.decoder.advance(session, 1 + (self.answer - 1) // 2))
        session = reached(self.decoder.advance(session, self.answer))
        self.parts.append((at[1] - at[0], at[2] - at[1], at[3] - at[2]))
        return np.stack([found.tokens for found in self.decoder.completions(session)])

    def logits_BV(self) -> np.ndarray:
        """What the answers begin with."""
        return np.asarray(self.decoder.prefill(self.prompts, self.request).logits_BV)

    def milliseconds(self) -> dict[str, float]:
        """Medians over all answers: the prefill with the first token, then a token in the first and second half."""
        prefill, first, second = np.median(np.array(self.parts), axis=0) * 1e3
        early = (self.answer - 1) // 2
        return {
            "prefill": round(float(prefill), 3),
            "token_early": round(float(first / early), 4),
            "token_late": round(float(second / (self.answer - 1 - early)), 4),
        }


class _Ids(Tokenizer):
    """Ids without texts: only ids are asked for here."""

    def __init__(self, vocab_size: int):
        self.spec = self.fingerprint = f"{vocab_size} ids"
        self.vocab_size, self.eos_id, self.token_bytes = vocab_size, 0, np.zeros(vocab_size, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        return b""


def _measure(
    case: Case, torch_python: tuple[str | None, str], rounds: int, meter: Meter, folder: Path
) -> tuple[Row, dict[str, Any]]:
    config, dtype = case.config, case.config.dtype
    params = random_params(config)
    prompts_BT = np.random.default_rng(1).integers(config.vocab_size, size=(case.batch, PROMPT), dtype=np.int32)
    save_start(folder / "start.npz", params, prompts=prompts_BT)
    ours = Answers(config, params, prompts_BT, ANSWER, ANSWER)
    longer = Answers(config, params, prompts_BT, ANSWER, LONGER)
    expected = ours.first_tokens_BG, ours.logits_BV()
    peers = peers_of(config, torch_python, folder, ANSWER)
    contestants = {
        "ours": timed(ours.once),
        "longer": timed(longer.once),
        **limits.reads(),
        **limits.products(dtype),
        **(limits.products(Dtype.FLOAT32) if dtype is not Dtype.FLOAT32 else {}),
    }

    def accept(peer: Peer, facts: Mapping[str, Any]) -> str:
        return disagreement(Path(peer.spec["answer"]), *expected, dtype)

    with bar(case.name, len(peers) + rounds) as progress:
        taken = interleave(contestants, peers, rounds=rounds, steps=1, meter=meter, progress=progress, accept=accept)
    facts = {
        "ours": {
            "first_call_seconds": ours.first_call,
            "milliseconds": ours.milliseconds(),
            f"milliseconds_with_room_for_{LONGER}": longer.milliseconds(),
        },
        **taken.facts,
    }
    return _row(case, ours, peers, taken), facts


def _row(case: Case, ours: Answers, peers: Sequence[Peer], taken: Taken) -> Row:
    tokens, names = case.batch * ANSWER, [peer.name for peer in peers]
    config, parts = case.config, ours.milliseconds()
    rates = {kind: limits.matmul_rate(taken, kind) for kind in (Dtype.FLOAT32, config.dtype)}
    bandwidth, product = limits.read_rate(taken), max(rates.values())
    # The step of the mean length, all rows: parameters once, but no row of a table that is only looked up.
    read = read_bytes(config, case.batch, PROMPT + ANSWER // 2)
    forward = flops_per_token(dataclasses.replace(config, context_length=PROMPT + ANSWER), Flops.MATMUL) / 3
    limit = min(case.batch * bandwidth / read, product / forward)
    decode = case.batch * 2e3 / (parts["token_early"] + parts["token_late"])
    return Row(
        case=f"{case.model} B{case.batch}",
        dtype=config.dtype.value,
        unit=Unit.TOKENS_PER_SECOND,
        ours=taken.rates(tokens, ["ours"])["ours"],
        peers=taken.rates(tokens, names),
        missing=taken.missing_of(names),
        limit=limit,
        limit_is=f"the lower of reading {read / 1e6:,.1f} MB a step at {bandwidth / 1e9:.1f} GB/s and "
        f"{forward / 1e6:,.0f} MFLOP a token at {product / 1e9:.0f} GFLOP/s, both measured in this run",
        note=f"prompts of {PROMPT}, answers of {ANSWER} tokens, greedy; ours after prefill {decode:,.4g} tokens/s, "
        f"prefill {parts['prefill']:.3g} ms, first call {ours.first_call:.1f} s",
    )


def read_bytes(config: ModelConfig, batch: int, length: int) -> int:
    """Bytes of parameters and cache that a step of one token a row has to read, at `length` tokens of context."""
    counts = count_parameters(config)
    read = counts.total - counts.position - (0 if config.tied_embedding else counts.embedding)
    size = jnp.dtype(config.dtype.value).itemsize
    return read * size + cache_bytes(config, length, batch, size)


def disagreement(answer: Path, tokens_BG: np.ndarray, logits_BV: np.ndarray, dtype: Dtype) -> str:
    """Why the peer whose first answer lies in `answer` is no fair one; empty where it is."""
    with np.load(answer) as found:
        theirs_BG, theirs_BV = found["tokens"], found["logits"]
    if theirs_BG.shape != tokens_BG.shape:
        return f"it gave tokens {theirs_BG.shape}, ours {tokens_BG.shape}"
    off = float(np.max(np.abs(theirs_BV - logits_BV)) / np.max(np.abs(logits_BV)))
    if not off <= AGREEMENT[dtype]:  # written so that NaN disagrees
        return f"it computes something else: its first logits are {off:.2g} of the largest off"
    same = int(np.argmin(np.append((theirs_BG == tokens_BG).all(0), False)))
    if dtype is Dtype.FLOAT32 and same < min(SAME_TOKENS, tokens_BG.shape[1]):
        return f"it computes something else: only the first {same} tokens are ours"
    return ""


def peers_of(config: ModelConfig, torch_python: tuple[str | None, str], folder: Path, answer: int) -> list[Peer]:
    """transformers' `generate`, and its model in a compiled loop over a static cache."""
    python, reason = torch_python
    plain = {**dataclasses.asdict(config), "n_kv_head": config.kv_heads}
    common = {
        "arrays": str(folder / "start.npz"),
        "config": plain,
        "answer_tokens": answer,
        "threads": limits.threads(),
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
    }
    return [
        Peer(name, "transformers_decode.py", python,
             {**common, "compile": compiled, "answer": str(folder / f"{compiled}.npz")}, reason)
        for name, compiled in (("transformers generate", False), ("transformers compiled loop", True))
    ]  # fmt: skip
