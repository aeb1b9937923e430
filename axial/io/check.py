"""Checks the types and ranges of configuration arguments against their annotations.

A gin-configurable class is a `Checked` dataclass. It annotates its arguments with the types below:

    >>> from axial.io.check import Checked, Count
    >>> @dataclasses.dataclass(frozen=True)
    ... class Config(Checked):
    ...     steps: Count = 1
    >>> Config(steps=True)
    Traceback (most recent call last):
    axial.errors.InputError: Config.steps = True: expected int, got bool
"""

import dataclasses
import functools
import math
import re
import types
import typing
from typing import Annotated

from msgspec import Meta

from axial.errors import InputError, nearest
from axial.io.read import convert

LARGEST = 2**31 - 1

Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Scale = Annotated[float, Meta(gt=0, le=100)]
Scales = Annotated[tuple[Scale, ...], Meta(min_length=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
NonNegative = Annotated[float, Meta(ge=0, le=1e30)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
Name = Annotated[str, Meta(min_length=1)]
Size = tuple[Annotated[int, Meta(ge=1, le=2**16)], Annotated[int, Meta(ge=1, le=2**16)]]


class Checked:
    """Base of a dataclass whose constructor raises InputError if an argument has a wrong type or is out of range.

    The constructor converts lists to tuples and integers to floats where the annotation says so.
    """

    def __post_init__(self):
        kind = type(self)
        for name, hint in hints_of(kind).items():
            if name in vars(self):
                value = convert_argument(f"{kind.__name__}.{name}", vars(self)[name], hint)
                object.__setattr__(self, name, value)


@functools.cache
def hints_of(kind):
    """dict from the names of a dataclass's fields to their annotations."""
    return typing.get_type_hints(kind, include_extras=True)


def convert_argument(name, value, kind):
    """Converts a value to its annotated type. Raises InputError, which names the argument."""
    where = f"{name} = {shortened(value)}"
    configured = typing.get_args(kind)[0] if typing.get_origin(kind) is types.UnionType else kind
    if dataclasses.is_dataclass(configured):
        if isinstance(value, kind):
            return value
        name = configured.__name__
        expected = f"@{name}()" if configured is kind else f"a {name}, or None for the data's own"
        raise InputError(f"{where}: expected {expected}")
    if typing.get_origin(kind) is typing.Literal and value not in typing.get_args(kind):
        choices = typing.get_args(kind)
        raise InputError(f"{where}: expected one of {', '.join(choices)}{nearest(value, choices)}")
    return convert(f"{where}: ", value, kind)


def check_choice(name, value, choices):
    """Raises InputError unless `value` is one of `choices`. The message suggests the nearest choice."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}: got {value!r}{nearest(value, choices)}")


def check_range(name, pair):
    """Raises InputError unless the pair is in order: (smallest, largest)."""
    if pair[0] > pair[1]:
        raise InputError(f"{name} = {tuple(pair)}: expected (smallest, largest)")


def shortened(value):
    """The repr of a value, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


AUTO = "auto"


def convert_diameter(name, value):
    """An object diameter in pixels as a float, or `AUTO`. Raises InputError, which starts with `name`."""
    if isinstance(value, str) and value == AUTO:
        return value
    try:
        number = math.nan if isinstance(value, (bool, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{name}={value}: expected the diameter of the photos' objects in pixels, as in 24, or {AUTO}")
    return number


_PIXEL_SIZE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?([^\W\d_]{1,20})")


def convert_pixel_size(name, value):
    """(side of a pixel, unit) of a text like '0.65um'. The unit µm becomes um. The InputError starts with `name`.

    >>> convert_pixel_size("pixel_size", "0.65um"), convert_pixel_size("pixel_size", "325 nm")
    ((0.65, 'um'), (325.0, 'nm'))
    """
    match = _PIXEL_SIZE.fullmatch(value) if isinstance(value, str) else None
    side, unit = (float(match[1]), re.sub("[\u00b5\u03bc]", "u", match[2])) if match else (0.0, "")
    if not 1e-9 <= side <= 1e9 or unit.lower() in ("px", "pixel", "pixels"):
        raise InputError(f"{name}={value}: expected the side of a pixel and its unit, as in 0.65um")
    return side, unit
