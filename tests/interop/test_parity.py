"""transformers computes what we compute, from its files and from ours, in every family."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lm.bench.peer import Peer, find_python, running
from lm.cli import main
from lm.data.tokenizer import ByteTokenizer
from lm.decode import generate
from lm.model.transformer import Transformer
from lm.run.restore import load_model

pytestmark = pytest.mark.slow  # a process with PyTorch, and compilations of each family

VOCABULARY, PROMPT, ANSWER = 260, 12, 8
TEXT = "Naïve text\n  of 3 lines"
PROMPTS = np.random.default_rng(0).integers(0, VOCABULARY, (2, PROMPT)).tolist()
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_positions": 40, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_inner": 24,
    "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
# NAME -> model_type, fields; a window is narrower than the prompt, a head's width is not always D / H.
CASES = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied": ("gpt2", {**_GPT2, "tie_word_embeddings": False}),
    "llama": ("llama", {**_SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama-biases": (
        "llama", {**_SHAPE, "attention_bias": True, "mlp_bias": True, "head_dim": 6, "tie_word_embeddings": True},
    ),
    "llama3": ("llama", {**_SHAPE, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }}),
    "mistral": ("mistral", {**_SHAPE, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("qwen2", {**_SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**_SHAPE, "head_dim": 8}),
    "gemma2": ("gemma2", {
        **_SHAPE, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "olmo2": ("olmo2", _SHAPE),
    "mixtral": ("mixtral", {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3-moe": ("qwen3_moe", {
        **_SHAPE, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    }),
}  # fmt: skip
DECODED = ("gemma2", "qwen3-moe")  # compiling takes seconds: all of them only in `make test-all`
SHARDED = ("gpt2", "mistral", "mixtral")


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """The folder with transformers' models and answers, and the process that made them."""
    python, reason = find_python(os.environ.get("LM_PEER_PYTHON"), "transformers")
    if python is None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("models")
    cases = {
        name: {"type": kind, "fields": fields, "shard": "4KB" if name in SHARDED else "1GB"}
        for name, (kind, fields) in CASES.items()
    }
    spec = {"folder": str(folder), "cases": cases, "prompts": PROMPTS, "answer_tokens": ANSWER, "text": TEXT}
    with running(Peer("transformers", Path(__file__).with_name("theirs.py"), python, spec)) as started:
        started.ready()
        for name in CASES:
            (folder / name / "tokenizer.json").write_text(ByteTokenizer().to_json())
        yield folder, started


def files(folder):
    return {name: array for path in sorted(folder.glob("*.safetensors")) for name, array in load_file(path).items()}


@pytest.fixture(scope="module")
def imported(peer):
    folder, started = peer
    for name in CASES:
        assert main(["import", str(folder / name), "--out", str(folder / f"{name}-run")]) == 0
        shard = ["--shard-gb", "4e-6"] if name in SHARDED else []
        assert main(["export", str(folder / f"{name}-run"), "--out", str(folder / f"{name}-again"), *shard]) == 0
    started.run(1)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_our_logits_from_their_files(imported, name):
    theirs = np.load(imported / name / "answer.npz")
    loaded = load_model(imported / f"{name}-run")
    logits_BTV = jax.jit(Transformer(loaded.model).apply)({"params": loaded.params}, jnp.array(PROMPTS))
    # Logits of up to about 10 in float32, summed in another order.
    np.testing.assert_allclose(logits_BTV, theirs["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DECODED else pytest.mark.full) for name in CASES]
)
def test_our_answers_from_their_files(imported, name):
    loaded = load_model(imported / f"{name}-run")
    asked = [np.array(row, np.int32) for row in PROMPTS]
    found = generate(loaded, asked, max_tokens=ANSWER, temperature=0, end_ids=())
    theirs = np.load(imported / name / "answer.npz")["tokens"]
    np.testing.assert_array_equal([answer.tokens for answer in found], theirs)


@pytest.mark.parametrize("name", CASES)
def test_theirs_from_our_files(imported, name):
    first, again = (imported / folder for folder in (name, f"{name}-again"))
    assert len(list(again.glob("*.safetensors"))) == len(list(first.glob("*.safetensors"))) or name in SHARDED
    before, after = files(first), files(again)
    assert before.keys() == after.keys()
    for tensor in before:
        # Gemma's scales are stored less 1: half a unit in the last place of a number below 4.
        np.testing.assert_allclose(before[tensor], after[tensor], rtol=0, atol=2**-23 if name == "gemma2" else 0)
    theirs, answer = np.load(first / "answer.npz"), np.load(again / "answer.npz")
    np.testing.assert_allclose(answer["logits"], theirs["logits"], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(answer["tokens"], theirs["tokens"])
    np.testing.assert_array_equal(answer["text"], ByteTokenizer().encode(TEXT))
