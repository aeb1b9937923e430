"""Reads JSON, YAML, CSV and text files into checked values, or raises one `InputError`."""

import codecs
import csv
import io
import json
import os
import re
import stat
import typing

import msgspec
import yaml

from axial.errors import InputError
from axial.io import gfile
from axial.io.gfile import is_remote

LARGEST_TEXT = 2**24  # bytes of a YAML, gin or manifest file
LARGEST_JSON = 2**32  # bytes; COCO's largest annotations have 0.5 GB
LARGEST_SEARCHED = 2**22  # most bytes of JSON to search for duplicate keys; the search takes longer than decoding
LARGEST_IMAGE = 2**29  # bytes of an encoded image


def check_regular(path):
    """Raises InputError for a named pipe, a device or a socket: reading it may block or never end."""
    path = os.fspath(path)
    local = path.removeprefix("file://")
    if is_remote(local):
        return
    try:
        mode = os.stat(local).st_mode
    except (OSError, ValueError):  # the caller then fails to open the file, and reports the reason
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path}: a pipe, device or socket; expected a file")


def read_file(path, largest=LARGEST_IMAGE):
    """Reads the bytes of a file.

    Raises:
        InputError: the path is missing, unreadable, a folder, pipe, device or socket, or larger than `largest` bytes.
    """
    check_regular(path)
    try:
        if gfile.isdir(path):
            raise InputError(f"{path}: a folder; expected a file")
        size = gfile.size(path)
        if size > largest:
            raise InputError(f"{path}: {size} bytes, at most {largest} are read")
        with gfile.open_binary(path, "rb") as file:
            return file.read()
    except gfile.missing_errors():
        raise InputError(f"{path}: no such file") from None
    except (*gfile.file_errors(), UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or first_line(error)
        raise InputError(f"{path}: cannot be read ({reason})") from None


def read_text(path):
    """Reads a small UTF-8 file as text without its byte order mark. Raises InputError."""
    try:
        return _unmarked(path, read_file(path, LARGEST_TEXT)).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _unmarked(path, data):
    """Removes the byte order mark of UTF-8. Raises InputError for a mark of UTF-16."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{path}: not UTF-8 but UTF-16; save it as UTF-8")
    return data.removeprefix(codecs.BOM_UTF8)


def read_json(path, schema, largest=LARGEST_JSON):
    """Reads a JSON file. Returns its bytes without a byte order mark, and its content as an instance of `schema`.

    Raises:
        InputError: the file cannot be read, is not JSON, or violates the fields, types or ranges of the schema. The
            message names the field.
    """
    data = _unmarked(path, read_file(path, largest))
    return data, decode_json(path, data, schema)


def read_existing(path, schema):
    """The content of a JSON file, as an instance of `schema`; None if there is no file. Raises InputError."""
    return read_json(path, schema)[1] if gfile.exists(path) else None


def decode_json(path, data, schema):
    """Decodes JSON bytes to a `schema`; see `read_json`."""

    def search(pairs):
        check_unique(path, "the key", (key for key, _ in pairs))

    try:
        content = msgspec.json.decode(data, type=schema)
        if len(data) <= LARGEST_SEARCHED:  # parse_int is bool, because int refuses very long numbers
            json.loads(data.decode(errors="surrogateescape"), object_pairs_hook=search, strict=False, parse_int=bool)
        return content
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {_plain(error)}") from None
    except (msgspec.DecodeError, json.JSONDecodeError, UnicodeError) as error:
        raise InputError(f"{path}: not JSON ({first_line(error)})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None


# === YAML ===

_LOADER = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader


def read_yaml(path, schema):
    """Reads a YAML file as a `schema`, whose types decide which values are numbers or booleans. Raises InputError.

    Aliases are refused, because a few aliases can describe more values than any memory holds. Duplicate keys are
    refused too, and so are values with other tags than text, list and mapping.
    """
    text = read_text(path)
    try:
        root = yaml.compose(text, _LOADER)
        content = root and _plain_yaml(root, set())
    except (yaml.YAMLError, ValueError, TypeError) as error:  # TypeError: a key is a list or a mapping
        raise InputError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply") from None
    return convert(f"{path}: ", content, schema, strict=False)


def _plain_yaml(node, visited):
    """Converts a YAML node to a str, list or dict. Raises ValueError for an alias, whose node is in `visited`."""
    where, tag = f"line {node.start_mark.line + 1}", node.tag.removeprefix("tag:yaml.org,2002:")
    if node in visited:
        raise ValueError(f"{where}: aliases are not read")
    if tag not in ("str", "seq", "map"):
        raise ValueError(f"{where}: the tag {tag} is not read")
    visited.add(node)
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode):
        return [_plain_yaml(item, visited) for item in node.value]
    pairs = [(_plain_yaml(key, visited), _plain_yaml(value, visited)) for key, value in node.value]
    check_unique(where, "the key", (key for key, _ in pairs))
    return dict(pairs)


# === Checked values ===


def read_rows(path, schema):
    """Yields ('PATH:LINE: ', row) for each line of a CSV file. A row is an instance of the class `schema`.

    Raises:
        InputError: a column is missing, unknown or duplicate, or a value has a wrong type.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    check_unique(path, "the column", reader.fieldnames or ())
    for number, fields in enumerate(reader, 2):
        where = f"{path}:{number}: "
        if unknown := fields.keys() - typing.get_type_hints(schema).keys():
            raise InputError(f"{where}has an unknown column {min(map(str, unknown))}")
        yield where, convert(where, {str(name): value for name, value in fields.items()}, schema, strict=False)


def convert(where, value, schema, strict=True):
    """Converts a value of plain Python types to a `schema`. Unless `strict`, it converts texts to numbers too.

    Raises:
        InputError: the value does not fit the schema. The message starts with `where`.
    """
    try:
        return msgspec.convert(value, schema, strict=strict)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}{_plain(error)}") from None
    except RecursionError:
        raise InputError(f"{where}nested too deeply") from None


def check_unique(path, field, values):
    """Raises InputError if two values are equal."""
    previous = set()
    for value in values:
        if value in previous:
            raise InputError(f"{path}: {field} {value!r} is there twice")
        previous.add(value)


def _plain(error):
    """msgspec's message in plain words, with the field first."""
    text, _, path = str(error).replace("`", "").partition(" - at ")
    for json_word, word in (("object", "a mapping"), ("array", "a list")):
        text = re.sub(rf"\b(Expected |got ){json_word}\b", rf"\1{word}", text)
    text = re.sub(r"^Object (contains|missing)", lambda m: "has an" if m[1] == "contains" else "is missing the", text)
    field = path.removeprefix("$").removeprefix(".")
    return f"{field + ': ' if field else ''}{text[:1].lower() + text[1:]}"


def first_line(error):
    """The first line of an exception's message, or its class name if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
