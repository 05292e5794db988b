"""Arrays of other libraries from memory of this process."""

from __future__ import annotations

import struct
from typing import Any

from tensor_rpc._native import DenseArray

_FORMATS = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}


def to_numpy(array: DenseArray) -> Any:
    """Return an array of numpy over the same memory."""
    try:
        import numpy
    except ImportError:
        raise ImportError("numpy() needs numpy, which is not installed; tolist() does not") from None
    dtype = str(array.dtype)
    if dtype in _FORMATS or dtype in ("complex64", "complex128"):
        # By the interface of arrays and not by DLPack, through which numpy would not write.
        return numpy.asarray(array)
    try:
        import ml_dtypes

        wanted = numpy.dtype(getattr(ml_dtypes, dtype))
    except (ImportError, AttributeError):
        raise TypeError(f"numpy has no data type {dtype}: install ml_dtypes, or use torch()") from None
    if array.dtype.bits != 8 * wanted.itemsize:
        raise TypeError(f"numpy has elements of whole bytes, and {dtype} has fewer bits")
    return numpy.asarray(array.bits()).view(wanted)


def to_torch(array: DenseArray) -> Any:
    """Return a tensor of torch over the same memory."""
    try:
        import torch
    except ImportError:
        raise ImportError("torch() needs torch, which is not installed") from None
    return torch.from_dlpack(array)


def to_list(array: DenseArray) -> Any:
    """Return the elements as nested lists; a number for a tensor without dimensions."""
    dtype = str(array.dtype)
    if dtype == "bfloat16":
        # The upper half of a float32.
        halves = struct.iter_unpack("=H", array.tobytes())
        wide = b"".join(struct.pack("=I", half << 16) for (half,) in halves)
        elements = [element for (element,) in struct.iter_unpack("=f", wide)]
        return _nested(elements, array.shape)
    code = _FORMATS.get(dtype)
    if code is None:
        raise TypeError(f"lists cannot hold {dtype}")
    elements = [element for (element,) in struct.iter_unpack(f"={code}", array.tobytes())]
    return _nested(elements, array.shape)


def _nested(elements: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return elements[0]
    if len(shape) == 1:
        return elements
    step = len(elements) // shape[0] if shape[0] else 0
    return [_nested(elements[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]
