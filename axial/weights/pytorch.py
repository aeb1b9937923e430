"""Reads and writes files of torch.save without PyTorch. Reading runs no code of the file.

Such a file has a pickle of the structure, and separately the bytes of each storage. Since PyTorch 1.6 both are entries
of an uncompressed ZIP archive; earlier versions write one stream (torch/serialization.py).
"""

import functools
import io
import math
import os
import pickle
import pickletools
import struct
import zipfile

import numpy as np
import tensorflow as tf

from axial.errors import InputError
from axial.io.read import first_line, read_file

LARGEST_FILE = 2**33  # bytes
LARGEST_PICKLE = 2**26  # bytes
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
BFLOAT16 = tf.bfloat16.as_numpy_dtype
STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


def read_state_dict(path):
    """A model's tensors, as a dict from the name of each tensor to its array.

    The file holds a state dict, either bare or under the key 'net', 'state_dict' or 'model'. If all names start with
    DataParallel's prefix 'module.', this prefix is removed.

    Raises:
        InputError: the file is cut short or not of torch.save, its pickle asks for more than tensors and plain
            containers, or it holds no tensors.
    """
    data = read_file(path, LARGEST_FILE)
    try:
        content = _read_archive(data) if data[:2] == b"PK" else _read_stream(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # damaged and malicious files raise errors of any class
        raise InputError(f"{path}: not a whole file of torch.save ({first_line(error)})") from None
    inner = [content.get(name) for name in ("net", "state_dict", "model")] if isinstance(content, dict) else []
    content = next((value for value in inner if isinstance(value, dict)), content)
    if not isinstance(content, dict) or not any(isinstance(v, np.ndarray) for v in content.values()):
        raise InputError(f"{path}: holds no state dict; one is expected bare or under 'net' or 'state_dict'")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise InputError(f"{path}: {name!r} is not a tensor with a name")
    if all(name.startswith("module.") for name in content):
        content = {name.removeprefix("module."): array for name, array in content.items()}
    return dict(content)


# === The two formats ===


def _read_archive(data):
    """The content of a file of PyTorch 1.6 or later, a ZIP archive."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    entries, names = archive.infolist(), set(archive.namelist())
    if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
        raise InputError("its entries are compressed; torch.save never compresses")
    if len(names) < len(entries) or sum(entry.file_size for entry in entries) > len(data):
        raise InputError("its entries overlap, and would unpack to more bytes than the file has")
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InputError("an archive without data.pkl; a file of torch.save is expected")
    folder = os.path.dirname(pickles[0])
    if f"{folder}/byteorder" in names and archive.read(f"{folder}/byteorder") != b"little":
        raise InputError("its numbers are not little-endian")

    @functools.cache
    def storage(key, dtype, count):
        return _from_bytes(archive.read(f"{folder}/data/{key}"), dtype, count)

    return read_pickle(archive.read(pickles[0]), storage)[0]


def _read_stream(data):
    """The content of a file of an earlier PyTorch: five pickles, then a count and the bytes of each storage."""
    types, parts, starts, arrays = {}, [], [0], {}

    def record(key, dtype, count):  # the bytes follow the pickles, so this pass only records the types
        types[key] = dtype, count
        return np.broadcast_to(np.zeros([], dtype), [count])

    for _ in range(5):
        value, size = read_pickle(data[starts[-1] : starts[-1] + LARGEST_PICKLE], record)
        parts.append(value)
        starts.append(starts[-1] + size)
    magic, protocol, system, _, keys = parts
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL or not system["little_endian"]:
        raise InputError("not a file of torch.save with little-endian numbers")
    end = starts[-1]
    for key in keys:
        dtype, count = types[key]
        start, end = end + 8, end + 8 + count * np.dtype(dtype).itemsize
        if struct.unpack_from("<q", data, start - 8) != (count,):
            raise InputError(f"its storage {key!r} has another size than its tensors say")
        arrays[key] = _from_bytes(data[start:end], dtype, count)
    return read_pickle(data[starts[3] : starts[4]], lambda key, *_: arrays[key])[0]


def _from_bytes(data, dtype, count):
    if len(data) != count * np.dtype(dtype).itemsize:
        raise InputError(f"cut short: a storage has {len(data)} bytes where {count} numbers are expected")
    return np.frombuffer(data, dtype)


# === The pickle ===


def read_pickle(data, storage):
    """(value, length in bytes) of the pickle at the start of `data`. No code of the file runs.

    Args:
        data: bytes.
        storage: function of (key, dtype, count) that returns the numbers of a storage.

    Raises:
        InputError: the pickle names a class or function, or has an instruction, that is not allowed.
    """
    if len(data) > LARGEST_PICKLE:
        raise InputError(f"its structure has {len(data)} bytes, at most {LARGEST_PICKLE} are read")
    file = io.BytesIO(data)
    return _Unpickler(file, storage).load(), file.tell()


class _Dict(dict):
    """A dict that allows only str and int keys, because hashing a deeply nested tuple would crash the process."""

    def __init__(self):
        super().__init__()

    def __setitem__(self, key, value):
        if not isinstance(key, (str, int)):
            raise InputError("its pickle is damaged")
        super().__setitem__(key, value)


_GLOBALS = {f"torch.{name}": np.dtype(dtype) for name, dtype in STORAGES.items()} | {
    "collections.OrderedDict": _Dict,
    "torch._utils._rebuild_tensor_v2": lambda storage, offset, size, stride, *_: _view(storage, offset, size, stride),
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}
_NAMES = {ord(code.code): code.name for code in pickletools.opcodes}
_ALLOWED = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING BINSTRING "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL REDUCE BUILD BINPERSID"
).split()


class _Instructions(dict):
    """dict from the byte of each allowed instruction (`_ALLOWED`) to its method. Other instructions are refused."""

    def __missing__(self, byte):
        raise InputError(f"its pickle has the instruction {_NAMES.get(byte, byte)}, which is refused")


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, restricted to the instructions `_ALLOWED` and the functions `_GLOBALS`."""

    dispatch = _Instructions({b: load for b, load in pickle._Unpickler.dispatch.items() if _NAMES[b] in _ALLOWED})

    def __init__(self, file, storage):
        super().__init__(file, encoding="latin-1")
        self.file, self.storage = file, storage

    def find_class(self, module, name):
        if f"{module}.{name}" not in _GLOBALS:
            if self.file.tell() == self.file.getbuffer().nbytes:
                raise EOFError("it ends in a name")
            raise InputError(f"its pickle asks for '{module}.{name}', which is refused: loading weights runs no code")
        return _GLOBALS[f"{module}.{name}"]

    def persistent_load(self, pid):
        kind, dtype, key, _, count, *_ = pid
        if kind != "storage" or not isinstance(dtype, np.dtype) or count < 0:
            raise InputError("its pickle is damaged")
        return self.storage(str(key), dtype, count)

    # BUILD ignores attributes of a container, such as `_metadata` of a state dict.
    dispatch |= {
        pickle.EMPTY_DICT[0]: lambda self: self.append(_Dict()),
        pickle.BUILD[0]: lambda self: self.stack.pop(),
    }


def _view(storage, offset, size, stride):
    """Replaces torch._utils._rebuild_tensor_v2: a view of a storage with a shape and strides."""
    size, stride = tuple(map(int, size)), tuple(map(int, stride))
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = math.prod(size)
    if min((offset, *size, *stride)) < 0 or count > storage.size or (count and last >= storage.size):
        raise InputError(f"a tensor of shape {list(size)} is not within its storage of {storage.size} numbers")
    if not count:
        return np.zeros(size, storage.dtype)
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False)


# === Writing ===


def state_dict_bytes(arrays):
    """The bytes of a file that torch.load(weights_only=True) reads as an OrderedDict of tensors.

    Args:
        arrays: dict from the name of each tensor to a float32 or int64 array.
    """
    names = {np.dtype(dtype): name for name, dtype in STORAGES.items()}
    structure = b"\x80\x02ccollections\nOrderedDict\n)R("
    for key, (name, array) in enumerate(arrays.items()):
        stride = tuple(step // array.itemsize for step in np.empty(array.shape, array.dtype).strides)
        storage = f"ctorch\n{names[array.dtype]}\n".encode() + _push(str(key)) + _push("cpu") + _push(array.size)
        structure += _push(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + _push("storage") + storage + b"tQ"
        structure += _push(0) + _push(array.shape) + _push(stride) + b"\x89ccollections\nOrderedDict\n)RtR"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", structure + b"u.")
        archive.writestr("archive/byteorder", b"little")
        for key, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{key}", array.astype(array.dtype.newbyteorder("<")).tobytes())
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def _push(value):
    """The pickle instructions that make a text, a number or a tuple of numbers."""
    return pickle.dumps(value, 2)[2:-1]
