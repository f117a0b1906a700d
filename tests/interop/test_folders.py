"""Folders out and in again: the same bits, one error line for what is wrong, and nothing half-written."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import lm.interop.exporting as exporting
import lm.interop.importing as importing
from lm.base.errors import LmError, RunError, UsageError
from lm.cli import main
from lm.data.tokenizer import load_tokenizer, train_bpe
from lm.interop.exporting import export_model
from lm.interop.importing import import_model
from lm.model.config import Dtype
from lm.run.restore import load_model
from tests.interop.runs import GPT2, LLAMA, make_run
from tests.model import variants


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export_model(make_run(folder / "run", LLAMA), folder / "llama")
    return folder / "llama"


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of the exported folder, to be changed; `out` beside it does not exist."""
    for path in exported.iterdir():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "copy"


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def refused(folder, kind=UsageError) -> str:
    """What `lm import` says; neither the run nor anything on the way to it is left."""
    out = folder.parent / "out"
    with pytest.raises(kind) as raised:
        import_model(folder, out)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(raised.value)


def assert_the_same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))


@pytest.mark.parametrize("shard", [10**9, 17_000], ids=["one-file", "sharded"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_out_and_in_again_gives_the_same_bits(model, shard, tmp_path):
    run = make_run(tmp_path / "run", model)
    _, files = export_model(run, tmp_path / "out", shard_bytes=shard)
    assert (len(files) > 1) == (shard == 17_000)
    assert all(path.stat().st_size < shard + 5000 for path in files)  # headers come on top
    found = import_model(tmp_path / "out", tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert variants.replace(again.model, n_kv_head=model.n_kv_head, d_head=model.d_head) == model
    assert found.parameters == sum(leaf.size for leaf in jax.tree.leaves(again.params))
    assert_the_same(again.params, variants.parameters(model))
    text = "bytes\0é"
    np.testing.assert_array_equal(again.tokenizer.encode(text), load_tokenizer("bytes").encode(text))
    assert again.tokenizer.eos_id == again.tokenizer.bos_id == 256


@pytest.mark.slow
def test_bfloat16_out_and_in_is_rounded_once(exported, tmp_path):
    import_model(exported, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "half", dtype=Dtype.BFLOAT16)
    wanted = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors_of(exported).items()}
    held = tensors_of(tmp_path / "half")
    assert {array.dtype for array in held.values()} == {np.dtype(ml_dtypes.bfloat16)}
    import_model(tmp_path / "half", tmp_path / "again")
    assert load_model(tmp_path / "again").model.dtype is Dtype.BFLOAT16
    import_model(tmp_path / "half", tmp_path / "wide", dtype=Dtype.FLOAT32)
    export_model(tmp_path / "wide", tmp_path / "once-more", dtype=Dtype.BFLOAT16)
    for name, array in tensors_of(tmp_path / "once-more").items():
        np.testing.assert_array_equal(array, wanted[name])
        np.testing.assert_array_equal(array, held[name])


@pytest.mark.slow
def test_a_tokenizer_with_ends_of_its_own(copy, tmp_path):
    train_bpe(["abc abd"] * 3, 257, copy / "tokenizer.json")
    content = json.loads((copy / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    a, b = (content["model"]["vocab"][letter] for letter in "ab")
    content["added_tokens"] += [{"id": a, "content": "a", **token}, {"id": b, "content": "b", **token}]
    change(copy, eos_token_id=[a, 0], bos_token_id=b)
    (copy / "tokenizer.json").write_text(json.dumps(content))
    import_model(copy, tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert (loaded.tokenizer.eos_id, loaded.tokenizer.bos_id) == (a, b)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert load_model(tmp_path / "moved").tokenizer.bos_id == b
    export_model(tmp_path / "moved", tmp_path / "again")
    told = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (told["eos_token_id"], told["bos_token_id"]) == (a, b)


def change(folder, drop=(), **values):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**json.loads(path.read_text()), **values}.items() if k not in drop}))


def rewrite(folder, **tensors):
    """Changes tensors of the folder; None drops one."""
    held = {**tensors_of(folder), **tensors}
    kept = {name: array for name, array in held.items() if array is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({QUERY: None}, f"{QUERY} [24, 16] is missing"),
        ({"lm_head.weight": None}, "lm_head.weight [257, 16] is missing"),
        ({"model.layers.1.self_attn.q_proj.bias": np.zeros(24, np.float32)}, "q_proj.bias is not of this model"),
        ({QUERY: np.zeros((16, 24), np.float32)}, f"{QUERY} is [16, 24], not [24, 16]"),
        ({QUERY: np.zeros((24, 16), np.float64)}, f"{QUERY} is F64; supported: F32, BF16, F16"),
    ],
)
def test_wrong_tensors_are_named(copy, tensors, told):
    rewrite(copy, **tensors)
    assert told in refused(copy)


