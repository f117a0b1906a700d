"""`lm compile`: the real train step of a run, compiled for a slice of TPUs that is not here, and what that tells."""

import dataclasses
import importlib.metadata
import math
import time
from collections import defaultdict
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.model.accounting import Flops, step_flops
from lm.model.execution import executed_flops_per_token, least_traffic
from lm.model.fused import choose
from lm.parallel.ahead import Program, compile_ahead, described_devices
from lm.parallel.chips import AS_OF, Chip, chip_of
from lm.parallel.collectives import collectives
from lm.parallel.mesh import make_mesh
from lm.parallel.roofline import ASSUMPTIONS, Roofline, roofline
from lm.parallel.rules import AXES, batch_sharding, flax_rules, replicated
from lm.train.config import RunConfig
from lm.train.fit import check_mesh
from lm.train.step import abstract_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one chip. `temporaries` are activations, gradients and gathered weights at their highest."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    code: int
    peak: int
    there: int


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What compiling a step ahead of time tells.

    `flops` are of a step under each convention, `executed` of the products that its chips run. `collectives` are bytes
    by kind and mesh axes that a group works on in a step. `excess` is by how many bytes of a chip the step does not
    fit: then `program`, the compiled text, is empty, and `collectives` and `roofline` are None.
    """

    topology: str
    slices: int
    chip: Chip
    chips: int
    mesh: dict[str, int]
    remat: str
    accumulate: int
    attention: str
    tokens: int
    memory: Memory
    excess: int
    flops: dict[str, int]
    executed: float
    traffic: float
    collectives: dict[str, int] | None
    roofline: Roofline | None
    compile_seconds: float
    compile_cpu_seconds: float
    versions: dict[str, str]
    program: str = dataclasses.field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the compiler could place the step in a chip's memory."""
        return not self.excess

    def tokens_per_second(self, seconds: float) -> float:
        """Of all chips, if a step takes so long."""
        return self.tokens / seconds

    def utilisation(self, seconds: float) -> float:
        """`flops_matmul` over what the chips could do in that time."""
        return self.flops[Flops.MATMUL] / (seconds * self.chips * self.chip.flops)


def compile_step(config: RunConfig, topology: str, slices: int = 1) -> Ahead:
    """Compiles the train step of `config` for `slices` slices of `topology`, e.g. "v5e:16x16".

    Raises:
      UsageError: there is no such slice, libtpu is missing, or the mesh or the batch does not divide over it.
      RunError: the compiler fails for another reason than memory.
    """
    devices = described_devices(topology, slices)
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh)
    state = abstract_state(config, mesh)
    batch, rate = _abstract_batch(config, mesh)
    begun = time.monotonic(), time.process_time()
    lowered = make_train_step(config, mesh).lower(state, batch, rate)
    parts = {name: sum(map(bytes_a_chip, jax.tree.leaves(tree))) for name, tree in (("batch", batch), *state.items())}
    program = compile_ahead(lowered, sum(parts.values()))
    seconds = time.monotonic() - begun[0], time.process_time() - begun[1]
    return _told(config, topology, slices, mesh, program, parts, seconds)


