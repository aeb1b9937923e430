"""Converters of data sets. `axial-convert NAME` calls the function NAME_items in the file NAME.py."""

import pathlib


def data_sets():
    """Names of all data sets. They are found in the text of the files, so that no converter is imported."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if f"\ndef {file.stem}_items(" in file.read_text("utf-8")]
