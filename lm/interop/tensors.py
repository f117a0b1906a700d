"""safetensors files: read tensor by tensor from one file or many, written tensor by tensor."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from lm.base.errors import RunError, UsageError
from lm.base.files import write_json
from lm.model.config import Dtype

HEAD = "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_EXACT = ("F32", "BF16", "F16")  # in float32
_CODES = {Dtype.FLOAT32: ("F32", np.dtype(np.float32)), Dtype.BFLOAT16: ("BF16", np.dtype(ml_dtypes.bfloat16))}


class Source:
    """The tensors of a folder, by name; names that lack `prefix` are given it, and `buffers` are passed over.

    Raises:
      UsageError: no safetensors there, an index that names other files or tensors than there are, or a damaged file.
    """

    def __init__(self, folder: Path, prefix: str, buffers: str):
        self.folder, self._open = folder, contextlib.ExitStack()
        self.files = _files(folder)
        self._places: dict[str, tuple[Any, str]] = {}
        with contextlib.ExitStack() as opened:
            for path in self.files:
                file = opened.enter_context(_opened(path))
                for name in file.offset_keys():
                    whole = name if name == HEAD or name.startswith(prefix) else prefix + name
                    if whole in self._places:
                        raise UsageError(f"the tensor {name} is there twice", where=str(path))
                    if not re.fullmatch(rf"({re.escape(prefix)})?{buffers}", name):
                        self._places[whole] = (file, name)
            self._open = opened.pop_all()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def check(self, shapes: Mapping[str, Sequence[int]], may_be_there: Sequence[str] = ()) -> None:
        """Sees that exactly these tensors are there, in these shapes and in a type that float32 holds.

        Raises:
          UsageError: not so; up to five differences are listed.
        """
        wrong = [f"{name} {list(shape)} is missing" for name, shape in shapes.items() if name not in self]
        for name in self._places:
            if name not in shapes:
                wrong += [] if name in may_be_there else [f"{name} is not of this model"]
                continue
            found = self._slice(name)
            if list(found.get_shape()) != list(shapes[name]):
                wrong.append(f"{name} is {list(found.get_shape())}, not {list(shapes[name])}")
            if found.get_dtype() not in _EXACT:
                wrong.append(f"{name} is {found.get_dtype()}; supported: {', '.join(_EXACT)}")
        if wrong:
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UsageError("the tensors are not those that config.json describes: " + "; ".join(wrong[:5]) + more,
                             where=str(self.folder))  # fmt: skip

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own type."""
        file, own = self._places[name]
        return file.get_tensor(own)

    def _slice(self, name: str) -> Any:
        file, own = self._places[name]
        return file.get_slice(own)


class Tensor(NamedTuple):
    """A tensor that is made when it is written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_sharded(folder: Path, tensors: Sequence[Tensor], dtype: Dtype, shard_bytes: int) -> list[Path]:
    """Writes one file, or where that would be larger several and their index; one tensor at a time is in memory."""
    size = _CODES[dtype][1].itemsize
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        more = math.prod(tensor.shape) * size
        if shards[-1] and filled + more > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += more
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write(file, shard, dtype)
    if count > 1:
        total = sum(math.prod(tensor.shape) for tensor in tensors) * size
        where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return [folder / name for name in names]


def _write(file: IO[bytes], tensors: Sequence[Tensor], dtype: Dtype) -> None:
    # The library writes a whole file from arrays that are all there: twice the model at once.
    code, kind = _CODES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * kind.itemsize
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        file.write(tensor.make().astype(kind).tobytes())


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not an index of shards ({error!r})", where=str(folder / INDEX)) from error
        paths = [folder / name for name in sorted(names)]
    else:
        paths = [folder / SINGLE]
    for path in paths:
        if not path.is_file():
            raise UsageError(
                f"{path.name} is missing",
                where=str(folder),
                do="Only safetensors are read: model.safetensors, or shards with their index.",
            )
    return paths


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        # Read, not mapped: mapped pages would count as memory of this process.
        file = safe_open(path, framework="np", backend="pread")
    except (SafetensorError, OSError) as error:
        raise RunError(f"damaged or cut off: {error}", where=str(path), do="Fetch it again.") from error
    with file as opened:
        yield opened
