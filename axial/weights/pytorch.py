"""Files of torch.save, read and written without PyTorch. Reading runs no code of the file.

Such a file holds a pickle of its structure, and the bytes of each tensor apart. Since PyTorch 1.6 both are entries of a
ZIP archive without compression; before, they follow each other in one stream (torch/serialization.py).
"""

import functools
import io
import math
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
    """The tensors of a model, as a dict from names to arrays.

    The file may hold the state dict itself, or under 'net', 'state_dict' or 'model'. A prefix 'module.' that all names
    share, which DataParallel adds, is removed.

    Raises:
        InputError: the file is cut short, is not torch.save's, asks for anything but tensors and plain containers, or
            holds no tensors.
    """
    data = read_file(path, LARGEST_FILE)
    try:
        content = _read_archive(data) if data[:2] == b"PK" else _read_stream(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # what damaged and malicious files raise is of every class
        raise InputError(f"{path}: not a whole file of torch.save ({first_line(error)})") from None
    for name in ("net", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
            break
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
    """The content of a ZIP archive."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    entries = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise InputError(f"its entry {entry.filename!r} is compressed; torch.save never compresses")
        if entry.filename in entries:
            raise InputError(f"its entry {entry.filename!r} is there twice")
        entries[entry.filename] = entry
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise InputError("its entries overlap, and would unpack to more bytes than the file has")
    pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InputError("an archive without data.pkl; a file of torch.save is expected")
    folder = pickles[0].split("/")[0]
    order = f"{folder}/byteorder"
    if order in entries and archive.read(order) != b"little":
        raise InputError("its numbers are not little-endian")

    @functools.cache
    def storage(key, dtype, count):
        return _from_bytes(archive.read(f"{folder}/data/{key}"), dtype, count)

    return read_pickle(archive.read(pickles[0]), storage)[0]


def _read_stream(data):
    """The content of a file of PyTorch before 1.6: five pickles, then a count and the bytes of each storage."""
    types, parts, end = {}, [], 0

    def note(key, dtype, count):  # the bytes come after the pickles
        types[key] = dtype, count
        return np.broadcast_to(np.zeros([], dtype), [count])

    for _ in range(5):
        start = end
        value, size = read_pickle(data[end : end + LARGEST_PICKLE], note)
        parts.append(value)
        end += size
        if len(parts) == 4:
            structure = data[start:end]
    magic, protocol, system, _, keys = parts
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL:
        raise InputError("not a file of torch.save")
    if not system["little_endian"]:
        raise InputError("its numbers are not little-endian")
    found = {}
    for key in keys:
        dtype, count = types[key]
        size = count * np.dtype(dtype).itemsize
        if struct.unpack_from("<q", data, end) != (count,):
            raise InputError(f"its storage {key!r} has another size than its tensors say")
        found[key] = _from_bytes(data[end + 8 : end + 8 + size], dtype, count)
        end += 8 + size
    return read_pickle(structure, lambda key, *_: found[key])[0]


def _from_bytes(data, dtype, count):
    if len(data) != count * np.dtype(dtype).itemsize:
        raise InputError(f"cut short: a storage has {len(data)} bytes where {count} numbers are expected")
    return np.frombuffer(data, dtype)


# === The pickle ===


def read_pickle(data, storage):
    """The value of the pickle at the start of `data`, and the pickle's length. No code of the file runs.

    Args:
        data: bytes.
        storage: function of (key, dtype, count) that returns the numbers of a storage.

    Raises:
        InputError: the pickle names another class or function, or has another instruction.
    """
    if len(data) > LARGEST_PICKLE:
        raise InputError(f"its structure has {len(data)} bytes, at most {LARGEST_PICKLE} are read")
    file = io.BytesIO(data)
    return _Unpickler(file, storage).load(), file.tell()


class _Dict(dict):
    """A dict of a file. Its keys are plain: the hash of tuples within tuples would end the process."""

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
_TAKEN = (
    "PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING BINSTRING "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL REDUCE BUILD BINPERSID"
).split()


class _Instructions(dict):
    """Those of `_TAKEN`, by their bytes. Every other one is refused."""

    def __missing__(self, byte):
        name = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}.get(byte, byte)
        raise InputError(f"its pickle has the instruction {name}, which is refused: no tensor needs it")


class _Unpickler(pickle._Unpickler):
    """Python's own, which knows no instruction but `_TAKEN` and calls nothing but `_GLOBALS`."""

    dispatch = _Instructions(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _TAKEN)}
    )

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
        kind, of, key, _, count, *_ = pid
        if kind != "storage" or not isinstance(of, np.dtype) or count < 0:
            raise InputError("its pickle is damaged")
        return self.storage(str(key), of, count)

    def load_empty_dict(self):
        self.append(_Dict())

    def load_build(self):
        self.stack.pop()  # attributes of a container, as `_metadata` of a state dict: not needed

    dispatch |= {pickle.EMPTY_DICT[0]: load_empty_dict, pickle.BUILD[0]: load_build}


def _view(storage, offset, size, stride):
    """torch._utils._rebuild_tensor_v2: an array of a shape and strides, on the numbers of a storage."""
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
    """A file that torch.load(weights_only=True) reads as an OrderedDict of tensors.

    Args:
        arrays: dict from names to float32 or int64 arrays.
    """
    names = {np.dtype(dtype): name for name, dtype in STORAGES.items()}
    structure = [b"\x80\x02", b"ccollections\nOrderedDict\n", b")R", b"("]
    for key, (name, array) in enumerate(arrays.items()):
        stride = [s // array.itemsize for s in np.empty(array.shape, array.dtype).strides]
        storage = (_text("storage"), f"ctorch\n{names[array.dtype]}\n".encode(), _text(str(key)), _text("cpu"))
        pid = _tuple(*storage, _int(array.size)) + b"Q"
        tensor = (pid, _int(0), _tuple(*map(_int, array.shape)), _tuple(*map(_int, stride)), b"\x89")
        hooks = b"ccollections\nOrderedDict\n)R"
        structure += [_text(name), b"ctorch._utils\n_rebuild_tensor_v2\n", _tuple(*tensor, hooks), b"R"]
    structure += [b"u", b"."]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"".join(structure))
        archive.writestr("archive/byteorder", b"little")
        for key, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{key}", array.astype(array.dtype.newbyteorder("<")).tobytes())
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def _text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _int(value):
    return b"J" + struct.pack("<i", value) if value < 2**31 else b"\x8a\x08" + struct.pack("<q", value)


def _tuple(*items):
    return b"(" + b"".join(items) + b"t"
