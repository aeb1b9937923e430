"""Makes paths from names in records, specs, JSON files, lists and splits. No such path leads out of its folder.

This module also has the locations of axial's own files.
"""

import collections
import os
import re

from axial.errors import InputError

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LONGEST = 255  # bytes of a file name on Linux and macOS
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def experiments_dir():
    """The folder experiments/ of the installed package or of the checkout."""
    installed = os.path.join(PACKAGE, "experiments")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(PACKAGE), "experiments")


def inside(folder, name, what):
    """Joins a folder and an untrusted name. This function makes every path from an untrusted name.

    A name may have folders. Both '/' and '\\' separate its parts, because '\\' does so on Windows.

    Args:
        folder: path of the folder.
        name: name of a file or folder in it.
        what: source of the name, for the message.

    Raises:
        InputError: the name is absolute; has an empty part, '.' or '..'; has a part that is too long for a file name;
            has control characters; or is not Unicode.

    >>> inside("results", "aachen/aachen_000.png", "a record")
    'results/aachen/aachen_000.png'
    >>> inside("results", "../a.png", "a record")
    Traceback (most recent call last):
    axial.errors.InputError: a record: '../a.png': leaves its folder; expected a name like 'a.png' or 'b/a.png'
    """
    wrong = _wrong(name)
    if wrong:
        shown = repr(name) if len(name) <= 100 else f"{name[:100]!r}..."
        raise InputError(f"{what}: {shown}: {wrong}; expected a name like 'a.png' or 'b/a.png'")
    return os.path.join(folder, name)


def output_names(*forms):
    """List of unique names of the photos' outputs, without the suffix of the output.

    The lists of candidates are tried in order. A photo gets its candidate if no other photo without a name has the same
    candidate, and no photo has this name yet. If every list fails, it gets a number followed by its last candidate.

    Args:
        *forms: lists of candidates, one candidate for each photo; the preferred list comes first.

    >>> output_names(["a", "a", "b"], ["a.jpg", "a.png", "b.png"])
    ['a.jpg', 'a.png', 'b']
    """
    names = [None] * len(forms[0])
    for form in forms:
        left = [index for index, name in enumerate(names) if name is None]
        count = collections.Counter([*filter(None, names), *(form[index] for index in left)])
        for index in left:
            if count[form[index]] == 1:
                names[index] = form[index]
    taken = set(names)
    for index, name in enumerate(forms[-1]):
        if names[index] is None:
            numbers = range(index + 1, len(taken) * len(names) + index + 2, len(names))
            names[index] = next(free for free in (f"{number}-{name}" for number in numbers) if free not in taken)
    return names


def _wrong(name):
    """Why a name is refused, or None."""
    parts = re.split(r"[/\\]", name)
    if ".." in parts or (len(parts) > 1 and not parts[0]):
        return "leaves its folder"
    if "" in parts or "." in parts:
        return "has an empty part, or '.'"
    if _CONTROL.search(name):
        return "has control characters"
    try:
        longest = max(len(name.encode()) for name in parts)
    except UnicodeEncodeError:
        return "is not Unicode"
    return f"has a part of more than {LONGEST} bytes" if longest > LONGEST else None
