"""Models that axial ships, by name: a folder each, as axial-export --format=safetensors writes it."""

import os

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "shipped")


def shipped_names():
    """Names of the shipped models."""
    return sorted(entry.name for entry in os.scandir(FOLDER) if entry.is_dir())


def shipped_folder(what):
    """The folder of the shipped model of this name; any other name or path as it is.

    A folder of the user's that has a shipped model's name is './NAME'.
    """
    return os.path.join(FOLDER, what) if what in shipped_names() else what
