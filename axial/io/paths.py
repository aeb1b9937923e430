"""Names from outside: those that records, specs, JSON files, lists and splits give. None of them leaves its folder.

Where the files of axial lie is known here too.
"""

import collections
import os
import re

from axial.errors import InputError

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LONGEST = 255  # bytes of a name in the file systems of Linux and macOS
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def experiments_dir():
    """The folder of recipes, in the installed package or in the checkout."""
    installed = os.path.join(PACKAGE, "experiments")
    return installed if os.path.isdir(installed) else os.path.join(os.path.dirname(PACKAGE), "experiments")


def inside(folder, name, what):
    """The path of what a name from outside names in a folder. Every such path is made here.

    A name may have folders of its own. They are parts between '/', and between '\\' too, as files travel to systems
    where that separates folders.

    Args:
        folder: path of the folder.
        name: of a file or folder in it.
        what: what gives the name, for the message.

    Raises:
        InputError: the name is absolute; it has an empty part, '.' or '..'; a part is too long for a file's name; it
            has control characters or is not Unicode.

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
    """Names without suffix for what is written of each photo, in the photos' order. No two are the same.

    A photo gets the first of its forms that no photo without a name shares, and that no photo has got. Failing that, it
    gets its last form behind a number.

    Args:
        *forms: lists with a name of each photo, the form that is wanted most first.

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
    """What is wrong with a name, or None."""
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
