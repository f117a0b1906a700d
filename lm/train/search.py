"""`lm compile --search`: meshes, remat policies and accumulations that divide, compiled in turn and ranked.

Each is compiled in a process of its own: the compiler keeps what it once used, and may end a process outright.
"""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lm.base.config import to_dict
from lm.base.errors import RunError, UsageError
from lm.base.progress import bar, console
from lm.model.accounting import count_parameters
from lm.model.attention import Attention
from lm.model.config import Remat
from lm.model.execution import executed_flops_per_token, least_saved
from lm.model.fused import choose
from lm.parallel.ahead import described_devices
from lm.parallel.chips import Chip, chip_of
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.rules import flax_rules, placed
from lm.train.ahead import bytes_a_chip, flags
from lm.train.config import RunConfig
from lm.train.fit import check_mesh
from lm.train.step import init_state

LESS_MEMORY = (Remat.NONE, Remat.DOTS, Remat.FULL)  # each holds less than the one before it
WIDEST_TENSOR = 16


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout to try: the least bytes that a chip must hold, and a guess of its seconds that only orders trials."""

    config: RunConfig
    least_bytes: int
    guess: float


@dataclasses.dataclass(frozen=True)
class Tried:
    """What became of a candidate: what `lm compile` wrote as JSON, or its message where it failed."""

    config: RunConfig
    found: dict[str, Any] | None
    message: str = ""

    @property
    def excess(self) -> int:
        """Bytes of a chip that were missing; 0 where the step fits."""
        return self.found["excess"] if self.found else 0

    @property
    def fits(self) -> bool:
        """Whether there is a program for it."""
        return self.found is not None and not self.excess


def layouts(config: RunConfig, topology: str, slices: int = 1) -> tuple[list[Candidate], list[Candidate]]:
    """The layouts of the same step that divide over the slices: those that may fit, and those that cannot.

    Each list begins with the fastest by guess.

    Raises:
      UsageError: nothing divides over the slices.
    """
    devices = described_devices(topology, slices)
    chip = chip_of(devices[0].device_kind)
    assert chip is not None

    boxed = jax.eval_shape(lambda: init_state(config, jax.random.key(0)))

    @functools.cache
    def made(mesh: MeshConfig) -> Mesh:
        return make_mesh(mesh, devices)

    @functools.cache
    def held(mesh: MeshConfig) -> tuple[int, int]:
        state = placed(boxed, made(mesh), mesh.rules)
        params, everything = (sum(map(bytes_a_chip, jax.tree.leaves(tree))) for tree in (state["params"], state))
        return params, everything

    meshes = [dataclasses.replace(mesh, rules=config.mesh.rules) for mesh in _meshes(len(devices) // slices, slices)]
    found = []
    for mesh, remat, accumulate in itertools.product(meshes, LESS_MEMORY, _powers(config.batch_size)):
        model = dataclasses.replace(config.model, remat=remat)
        try:
            tried = dataclasses.replace(config, mesh=mesh, accumulate=accumulate, model=model)
            check_mesh(tried, made(mesh))
        except UsageError:
            continue
        attention = choose(model, model.context_length, made(mesh), flax_rules(mesh.rules))
        least = _least_bytes(tried, *held(mesh), len(devices))
        found.append(Candidate(tried, least, _guess(tried, chip, len(devices), attention)))
    if not found:
        raise UsageError(
            f"no mesh divides a batch of {config.batch_size} rows over {topology}",
            where="config.batch_size",
            do="Make it a multiple of the number of chips.",
        )
    found.sort(key=lambda one: one.guess)
    possible = [one for one in found if one.least_bytes <= chip.hbm_bytes]
    return possible, [one for one in found if one.least_bytes > chip.hbm_bytes]


def trials(
    possible: list[Candidate], topology: str, slices: int, most: int, kept: Mapping[str, dict[str, Any]]
) -> Iterator[Tried]:
    """Compiles up to `most` of the layouts in their order, says what became of each, and yields it.

    What needs more memory than a layout that did not fit is passed over. `kept` holds what is known already, by the
    layout's flags.
    """
    tried: list[Tried] = []
    with bar(f"compile for {topology}", most) as progress, tempfile.TemporaryDirectory() as folder:
        for one in possible:
            if len(tried) == most:
                return
            if any(before.excess and _holds_more(one.config, before.config) for before in tried):
                continue
            layout = flags(one.config)
            progress.update(len(tried), layout)
            known = kept.get(layout)
            tried.append(Tried(one.config, known) if known else _compiled(one.config, topology, slices, Path(folder)))
            console.print(_row(str(len(tried)), tried[-1]), markup=False, highlight=False, soft_wrap=True)
            yield tried[-1]


def _compiled(config: RunConfig, topology: str, slices: int, folder: Path) -> Tried:
    asked, answer = folder / "config.json", folder / "found.json"
    asked.write_text(json.dumps(to_dict(config)))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "lm.cli", "compile", "--config", str(asked), "--topology", topology]
    command += ["--slices", str(slices), "--json", str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.exists():
        return Tried(config, json.loads(answer.read_text()))
    if done.returncode < 0:
        return Tried(config, None, f"the compiler was ended by signal {-done.returncode}")
    return Tried(config, None, (done.stderr.strip().splitlines() or ["no message"])[-1])


def table(tried: list[Tried], hopeless: list[Candidate]) -> str:
    """The trials as lines: what fits by time, then near misses by what was missing, then failures."""
    lines = ["  rank  memory GiB  step s (overlapped - serial)  utilisation  bound    layout"]
    for number, one in enumerate(sorted(tried, key=_rank), 1):
        lines.append(_row(str(number) if one.fits else "-", one))
    if hopeless:
        nearest = min(hopeless, key=lambda one: one.least_bytes)
        lines.append(
            f"  not compiled: {len(hopeless)} layouts whose state, gradients and saved activations alone do not fit; "
            f"the nearest holds {nearest.least_bytes / 2**30:.2f} GiB: {flags(nearest.config)}"
        )
    return "\n".join(lines)


def _row(place: str, one: Tried) -> str:
    if one.found is None:
        return f"  {place:>4}  failed: {one.message}  {flags(one.config)}"
    if not one.fits:
        return f"  {place:>4}  {'misses by':>10} {one.excess / 2**30:.2f} GiB{'':38}{flags(one.config)}"
    roof, peak = one.found["roofline"], one.found["memory"]["peak"]
    fast, slow = roof["overlapped"], roof["serial"]
    return (
        f"  {place:>4}  {peak / 2**30:10.2f}  {fast['seconds']:12.3f} - {slow['seconds']:<13.3f}  "
        f"{fast['utilisation']:4.0%} - {slow['utilisation']:<4.0%}  {roof['bound']:7}  {flags(one.config)}"
    )


def pick(tried: list[Tried], topology: str) -> Tried:
    """The layout with the least time, nothing overlapped.

    Raises:
      RunError: none fits.
    """
    best = min(tried, key=_rank, default=None)
    if best is None or not best.fits:
        raise RunError("no layout that was tried fits", where=topology, do="Try more (--search N), or more chips.")
    return best


def _rank(one: Tried) -> tuple[int, float]:
    if one.found is None:
        return 2, 0.0
    return (0, one.found["roofline"]["serial"]["seconds"]) if one.fits else (1, one.excess)


def _holds_more(one: RunConfig, other: RunConfig) -> bool:
    """Whether `one` holds at least what `other` does: the same mesh, no more microbatches, no more recomputation."""
    depth = LESS_MEMORY.index
    return (
        one.mesh == other.mesh
        and one.accumulate <= other.accumulate
        and depth(one.model.remat) <= depth(other.model.remat)
    )


def _meshes(chips: int, slices: int) -> Iterator[MeshConfig]:
    """Slices apart as replicas; in a slice, powers of two over data, fsdp and tensor."""
    for fsdp, tensor in itertools.product(_powers(chips), _powers(min(chips, WIDEST_TENSOR))):
        if chips % (fsdp * tensor) == 0:
            yield MeshConfig(replica=slices, data=chips // (fsdp * tensor), fsdp=fsdp, tensor=tensor)


def _powers(most: int) -> Iterator[int]:
    return itertools.takewhile(lambda size: size <= most, (2**k for k in itertools.count()))


def _least_bytes(config: RunConfig, params: int, state: int, chips: int) -> int:
    """State and gradients, what the blocks save for the backward pass at the least, and the logits."""
    model, tensor = config.model, config.mesh.tensor
    tokens = config.tokens_per_step * tensor // (config.accumulate * chips)
    return state + params + round(tokens * (least_saved(model, tensor) + 4 * model.vocab_size / tensor))


def _guess(config: RunConfig, chip: Chip, chips: int, attention: Attention) -> float:
    """Seconds of products, and of the weights, gradients and activations that chips send each other."""
    model, mesh = config.model, config.mesh
    executed = executed_flops_per_token(model, attention.products) * config.tokens_per_step / chips
    gathers = 3 if model.remat is Remat.FULL else 2  # forward, backward, and again where blocks are run again
    number = count_parameters(model).matrices / mesh.tensor
    sharded = config.accumulate * number * (2 * gathers + 4) * (mesh.fsdp - 1) / mesh.fsdp
    copies = mesh.replica * mesh.data
    summed = 2 * 4 * number / mesh.fsdp * (copies - 1) / copies
    # Two sublayers a block, each summed over tensor: forward, backward, and again.
    activations = 2 * config.tokens_per_step * mesh.tensor / chips * model.n_layer * model.d_model
    reduced = 2 * gathers * 2 * activations * (mesh.tensor - 1) / mesh.tensor
    return executed / chip.flops + (sharded + summed + reduced) / (chip.links * chip.link_rate)
