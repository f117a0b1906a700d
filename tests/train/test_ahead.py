"""A train step compiled for TPUs that are not here, in this very process, whose own devices stay CPUs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from lm.base.config import build, override, to_dict
from lm.base.errors import RunError, UsageError
from lm.cli import main
from lm.model.accounting import Flops, count_parameters, step_flops
from lm.model.config import Remat
from lm.parallel.ahead import described_devices
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.train import compile_command
from lm.train import search as searching
from lm.train.ahead import as_dict, as_text, compile_step, flags
from lm.train.config import RunConfig
from lm.train.search import Tried, layouts, pick, table, trials

SLICE = "v5e:2x2"
BASE = {
    "model": {"vocab_size": 257, "context_length": 128, "n_layer": 2, "d_model": 32, "n_head": 2, "d_ff": 64},
    "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
    "data": {"corpus": "unused", "segment_mask": True},
    "mesh": {"data": 1, "fsdp": -1},
    "steps": 12,
    "batch_size": 8,
}


def config(*overrides: str) -> RunConfig:
    return override(build(RunConfig, BASE), overrides)


def libtpu():
    return pytest.importorskip("libtpu", reason="libtpu (the extra 'aot') is not installed")


def test_an_unknown_slice_is_refused_with_the_known_ones(capsys):
    for topology in ("v9:2x2", "v5e:2x2x2", "v5e", "v5p:8", "h100:8"):
        with pytest.raises(UsageError, match=r"no slice .*Known: v5e:AxB, v5p:AxBxC, v6e:AxB, e\.g\. v5e:16x16"):
            described_devices(topology)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"libtpu.* is not installed\. pip install -e '\.\[aot\]'"):
        described_devices(SLICE)


def test_what_libtpu_refuses_is_one_line():
    libtpu()
    with pytest.raises(UsageError, match=r"libtpu refuses 'v5e:3x5': [^\n]+$"):
        described_devices("v5e:3x5")


@pytest.mark.parametrize(
    ("changes", "told"),
    [(("mesh.fsdp=3",), "does not fit 4 devices"), (("batch_size=6",), r"rows a microbatch .* 6 over fsdp 4")],
)
def test_what_does_not_divide_over_the_slice_is_refused(changes, told):
    libtpu()
    with pytest.raises(UsageError, match=told):
        compile_step(config(*changes), SLICE)


@pytest.fixture(scope="module")
def ahead():
    libtpu()
    return compile_step(config(), SLICE)


@pytest.mark.slow
def test_the_tpus_attention_kernel_stands_in_the_program_forward_and_backward(ahead):
    kernels = [line for line in ahead.program.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    for phase in ("fwd", "dq", "dkv"):
        assert any(f"splash_mha_{phase}_segmented" in line for line in kernels)
    assert ahead.attention == "splash attention (Pallas)"


@pytest.mark.slow
def test_memory_is_that_of_the_sharded_state(ahead):
    counts = count_parameters(config().model)
    # float32, cut in four where a leaf has the width; norms are whole on every chip
    assert ahead.memory.parameters == 4 * ((counts.total - counts.norms) / 4 + counts.norms)
    assert ahead.memory.optimizer == 2 * ahead.memory.parameters + 4  # both moments and a count
    assert ahead.memory.batch == 4 * 4 * 8 * 128 / 4
    assert ahead.fits
    assert ahead.excess == 0
    assert ahead.memory.parameters < ahead.memory.peak < ahead.memory.there == 16 * 2**30


@pytest.mark.slow
def test_weights_are_gathered_over_fsdp_and_nothing_crosses_another_axis(ahead):
    assert any(name.startswith("all-gather over fsdp") for name in ahead.collectives)
    assert all(name.endswith("over fsdp") for name in ahead.collectives)


@pytest.mark.slow
def test_times_follow_from_rates_and_the_flops_are_those_of_the_accounting(ahead):
    told = json.loads(json.dumps(as_dict(ahead)))
    assert told["flops"] == {name.value: step_flops(config().model, 8 * 128, name) for name in Flops}
    roof = told["roofline"]
    assert roof["compute"] == ahead.executed / 4 / 197e12
    assert roof["overlapped"]["seconds"] == max(roof[name] for name in ("compute", "hbm", "ici", "dcn"))
    assert roof["overlapped"]["tokens_per_second"] == 8 * 128 / roof["overlapped"]["seconds"]
    assert 0 < roof["serial"]["utilisation"] <= roof["overlapped"]["utilisation"] < 1
    assert roof["bound"] in as_text(ahead)


@pytest.mark.slow
def test_this_process_still_computes_on_its_cpu(ahead):
    assert jax.devices()[0].platform == "cpu"
    assert jnp.sum(jnp.arange(4)) == 6


@pytest.mark.slow
def test_the_command_compiles_beside_another_process_that_does(ahead, tmp_path):
    """This process holds libtpu; T = 100 suits no kernel, which the command says; the JSON is written."""
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config("model.context_length=100", "model.n_layer=1"))))
    command = [sys.executable, "-m", "lm.cli", "compile", "--config", "config.json", "--topology", SLICE]
    done = subprocess.run([*command, "--json", "found.json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plain attention, all T x T scores: 100 tokens are no multiple of 128" in done.stdout
    assert "it fits" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())["fits"] is True


def test_ctrl_c_does_not_wait_for_the_compiler(tmp_path, monkeypatch):
    def compiles(*_):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        raise RunError("seen")

    (tmp_path / "config.json").write_text(json.dumps(to_dict(config())))
    monkeypatch.setattr(compile_command, "compile_step", compiles)
    before = signal.getsignal(signal.SIGINT)
    assert main(["compile", "--config", str(tmp_path / "config.json"), "--topology", SLICE]) == 1
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_told_with_what_is_missing(tmp_path, capsys):
    libtpu()
    # Logits alone: 2,097,152 rows of 128 tokens, 257 float32 numbers each, on four chips, are 64 GiB a chip.
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config("batch_size=2097152", "model.n_layer=1"))))
    code = main(["compile", "--config", str(tmp_path / "config.json"), "--topology", SLICE])
    told = capsys.readouterr()
    assert code == 1
    assert "it does not fit, by" in told.out
    assert told.err.splitlines()[-1].startswith(f"lm compile: {SLICE}: the step does not fit. Look for a layout")


@pytest.mark.slow
def test_every_layout_divides_and_what_holds_less_is_guessed_no_faster():
    libtpu()
    found, hopeless = layouts(config("model.vocab_size=256"), SLICE)
    assert not hopeless
    assert len({(one.config.mesh, one.config.model.remat, one.config.accumulate) for one in found}) == len(found) >= 12
    for one in found:
        mesh = one.config.mesh
        assert mesh.data * mesh.fsdp * mesh.tensor == 4
        assert 8 // one.config.accumulate % (mesh.data * mesh.fsdp) == 0
    assert any(one.config.mesh.tensor == 2 for one in found)
    assert not any(one.config.mesh.tensor == 4 for one in found)  # there are two heads
    assert [one.guess for one in found] == sorted(one.guess for one in found)
    data = [one for one in found if one.config.mesh == MeshConfig(data=4, fsdp=1)]
    least = {(one.config.model.remat.value, one.config.accumulate): one.least_bytes for one in data}
    assert least["full", 2] < least["full", 1] < least["dots", 1] < least["none", 1]


def test_a_batch_that_no_mesh_divides_is_refused():
    libtpu()
    with pytest.raises(UsageError, match="no mesh divides a batch of 7 rows over v5e:2x2"):
        layouts(config("batch_size=7"), SLICE)


def recomputed_blocks_fit(tried, topology, slices, folder):
    """A compiler that has room for recomputed blocks only, and likes no sharded parameters."""
    seconds = {"seconds": 1.0 if tried.mesh.fsdp == 1 else 2.0, "utilisation": 0.5}
    roof = {"overlapped": seconds, "serial": seconds, "bound": "compute"}
    excess = 0 if tried.model.remat is Remat.FULL else 2**30
    return Tried(tried, {"excess": excess, "roofline": roof, "memory": {"peak": 2**30}})


def test_a_search_passes_over_what_needs_more_than_what_did_not_fit(monkeypatch):
    libtpu()
    monkeypatch.setattr(searching, "_compiled", recomputed_blocks_fit)
    possible, hopeless = layouts(config(), SLICE)
    assert not hopeless
    tried = list(trials(possible, SLICE, 1, 100, {}))
    for number, one in enumerate(tried):
        assert not any(searching._holds_more(one.config, before.config) for before in tried[:number] if before.excess)
    assert {one.config.model.remat for one in tried if one.fits} == {Remat.FULL}
    assert pick(tried, SLICE).config.mesh.fsdp == 1
    rows = table(tried, []).splitlines()[1:]
    missed = ["misses by 1.00 GiB" in row for row in rows]
    assert missed == sorted(missed)  # near misses come last
    assert any(missed)


def test_a_layout_whose_compiler_fails_is_a_row_with_its_reason(monkeypatch):
    libtpu()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    failed = next(trials(layouts(config(), SLICE)[0], SLICE, 1, 1, {}))
    assert not failed.fits
    fine = recomputed_blocks_fit(config("model.remat=full"), SLICE, 1, None)
    assert table([failed, fine], []).splitlines()[-1] == f"     -  failed: no message  {flags(failed.config)}"
    assert pick([failed, fine], SLICE) is fine
    with pytest.raises(RunError, match="no layout that was tried fits"):
        pick([failed], SLICE)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_stopped_tells_what_it_has_and_goes_on_from_there(monkeypatch, tmp_path, capsys, stop):
    libtpu()
    asked = []

    def compiled(tried, *others):
        asked.append(flags(tried))
        if len(asked) == 2:
            os.kill(os.getpid(), stop)
        found = recomputed_blocks_fit(override(tried, ["model.remat=full"]), *others)
        return dataclasses.replace(found, config=tried)

    monkeypatch.setattr(searching, "_compiled", compiled)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config())))
    argv = ["compile", "--config", str(tmp_path / "config.json"), "--topology", SLICE, "--search", "5"]
    argv += ["--json", str(tmp_path / "found.json")]
    assert main(argv) == 130
    told = capsys.readouterr()
    assert told.out.startswith("1 layouts of 8 rows compiled")
    assert "the same command goes on from there" in told.err
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("5 layouts of 8 rows compiled")
    assert len(set(asked)) == 5
    assert asked.count(asked[0]) == 1
    assert main([*argv, "--config.batch_size=16"]) == 0  # another question: everything anew
    assert len(asked) == 6 + 5


@pytest.mark.slow
def test_the_search_prints_its_pick_as_flags(tmp_path, capsys):
    libtpu()
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config("model.n_layer=1"))))
    argv = ["compile", "--config", str(tmp_path / "config.json"), "--topology", SLICE, "--search", "1"]
    assert main([*argv, "--json", str(tmp_path / "found.json")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("pick: lm train --config")
    flags = [part.removeprefix("--config.") for part in last.split() if part.startswith("--config.")]
    chosen = override(config("model.n_layer=1"), flags)
    layouts = json.loads((tmp_path / "found.json").read_text())["layouts"]
    assert layouts[0]["fits"]
    assert layouts[0]["found"]["accumulate"] == chosen.accumulate


def test_slices_are_joined_by_the_outermost_axis_alone():
    libtpu()
    mesh = make_mesh(MeshConfig(replica=2, data=1, fsdp=-1), described_devices(SLICE, slices=2))
    assert mesh.shape["fsdp"] == 4
    for replica in range(2):
        assert len({device.slice_index for device in mesh.devices[replica].flat}) == 1
