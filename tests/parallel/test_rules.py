"""The rules, without devices: every logical name is known, and each mesh axis cuts what it should, all above 1."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from lm.base.config import build, override
from lm.base.errors import UsageError
from lm.model.config import Experts, Mixer, ModelConfig, Norm, Positions
from lm.model.transformer import LOOKED_UP, Transformer
from lm.parallel.mesh import MeshConfig
from lm.parallel.rules import AXES, LOGICAL, RULES, Rule, batch_sharding, cut_over, flax_rules, placed
from lm.train.config import RunConfig
from lm.train.fit import check_mesh
from tests.train.tiny import run_config

TWO_EACH = AbstractMesh((2,) * len(AXES), AXES, (AxisType.Auto,) * len(AXES))
MODEL = ModelConfig(vocab_size=16, context_length=8, n_layer=2, d_model=16, n_head=4, d_ff=32, tied_embedding=False,
                    norm=Norm.LAYERNORM, positions=Positions.LEARNED, bias=True, qk_norm=True)  # fmt: skip


LSTM = ModelConfig(vocab_size=16, context_length=8, n_layer=2, d_model=16, n_head=1, d_ff=32, bias=True,
                   mixer=Mixer.LSTM, positions=Positions.NONE)  # fmt: skip


def boxed(config: ModelConfig):
    tokens_BT = jnp.zeros((2, config.context_length), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens_BT)["params"]


def specs(*rules: Rule, model: ModelConfig = MODEL) -> dict[str, PartitionSpec]:
    flat = jax.tree_util.tree_leaves_with_path(placed(boxed(model), TWO_EACH, rules))
    return {"/".join(entry.key for entry in path): leaf.sharding.spec for path, leaf in flat}


def test_each_parameter_is_cut_along_the_axes_it_should_be():
    fsdp, tensor = ("fsdp",), ("tensor",)
    expected = {
        "embedding": (tensor, fsdp),
        "head": (fsdp, tensor),
        "position/embedding": (None, fsdp),
        "final_norm/scale": (None,),
        "layers/attention/query/kernel": (None, fsdp, tensor, None),
        "layers/attention/key/kernel": (None, fsdp, tensor, None),
        "layers/attention/value/bias": (None, tensor, None),
        "layers/attention/out/kernel": (None, tensor, None, fsdp),
        "layers/attention/key_norm/scale": (None, None),
        "layers/attention_norm/bias": (None, None),
        "layers/feed_forward/up/kernel": (None, fsdp, tensor),
        "layers/feed_forward/up/bias": (None, tensor),
        "layers/feed_forward/down/kernel": (None, tensor, fsdp),
    }
    found = specs()
    assert {name: found[name] for name in expected} == {name: PartitionSpec(*spec) for name, spec in expected.items()}


def test_gates_are_cut_along_their_width():
    found, fsdp, tensor = specs(model=LSTM), ("fsdp",), ("tensor",)
    assert found["layers/recurrence/kernel"] == PartitionSpec(None, fsdp, None, tensor)
    assert found["layers/recurrence/input/kernel"] == PartitionSpec(None, fsdp, None, tensor)
    assert found["layers/recurrence/input/bias"] == PartitionSpec(None, None, tensor)


def test_what_a_table_gives_is_cut_as_the_table_is_and_in_rows_over_the_rest():
    spec = nn.logical_to_mesh_axes(LOOKED_UP, flax_rules(()))
    assert spec == PartitionSpec(("replica", "data", "expert"), ("sequence",), ("fsdp",))


def test_a_batch_is_cut_over_every_axis_but_tensor():
    rows = ("replica", "data", "fsdp", "expert")
    assert batch_sharding(TWO_EACH).spec == PartitionSpec(rows, ("sequence",))


def test_the_model_names_nothing_unknown_and_every_known_name(monkeypatch):
    constrained = []
    monkeypatch.setattr(nn, "with_logical_constraint", lambda x, names: constrained.append(names) or x)
    routed = dataclasses.replace(MODEL, bias=False, experts=Experts(4, 2, shared=1), patch_width=4)
    params = [boxed(MODEL), boxed(routed), boxed(LSTM)]
    names = {name for leaf in jax.tree.leaves(nn.get_partition_spec(params)) for name in leaf}
    used = names.union(*constrained) - {None}
    assert used == set(LOGICAL)


def test_the_first_rule_decides_and_none_of_the_others():
    cut = cut_over((Rule("kv_heads", ()), Rule("embed", ("tensor",)), Rule("embed", ("data",))))
    assert (cut["kv_heads"], cut["embed"], cut["mlp"]) == ((), ("tensor",), ("tensor",))
    found = specs(Rule("kv_heads", ()), Rule("norm", ("fsdp", "expert")))
    assert found["layers/attention/key/kernel"] == PartitionSpec(None, ("fsdp",), None, None)
    assert found["final_norm/scale"] == PartitionSpec(("fsdp", "expert"))


def test_where_two_axes_want_one_mesh_axis_the_rule_nearer_the_top_has_it():
    assert specs(Rule("embed", ("tensor",)))["head"] == PartitionSpec(("tensor",), None)


def test_a_runs_own_rules_come_from_its_config():
    rule = '[{"axis": "kv_heads", "over": []}]'
    config = run_config("unused", f"mesh.rules={rule}")
    assert config.mesh.rules == (Rule("kv_heads", ()),)
    assert build(MeshConfig, dataclasses.asdict(config.mesh)) == config.mesh


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ('{"axis": "head_s", "over": []}', r"no logical axis is called 'head_s'\. Did you mean 'heads'"),
        ('{"axis": "embed", "over": ["fspd"]}', r"no mesh axis is called 'fspd'\. Did you mean 'fsdp'"),
        ('{"axis": "embed", "over": ["fsdp", "fsdp"]}', "'embed' is cut twice over the same mesh axis"),
        ('{"axis": "embed"}', "'over' is missing"),
        ('{"axis": "embed", "over": [], "mesh": []}', "unknown field 'mesh'"),
        ('{"axis": "embed", "over": "fsdp"}', "expected a sequence"),
    ],
)
def test_a_wrong_rule_is_refused_by_name(rule, told):
    with pytest.raises(UsageError, match=rf"config\.mesh\.rules.*{told}"):
        run_config("unused", f"mesh.rules=[{rule}]")


def mesh_of(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


def fits(mesh: AbstractMesh, *overrides: str) -> None:
    base = ("batch_size=8", "model.n_head=4", "model.n_kv_head=2", "model.vocab_size=256")
    check_mesh(run_config("unused", *base, *overrides), mesh)


@pytest.mark.parametrize(
    ("axes", "overrides", "told"),
    [
        ({"data": 16}, [], r"rows a microbatch \(batch_size / accumulate\) 8 over data 16"),
        ({"data": 2, "fsdp": 4}, ["accumulate=2"], r"rows a microbatch .* 4 over data 2 x fsdp 4"),
        ({"replica": 3}, [], "8 over replica 3"),
        ({"expert": 5}, [], "8 over expert 5"),
        ({"fsdp": 8}, ["model.d_model=12", "model.n_head=2"], "d_model 12 over fsdp 8"),
        ({"sequence": 3}, [], "context_length 16 over sequence 3"),
        ({"tensor": 2}, ["model.vocab_size=257"], "vocab_size 257 over tensor 2"),
        ({"tensor": 4}, [], "n_kv_head 2 over tensor 4"),
        ({"tensor": 2}, ["model.d_ff=15"], "d_ff 15 over tensor 2"),
        ({"expert": 2}, ["model.experts.count=3", "model.experts.chosen=1"], "experts.count 3 over expert 2"),
        ({"tensor": 8}, ["model.n_kv_head=4"], "n_head 4 over tensor 8; n_kv_head 4 over tensor 8"),
        ({"tensor": 2}, ['mesh.rules=[{"axis":"layers","over":["tensor"]}]'], "n_layer 1 over tensor 2"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_dimension_and_the_axis(axes, overrides, told):
    with pytest.raises(UsageError, match=rf"config\.mesh: these do not divide: .*{told}"):
        fits(mesh_of(**axes), *overrides)


def test_a_recurrent_model_keeps_its_sequence_whole_and_has_no_heads():
    lstm = ("model.mixer=lstm", "model.positions=none", "model.n_head=1", "model.n_kv_head=none", "model.d_ff=16")
    fits(mesh_of(data=2, fsdp=2, tensor=4), *lstm)
    with pytest.raises(UsageError, match=r"the sequence is cut over sequence, and mixer is lstm"):
        fits(mesh_of(sequence=2), *lstm)
    with pytest.raises(UsageError, match=r"cut over data, and mixer is lstm"):
        fits(mesh_of(data=2), *lstm, 'mesh.rules=[{"axis":"sequence","over":["data"]},{"axis":"batch","over":[]}]')
    with pytest.raises(UsageError, match="d_model 16 over tensor 3"):
        fits(mesh_of(tensor=3), *lstm)


def test_what_divides_or_is_left_whole_is_not_refused():
    fits(mesh_of(replica=2, data=2, expert=2, sequence=16, tensor=2))
    fits(mesh_of(tensor=4), 'mesh.rules=[{"axis":"kv_heads","over":[]}]')


def test_every_rule_has_a_mesh_axis_and_every_mesh_axis_a_rule():
    assert {name for rule in RULES for name in rule.over} == set(AXES)


def test_an_unknown_mesh_axis_in_a_config_is_refused_by_its_nearest():
    with pytest.raises(UsageError, match=r"unknown field 'tensors'.*Did you mean 'tensor'"):
        override(build(RunConfig, dataclasses.asdict(run_config("unused"))), ["mesh.tensors=2"])
