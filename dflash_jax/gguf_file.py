"""GGUF files: header into plain Python values, tensors as views of the mapped file.

The gguf package's own reader takes seconds for a vocabulary, as it keeps an array for every
string; here config, tokenizer and weights each read the header anew in a tenth of that.
Source: the GGUF specification, versions 2 and 3, little-endian.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quant_shape_to_byte_shape

_SCALARS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)
_STRING, _ARRAY = 8, 9
_REQUIRED = object()


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names every reason that was found."""


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """``shape`` in numpy's order (rows first); ``data``: [..., bytes of a row], not yet read."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray

    def read(self) -> np.ndarray:
        """Float32 values. Raises NotImplementedError for formats that gguf cannot expand."""
        return dequantize(self.data, self.kind)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def value(self, key: str, default: object = _REQUIRED) -> Any:
        """A metadata value; CheckpointError where it is missing and has no default."""
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            raise CheckpointError(f"the GGUF file has no {key}")
        return default


def read_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file. CheckpointError where it is none, or is not whole."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse(mapped)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (ValueError, KeyError, struct.error) as error:
        raise CheckpointError(f"{path} is not a whole GGUF file: {error}") from error


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.buffer, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.buffer):
            raise ValueError(f"{size} bytes at {self.at} pass the end of the file")
        self.at += size
        return self.buffer[self.at - size : self.at]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, length = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            return [self.string() for _ in range(length)]
        dtype = np.dtype(f"<{_SCALARS[element]}")
        return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()


def _parse(buffer: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(buffer)
    if (magic := cursor.take(4)) != b"GGUF":
        raise ValueError(f"it begins with {magic!r}")
    if (version := cursor.scalar("I")) not in (2, 3):
        raise ValueError(f"version {version}; accepted: 2 and 3, little-endian")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        values[key] = cursor.value(cursor.scalar("I"))
    headers = []
    for _ in range(num_tensors):
        name, dims = cursor.string(), cursor.scalar("I")
        if not 1 <= dims <= 4:
            raise ValueError(f"tensor {name} has {dims} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]
        headers.append((name, shape, GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q")))
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in headers:
        stored = quant_shape_to_byte_shape(shape, kind)
        size, begin = math.prod(stored), start + offset
        if begin + size > len(buffer):
            raise ValueError(f"tensor {name} {list(shape)} passes the end of the file")
        data = np.frombuffer(buffer, np.uint8, count=size, offset=begin)
        tensors[name] = GGUFTensor(shape, kind, data.reshape(stored))
    return GGUFFile(values, tensors)
