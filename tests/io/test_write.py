"""The door out: paths are tried before the work, and files are there whole or not at all."""

import json
import multiprocessing
import os

import pytest

from axial.errors import InputError
from axial.io.lock import locked
from axial.io.write import try_file, try_folder, try_new_folder, write_block, write_json, write_whole


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.json"
    write_json(str(path), {"a": float("nan"), "b": [1, 2]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2]}

    def fail(temporary):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_whole(str(path), fail)
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2]}


def test_a_block_replaces_itself_alone(tmp_path):
    path = tmp_path / "page.md"
    write_block(str(path), "tables", "one")
    assert path.read_text() == "<!-- tables:begin -->\none\n<!-- tables:end -->\n"
    path.write_text(f"before\n{path.read_text()}after\n")
    write_block(str(path), "tables", "two")
    assert path.read_text() == "before\n<!-- tables:begin -->\ntwo\n<!-- tables:end -->\nafter\n"
    with pytest.raises(InputError, match="holds no lines <!-- zoo:begin -->"):
        write_block(str(path), "zoo", "three")
    assert "two" in path.read_text()


@pytest.mark.parametrize(
    "path,words",
    [
        ("", "names a folder"),
        ("folder", "a folder, a file is expected"),
        ("file/below.png", "cannot be written"),
        ("a" * 300 + ".png", "cannot be written"),
        ("picture.gif", "its name must end in .png"),
    ],
)
def test_files_that_cannot_be_written_are_named(tmp_path, path, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    suffixes = (".png",) if path.endswith((".gif", ".png")) else ()
    with pytest.raises(InputError, match=f"^--json={tmp_path}.*: {words}"):
        try_file("json", f"{tmp_path}/{path}", suffixes)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_what_can_be_written_is_left_alone(tmp_path):
    (tmp_path / "there.json").write_text("kept")
    try_file("json", str(tmp_path / "there.json"))
    try_file("json", str(tmp_path / "new.json"))
    try_folder("report", str(tmp_path / "report"))
    assert (tmp_path / "there.json").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["report", "there.json"] and not os.listdir(tmp_path / "report")


def test_folders_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="a file, a folder is expected"):
        try_folder("report", str(tmp_path / "file"))
    with pytest.raises(InputError, match="cannot be written"):
        try_folder("report", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match="exists; it is never overwritten"):
        try_new_folder("output_dir", str(tmp_path))


def hold(folder, ready, leave):
    with locked(folder, "model_dir"):
        ready.set()
        leave.wait()


def test_one_writer_a_folder(tmp_path):
    """A live holder is named; a dead one leaves nothing that stops the next."""
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), ready, leave), daemon=True)
    process.start()
    assert ready.wait(60)
    named = rf"--model_dir={tmp_path}: process {process.pid} on .* is writing there"
    with pytest.raises(InputError, match=named), locked(str(tmp_path), "model_dir"):
        pass
    process.kill()
    process.join()
    assert os.listdir(tmp_path) == [".lock"]
    with locked(str(tmp_path), "model_dir"):
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()
    assert os.listdir(tmp_path) == []
