"""Compiles Llama's steps for pods, at several depths and lengths, one after the other, and tabulates them.

What lies in the folder of results is not compiled again.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lm.base.progress import console
from lm.model.accounting import Flops

RESULTS = Path(__file__).with_name("results")
GIB = 2**30
SLICES = ("v5e:16x16", "v6e:16x16", "v5p:8x8x8")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step to compile: `lm compile --config configs/llama.py:SIZE --topology SLICE` and more flags."""

    size: str
    slice: str
    flags: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What is typed."""
        return " ".join(("--config", f"configs/llama.py:{self.size}", "--topology", self.slice, *self.flags))

    def path(self, folder: Path) -> Path:
        """Of its JSON."""
        parts = (self.size, self.slice, *(flag.rpartition(".")[2] for flag in self.flags))
        return folder / ("-".join(parts).replace(":", "-") + ".json")


def changed(**leaves: Any) -> tuple[str, ...]:
    """Flags for leaves of the configuration, a double underscore for a dot."""
    return tuple(f"--config.{name.replace('__', '.')}={value}" for name, value in leaves.items())


PODS = (
    *(Step(size, where) for size in ("1b", "8b", "70b") for where in SLICES),
    # The nearest settings that fit where the configuration does not.
    Step("8b", "v5e:16x16", changed(accumulate=2)),
    Step("70b", "v6e:16x16", changed(accumulate=2)),
    Step("70b", "v5e:16x16", changed(mesh__fsdp=32, mesh__tensor=8, accumulate=16)),
)
DEPTHS = tuple(
    Step("1b", "v5e:4x4", changed(batch_size=16, model__context_length=1024, model__n_layer=layers))
    for layers in (1, 4, 16, 32)
)
LENGTHS = tuple(
    Step("1b", "v5p:4x4x4", changed(batch_size=64, model__context_length=length))
    for length in (1024, 2048, 4096, 8192, 16384, 32768)
)


def main() -> None:
    """Prints the tables as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m experiments.pods", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of results (default: beside)")
    parser.add_argument("--only", default="", metavar="TEXT", help="compile only steps whose command holds it")
    args = parser.parse_args()
    for step in (*PODS, *DEPTHS, *LENGTHS):
        if args.only in step.command and not step.path(args.out).exists():
            _compile(step, step.path(args.out))
    found = {step: json.loads(path.read_text()) for step in (*PODS, *DEPTHS, *LENGTHS)
             if (path := step.path(args.out)).exists()}  # fmt: skip
    print("\n\n".join("\n".join(lines) for lines in (_pods(found), _depths(found), _lengths(found))))


def _compile(step: Step, path: Path) -> None:
    command = [sys.executable, "-m", "lm.cli", "compile", *step.command.split(), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = done.stderr if done.returncode else next(line for line in done.stdout.splitlines() if "memory of" in line)
    console.print(f"{step.command}: {told.strip()}", markup=False, highlight=False, soft_wrap=True)


Found = dict[Step, dict[str, Any]]


def _pods(found: Found) -> list[str]:
    lines = [
        "| model | slice | flags | parameters, optimizer, temporaries | peak, GiB | `flops_matmul`, executed "
        "| collectives | least step, s (overlapped - serial) | tokens/s | utilisation | FLOPs a byte (balance) |",
        "|---" * 11 + "|",
    ]
    for step in PODS:
        if (row := found.get(step)) is None:
            continue
        memory, roof = row["memory"], row["roofline"]
        parts = ", ".join(_gib(memory[name]) for name in ("parameters", "optimizer", "temporaries"))
        fits = "fits" if row["fits"] else f"misses by {row['excess'] / GIB:.2f}"
        cells = [step.size, step.slice, " ".join(f"`{flag}`" for flag in step.flags), parts]
        cells += [f"{memory['peak'] / GIB:.1f} of {memory['there'] / GIB:.0f}: {fits}"]
        cells += [f"{row['flops'][Flops.MATMUL]:.3g}, {row['executed']:.3g}"]
        if roof:
            fast, slow = roof["overlapped"], roof["serial"]
            cells += ["; ".join(f"{name} {_gib(size)}" for name, size in list(row["collectives"].items())[:4])]
            cells += [f"{fast['seconds']:.2f} - {slow['seconds']:.2f} ({roof['bound']})"]
            cells += [f"{fast['tokens_per_second']:,.0f} - {slow['tokens_per_second']:,.0f}"]
            cells += [f"{fast['utilisation']:.0%} - {slow['utilisation']:.0%}"]
            cells += [f"{roof['intensity']:.0f} ({roof['balance']:.0f})"]
        lines.append("| " + " | ".join(cells + [""] * (11 - len(cells))) + " |")
    return lines


def _depths(found: Found) -> list[str]:
    lines = ["| layers | compilation, s of CPU | temporaries |", "|---|---|---|"]
    for step in DEPTHS:
        if row := found.get(step):
            layers = step.flags[-1].rpartition("=")[2]
            lines.append(f"| {layers} | {row['compile_cpu_seconds']:.0f} | {_gib(row['memory']['temporaries'])} |")
    return lines


def _lengths(found: Found) -> list[str]:
    lines = ["| tokens a row | temporaries | a token | executed FLOPs a token |", "|---|---|---|---|"]
    for step in LENGTHS:
        if row := found.get(step):
            tokens, temporaries = row["tokens"] // row["chips"], row["memory"]["temporaries"]
            each = f"{temporaries / tokens / 1024:.0f} KiB | {row['executed'] / row['tokens']:.3g}"
            lines.append(f"| {tokens:,} | {_gib(temporaries)} | {each} |")
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
