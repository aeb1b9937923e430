"""Models that axial ships, by name: a folder each, as axial-export --format=safetensors writes it."""

import os

from axial.errors import check_installed, nearest

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "shipped")


def shipped_names():
    """Names of the shipped models."""
    return sorted(entry.name for entry in os.scandir(FOLDER) if entry.is_dir())


def shipped_folder(what):
    """The folder of the shipped model of this name; any other name or path as it is.

    A folder of the user's that has a shipped model's name is './NAME'.
    """
    return os.path.join(FOLDER, what) if what in shipped_names() else what


def unknown(name, models):
    """The message on a name that no shipped model has, none of the registered `models`, and nothing on disk."""
    shipped = shipped_names()
    return (
        f"{name}: no model or file has this name{nearest(name, [*shipped, *models])}; axial ships {', '.join(shipped)}"
    )


def check_hub(path):
    """Raises InputError unless the client that reads an hf:// path is installed."""
    check_installed(f"{path}: needs", "hub", "huggingface_hub")