def _told(
    config: RunConfig,
    topology: str,
    slices: int,
    mesh: Mesh,
    program: Program,
    parts: dict[str, int],
    seconds: tuple[float, float],
) -> Ahead:
    model, tokens = config.model, config.tokens_per_step
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    assert chip is not None  # every generation that can be described is in the table
    attention = choose(model, model.context_length, mesh, flax_rules(config.mesh.rules))
    executed = executed_flops_per_token(model, attention.products) * tokens
    # Optimizer state and parameters are read and written; gradients are written and read once a microbatch.
    moved = 2 * (parts["params"] + parts["opt_state"]) + 2 * config.accumulate * parts["params"]
    traffic = moved + least_traffic(model, tokens // mesh.size, mesh.shape.get("tensor", 1), config.accumulate)
    sent = collectives(program.text, mesh) if program.text else None
    torus = [int(size) for size in topology.partition(":")[2].split("x")]
    return Ahead(
        topology=topology,
        slices=slices,
        chip=chip,
        chips=mesh.size,
        mesh=dict(mesh.shape),
        remat=model.remat.value,
        accumulate=config.accumulate,
        attention=f"none, mixer is {model.mixer}" if model.mixer.recurrent else str(attention),
        tokens=tokens,
        memory=Memory(
            parameters=parts["params"],
            optimizer=parts["opt_state"],
            batch=parts["batch"],
            temporaries=program.temporaries,
            code=program.code,
            peak=program.peak,
            there=round(chip.hbm_bytes),
        ),
        excess=program.excess,
        flops={convention.value: step_flops(model, tokens, convention) for convention in Flops},
        executed=executed,
        traffic=traffic,
        collectives=None if sent is None else _by_axes(sent),
        roofline=None if sent is None else roofline(chip, executed / mesh.size, traffic, sent, mesh, torus),
        compile_seconds=seconds[0],
        compile_cpu_seconds=seconds[1],
        versions=versions(),
        program=program.text,
    )


def versions() -> dict[str, str]:
    """Of what compiles."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def flags(config: RunConfig) -> str:
    """What a search varies, as flags of `lm train`."""
    mesh = " ".join(
        f"--config.mesh.{axis}={size}" for axis in AXES if (size := getattr(config.mesh, axis)) != 1 or axis == "data"
    )
    return f"{mesh} --config.model.remat={config.model.remat.value} --config.accumulate={config.accumulate}"


def as_dict(ahead: Ahead) -> dict[str, Any]:
    """All of it for JSON, with what follows from it and the conventions."""
    told = dataclasses.asdict(ahead) | {"fits": ahead.fits, "rates_as_of": AS_OF, "assumptions": list(ASSUMPTIONS)}
    del told["program"]
    if ahead.roofline is not None:
        told["roofline"] |= {
            "bound": ahead.roofline.bound,
            "intensity": ahead.executed / ahead.chips / ahead.traffic,
            "balance": ahead.chip.balance,
        }
        for name, seconds in (("overlapped", ahead.roofline.overlapped), ("serial", ahead.roofline.serial)):
            told["roofline"][name] = {
                "seconds": seconds,
                "tokens_per_second": ahead.tokens_per_second(seconds),
                "utilisation": ahead.utilisation(seconds),
            }
    return told


def as_text(ahead: Ahead) -> str:
    """`Ahead` as lines for people."""
    memory, slices = ahead.memory, f"{ahead.slices} slices of " if ahead.slices > 1 else ""
    mesh = " x ".join(f"{name} {size}" for name, size in ahead.mesh.items() if size > 1) or "one chip"
    lines = [
        f"{slices}{ahead.topology}: {ahead.chips} x {ahead.chip.kind}, mesh {mesh}, remat {ahead.remat}, "
        f"accumulate {ahead.accumulate}",
        f"attention: {ahead.attention}",
        f"compiled in {ahead.compile_seconds:.0f} s ({ahead.compile_cpu_seconds:.0f} s of CPU) with "
        + ", ".join(f"{name} {version}" for name, version in ahead.versions.items()),
        "",
        f"{'memory of a chip':24}{_size(memory.peak)} of {_size(memory.there).strip()}: "
        + ("it fits" if ahead.fits else f"it does not fit, by {_size(ahead.excess).strip()} at the least"),
    ]
    for name in ("parameters", "optimizer", "batch", "temporaries", "code"):
        lines.append(f"  {name:22}{_size(getattr(memory, name))}")
    lines += ["", f"{'FLOPs of a step':24}{ahead.executed:12.4g}  executed, recomputation and masked scores included"]
    lines += [f"  {name:22}{count:12.4g}  {Flops(name).meaning}" for name, count in ahead.flops.items()]
    if ahead.collectives is not None and ahead.roofline is not None:
        lines += ["", "bytes of a step that groups of chips work on together, by collective and mesh axes"]
        lines += [f"  {name:46}{_size(size)}" for name, size in ahead.collectives.items()] or ["  none"]
        lines += ["", *_roofline_lines(ahead, ahead.roofline)]
    return "\n".join(lines)


def _roofline_lines(ahead: Ahead, roof: Roofline) -> list[str]:
    lines = [f"least seconds of a step at rates published as of {AS_OF}, bound by {roof.bound}"]
    lines += [f"  {name:22}{getattr(roof, name):12.4g}" for name in ("compute", "hbm", "ici", "dcn")]
    for name, seconds in (("all overlapped", roof.overlapped), ("one after another", roof.serial)):
        lines.append(
            f"  {name:22}{seconds:12.4g}  {ahead.tokens_per_second(seconds):,.0f} tokens/s, "
            f"utilisation {ahead.utilisation(seconds):.0%} ({Flops.MATMUL})"
        )
    intensity = ahead.executed / ahead.chips / ahead.traffic
    lines.append(f"  {'FLOPs a byte of HBM':22}{intensity:12.4g}  balanced at {ahead.chip.balance:.0f}")
    return lines + ["assumed: " + line for line in ASSUMPTIONS]


def _abstract_batch(config: RunConfig, mesh: Mesh) -> tuple[dict[str, Any], Any]:
    shape, sharding = (config.batch_size, config.model.context_length), batch_sharding(mesh, config.mesh.rules)
    names = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
    if config.data.segment_mask:
        names["segments"] = np.int32
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in names.items()}
    return batch, jax.ShapeDtypeStruct((), np.float32, sharding=replicated(mesh))


def bytes_a_chip(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one chip's part of an array that carries its sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _by_axes(sent) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for one in sent:
        if one.axes:
            total[f"{one.kind} over {' x '.join(one.axes)}"] += one.bytes * one.count
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:10.2f} {unit}"
        size /= 1024
    return f"{size:10.2f} GiB"