def test_buffers_and_a_second_tied_head_are_passed_over(copy, tmp_path):
    change(copy, tie_word_embeddings=True)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(copy)
    table = tensors_of(copy)["model.embed_tokens.weight"]
    rewrite(copy, **{"lm_head.weight": table, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3)})
    import_model(copy, tmp_path / "run")
    assert load_model(tmp_path / "run").model.tied_embedding


@pytest.mark.slow
def test_a_checkpoint_of_the_class_without_a_head_lacks_the_prefix(tmp_path):
    export_model(make_run(tmp_path / "run", GPT2), tmp_path / "out")
    held = {name.removeprefix("transformer."): array for name, array in tensors_of(tmp_path / "out").items()}
    held["h.0.attn.bias"] = np.ones((1, 1, 8, 8), bool)  # the causal mask, as the first published files have it
    safetensors.numpy.save_file(held, tmp_path / "out" / "model.safetensors")
    change(tmp_path / "out", architectures=["GPT2Model"])
    import_model(tmp_path / "out", tmp_path / "again")
    assert_the_same(load_model(tmp_path / "again").params, variants.parameters(GPT2))


def test_damaged_and_missing_files(copy):
    path, index = copy / "model.safetensors", copy / "model.safetensors.index.json"
    whole = path.read_bytes()
    for short in (whole[:-1], whole[:100], b""):
        path.write_bytes(short)
        assert "damaged or cut off" in refused(copy, RunError)
    path.unlink()
    assert "model.safetensors is missing" in refused(copy)
    index.write_text(json.dumps({"weight_map": {QUERY: "model-00001-of-00002.safetensors"}}))
    assert "model-00001-of-00002.safetensors is missing" in refused(copy)
    index.write_text("[]")
    assert "not an index of shards" in refused(copy)
    index.unlink()
    path.write_bytes(whole)
    (copy / "tokenizer.json").write_text("{}")
    assert "not a tokenizer.json" in refused(copy)
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refused(copy)
    (copy / "config.json").write_text("[1]")
    assert "not a JSON object, but a list" in refused(copy)
    (copy / "config.json").unlink()
    assert "there is no such file" in refused(copy)


def test_a_tokenizer_that_does_not_fit(copy):
    for field, wrong in (("eos_token_id", 999), ("eos_token_id", []), ("bos_token_id", "a"), ("bos_token_id", -1)):
        change(copy, **{"eos_token_id": 256, field: wrong})
        assert f"{field} is {wrong!r}, which tokenizer.json does not have" in refused(copy)
    change(copy, bos_token_id=None, vocab_size=200)
    assert "vocab_size is 200, and the tokenizer has 257 entries" in refused(copy)


def test_a_failure_on_the_way_leaves_nothing(copy, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", LLAMA)

    def fails(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "write_json", fails)
    monkeypatch.setattr(exporting, "write_sharded", fails)
    with pytest.raises(KeyboardInterrupt):
        import_model(copy, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        export_model(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "run"]


def test_what_is_there_is_not_written_over(copy, tmp_path):
    for make in (import_model, export_model):
        with pytest.raises(LmError, match="holds something else"):
            make(copy, copy)
        with pytest.raises(LmError, match="is a file"):
            make(copy, copy / "config.json")


def test_the_commands_and_what_they_say(copy, tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["import", str(copy), "--out", run, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"llama, 12,912 parameters, products in bfloat16: {run}\n"
    assert main(["export", run, "--out", out, "--shard-gb", "1e-5"]) == 0
    assert "LlamaForCausalLM, float32" in capsys.readouterr().out
    assert main(["export", run, "--out", out, "--shard-gb", "0"]) == 2
    assert main(["import", str(tmp_path), "--out", out + "-2"]) == 2
    assert "there is no such file" in capsys.readouterr().err
