"""A fake huggingface_hub, which needs no network."""

import fnmatch
import itertools
import shutil
import sys
import types

import pytest


@pytest.fixture
def hub_of(tmp_path, monkeypatch):
    """A function of a folder. It makes the folder the fake hub's only repository, me/nano."""

    def serve(repository):
        """Installs a fake module `huggingface_hub`, which downloads from the folder `repository`."""
        numbers = itertools.count()

        def snapshot_download(repo_id, allow_patterns):
            """Copies the matching files to a new folder and returns it. '*' also matches '/', as in huggingface_hub."""
            if repo_id != "me/nano":
                raise RuntimeError("404 Client Error.\n\nRepository Not Found")
            snapshot = tmp_path / f"snapshot_{next(numbers)}"
            snapshot.mkdir()
            for path in filter(lambda path: path.is_file(), repository.rglob("*")):
                name = path.relative_to(repository).as_posix()
                if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                    (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, snapshot / name)
            return str(snapshot)

        client = types.SimpleNamespace(snapshot_download=snapshot_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", client)

    return serve
