"""`lm compress` and `lm decompress`: files in, files out, and the cost beside what others make of the same bytes."""

import argparse
import bz2
import dataclasses
import gzip
import importlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path

from lm.base.errors import UsageError
from lm.base.files import atomic, refuse_target
from lm.decode.coder import TOTAL_BITS
from lm.decode.compress import Compressor, Report
from lm.run.restore import load_model

SUFFIX = ".lmz"


def compress(args: argparse.Namespace) -> None:
    """`lm compress FILE`.

    Raises:
      UsageError, RunError: see `Compressor`.
    """
    out = Path(f"{args.file}{SUFFIX}") if args.out is None else args.out
    data = _read(args.file, out)
    file, report = _compressor(args).compress(data, blocks=args.blocks, overlap=args.overlap, progress=True)
    _write(out, file)
    others = {name: call(data) for name, call in OTHERS.items()} if args.compare else {}
    if args.json:
        print(json.dumps({**dataclasses.asdict(report), "file_bytes": len(file), "others": others}, indent=2))
    else:
        print(as_text(report, len(file)))
        print(*([comparison(report, len(file), others)] if args.compare else []), f"written to {out}", sep="\n")


def decompress(args: argparse.Namespace) -> None:
    """`lm decompress FILE`.

    Raises:
      UsageError, RunError: see `Compressor.decompress`.
    """
    out = args.out
    if out is None:
        if args.file.suffix != SUFFIX:
            raise UsageError(f"does not end in {SUFFIX}", where=str(args.file), do="Name the result with --out.")
        out = args.file.with_suffix("")
        if out.exists():
            raise UsageError("is there already", where=str(out), do="Name the result with --out to replace it.")
    file = _read(args.file, out)
    data = _compressor(args).decompress(file, where=str(args.file), force=args.force, progress=True)
    _write(out, data)
    print(f"{len(data):,} bytes, all checks passed, written to {out}")


def as_text(report: Report, file_bytes: int) -> str:
    """What a compression cost, as lines for people."""
    per_byte = report.payload_bits / report.size if report.size else 0.0
    rate = report.tokens / report.seconds
    return "\n".join(
        [
            f"file         {report.size:,} bytes, {report.tokens:,} tokens in {report.blocks} blocks",
            f"compressed   {file_bytes:,} bytes = {_per_byte(file_bytes, report.size)}, "
            f"of them header and checks {report.header_bytes:,}",
            f"messages     {report.payload_bits:,} bits = {per_byte:.4f} bits/byte",
            f"information  {report.quantised_bits:,.1f} bits, sum of -log2 p with p in units of 2^-{TOTAL_BITS}: "
            f"the messages take {report.payload_bits - report.quantised_bits:+.1f}",
            f"exact model  {report.model_bits:,.1f} bits, p in float32: "
            f"rounding p costs {report.quantised_bits - report.model_bits:+.1f}",
            f"speed        {rate:,.0f} tokens/s in {report.seconds:.1f} s with compilation, "
            f"{report.coder_seconds:.1f} s of it in the coder",
        ]
    )


def comparison(report: Report, file_bytes: int, others: dict[str, int | None]) -> str:
    """A table of compressors on the same bytes, smallest first; without and with the model's parameters."""
    rows = [("lm", file_bytes), ("lm + its parameters", file_bytes + report.parameter_bytes)]
    rows += [(name, size) for name, size in others.items() if size is not None]
    lines = [f"{'compressor':<24}{'bytes':>14}  bits/byte"]
    for name, size in sorted(rows, key=lambda row: row[1]):
        lines.append(f"{name:<24}{size:>14,}  {_per_byte(size, report.size).split()[0]:>9}")
    lines += [f"{name:<24}       missing: no package for it here" for name, size in others.items() if size is None]
    lines.append(f"parameters: {report.parameter_bytes:,} bytes as they are stored, float32")
    return "\n".join(lines)


def _zstd(data: bytes) -> int | None:
    for module in ("compression.zstd", "zstandard"):  # the standard library's from Python 3.14 on
        try:
            return len(importlib.import_module(module).compress(data, level=22))
        except ModuleNotFoundError:
            continue
    return None


OTHERS: dict[str, Callable[[bytes], int | None]] = {
    "gzip -9": lambda data: len(gzip.compress(data, 9)),
    "bzip2 -9": lambda data: len(bz2.compress(data, 9)),
    "xz -9e": lambda data: len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    "zstd --ultra -22": _zstd,
}
"""Length of the result at each compressor's best level; None where it is not installed."""


def _per_byte(size: int, original: int) -> str:
    return f"{8 * size / original:.4f} bits/byte" if original else "- bits/byte"


def _compressor(args: argparse.Namespace) -> Compressor:
    loaded = load_model(args.checkpoint)
    return Compressor(loaded.model, loaded.params, loaded.tokenizer)


def _read(path: Path, out: Path) -> bytes:
    refuse_target(path)
    refuse_target(out)
    if not path.exists():
        raise UsageError("there is no such file", where=str(path))
    if out.exists() and out.samefile(path):
        raise UsageError("is the input itself", where=str(out), do="Write to another file.")
    return path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    with atomic(path, "wb") as file:
        file.write(content)
