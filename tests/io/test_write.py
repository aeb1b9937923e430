"""Output paths are checked before a command's work, and files appear only when they are complete."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys

import pytest
from PIL import Image

from axial.errors import InputError
from axial.io import gfile, write
from axial.io.lock import locked, locked_file
from axial.io.paths import LONGEST
from tests.conftest import ROOT


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.json"
    write.write_json(str(path), {"a": float("nan"), "b": [1, 2]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2]}

    def fail(temporary):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write.write_whole(str(path), fail)
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2]}


@pytest.mark.parametrize(
    "path,words",
    [
        ("", "a folder; expected a file"),
        ("folder", "a folder; expected a file"),
        ("file/below.png", "cannot be written"),
        ("a" * 300 + ".png", "cannot be written"),
        ("picture.gif", "its name must end in .png"),
    ],
)
def test_files_that_cannot_be_written_are_named(tmp_path, path, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    suffixes = (".png",) if path.endswith((".gif", ".png")) else ()
    with pytest.raises(InputError, match=f"^--json={tmp_path}.*: {words}"):
        write.try_file("json", f"{tmp_path}/{path}", suffixes)
    with pytest.raises(InputError, match="a file; expected a folder"):
        write.try_folder("report", str(tmp_path / "file"))
    with pytest.raises(InputError, match="cannot be written"):
        write.try_folder("report", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match="cannot be written"):
        write.try_file("json", "/proc/a.json")  # a folder that takes no files
    with pytest.raises(InputError, match="exists; it is never overwritten"):
        write.try_new_folder("output_dir", str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]


def test_what_can_be_written_is_left_alone(tmp_path):
    (tmp_path / "there.json").write_text("kept")
    write.try_file("json", str(tmp_path / "there.json"))
    write.try_file("json", str(tmp_path / "new.json"))
    write.try_folder("report", str(tmp_path / "report"))
    assert (tmp_path / "there.json").read_text() == "kept"
    write.try_file("json", str(tmp_path / "missing" / ".." / "x.json"))
    assert os.listdir(tmp_path) == ["there.json"]  # a folder is made together with its first file


def test_what_fails_leaves_no_empty_folder(tmp_path):
    def fail(folder):
        assert os.path.isdir(folder)
        raise InputError("no")

    with pytest.raises(InputError, match="no"), locked(str(tmp_path / "a" / "b"), "model_dir"):
        fail(tmp_path / "a" / "b")
    with pytest.raises(InputError, match="no"), write.new_folder(str(tmp_path / "c" / "d" / "e"), "last") as folder:
        fail(folder)
    assert os.listdir(tmp_path) == []


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    """Two processes write a file at once. Every read gives complete contents, and no writer fails."""
    path, script = tmp_path / "file", "import sys; from axial.io.write import try_file, write_text\n"
    script += "for _ in range(100): try_file('json', sys.argv[1]); write_text(sys.argv[1], 9999 * sys.argv[2])"
    path.write_text("c")
    writers = [subprocess.Popen([sys.executable, "-c", script, str(path), text], cwd=ROOT) for text in "ab"]
    while None in [writer.poll() for writer in writers]:
        assert path.read_text() in ("c", 9999 * "a", 9999 * "b")
    assert [writer.returncode for writer in writers] == [0, 0] and os.listdir(tmp_path) == ["file"]
    write.write_whole(str(path), lambda temporary: (write.write_text(str(path), "inner"), os.truncate(temporary, 0)))
    assert path.read_text() == "" and os.listdir(tmp_path) == ["file"]


def test_a_new_folder_of_a_bucket_gets_its_last_file_last(monkeypatch):
    made = []
    upload = write._upload
    monkeypatch.setattr(write, "_upload", lambda local, path: made.append(path) or upload(local, path))
    with write.new_folder("ram://new_folder/export/", "b") as folder:
        for name in ("a", "b", "c/d"):
            write.write_text(os.path.join(folder, name), name)
    assert made == [f"ram://new_folder/export/{name}" for name in ("a", "c/d", "b")]
    for path in made:
        assert gfile.open_binary(path, "rb").read().decode() == path.removeprefix("ram://new_folder/export/")
    with pytest.raises(InputError, match="export: exists; it is never"), write.new_folder(made[0][:-2], "b"):
        pass


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path):
    (tmp_path / ".partial.export" / "variables").mkdir(parents=True)
    (tmp_path / ".partial.file.json").write_text("half")
    write.try_new_folder("output_dir", f"{tmp_path}/export/")
    assert os.listdir(tmp_path) == [".partial.file.json"]
    write.write_json(f"{tmp_path}/file.json", 1)
    (tmp_path / ".partial.export" / "variables").mkdir(parents=True)
    with write.new_folder(f"{tmp_path}/export", "last") as folder:
        write.write_text(f"{folder}/last", "x")
    assert sorted(os.listdir(tmp_path)) == ["export", "file.json"] and os.listdir(tmp_path / "export") == ["last"]


HOLD = """
import sys
from axial.io.lock import locked
with locked(sys.argv[1], "model_dir"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_writer_a_folder(tmp_path):
    """The error names the process that holds the lock. The lock of a killed process stops no other process."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "held\n"
    named = rf"--model_dir={tmp_path}: process {process.pid} on .* is writing there"
    with pytest.raises(InputError, match=named), locked(str(tmp_path), "model_dir"):
        pass
    process.kill()
    process.communicate()
    assert os.listdir(tmp_path) == [".lock"]
    with locked(str(tmp_path), "model_dir"):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert os.listdir(tmp_path) == []


# === Links in a stranger's folder ===


@pytest.fixture
def victim(tmp_path):
    """A folder with the user's file `victim` and folder `home`. At the end, it asserts that both are unchanged."""
    file, folder = tmp_path / "victim", tmp_path / "home"
    file.write_text("mine")
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("mine")
    yield tmp_path
    assert file.read_text() == "mine" and os.stat(file).st_nlink == 1 and not (tmp_path / "nothing").exists()
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == ["below", "below/file"]
    assert (folder / "below" / "file").read_text() == "mine"


def link(path, kind):
    """Makes a file that a stranger may have left at a path: a pipe, a hard link to `victim`, or a link to `kind`."""
    root = next(folder for folder in path.parents if (folder / "victim").exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "second name":
        os.link(root / "victim", path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(root / kind)


LINKS = ("victim", "nothing", "home", "second name", "pipe")


@pytest.mark.parametrize("kind", LINKS)
def test_no_file_is_written_through_a_link(victim, kind):
    out = victim / "out"
    for name in ("scores.json", "page.html", "picture.png", "try.json"):
        link(out / f".partial.{name}", kind)
    link(out / ".partial.try", kind)
    link(out / ".lock", kind)
    if kind != "home":  # a link to a folder is refused, not replaced
        link(out / "page.html", kind)
    write.write_json(f"{out}/scores.json", {"a": 1})
    write.write_text(f"{out}/page.html", "new")
    write.write_image(f"{out}/picture.png", Image.new("RGB", (2, 2)), format="PNG")
    write.try_file("json", f"{out}/try.json")
    write.try_folder("report", f"{out}")
    with locked(f"{out}", "model_dir"):
        assert (out / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        assert stat.S_ISREG(os.lstat(out / ".lock").st_mode)
        with open(out / ".lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sorted(os.listdir(out)) == ["page.html", "picture.png", "scores.json"]
    assert (out / "page.html").read_text() == "new" and not (out / "page.html").is_symlink()


def test_a_new_folder_takes_the_place_of_a_link(victim):
    for kind in ("home", "victim", "nothing"):
        out = victim / f"of {kind}"
        link(victim / f".partial.of {kind}", kind)
        with write.new_folder(str(out), "last") as folder:
            write.write_text(f"{folder}/last", "x")
        assert not out.is_symlink() and os.listdir(out) == ["last"]
        link(victim / f"link to {kind}", kind)
        for call in (write.try_new_folder, lambda _, path: write.new_folder(path, "last").__enter__()):
            with pytest.raises(InputError, match="exists; it is never overwritten"):
                call("output_dir", f"{victim}/link to {kind}")


def test_folders_are_removed_without_what_links_lead_to(victim):
    left = victim / "run" / "ckpt-1_temp"
    link(left / "below", "home")
    link(left / "file", "victim")
    write.remove_folder(str(left))
    link(left, "home")
    write.remove_folder(str(left))
    assert not os.listdir(victim / "run")


def test_a_folder_below_the_users_may_not_lead_out(victim):
    """The user's folder may be a link, and may contain links to paths inside it, but no links that lead out of it."""
    (victim / "own" / "large").mkdir(parents=True)
    (victim / "run").symlink_to("own")
    (victim / "own" / "best").symlink_to("large")
    for name, kind in (("out", "home"), ("nowhere", "nothing"), ("large/out", "home")):
        link(victim / "own" / name, kind)
    run = f"{victim}/run"
    assert write.output_folder(run, "best", "--model_dir") == f"{run}/best"
    assert write.output_folder(run, "new/er", "--model_dir") == f"{run}/new/er"
    assert write.output_file(run, "best/x.json", "--model_dir") == f"{run}/best/x.json"
    write.write_json(write.output_file(run, "best/x.json", "--model_dir"), 1)
    assert (victim / "own" / "large" / "x.json").exists()
    for name in ("out", "out/below", "out/new", "nowhere", "nowhere/new", "best/out", "large/out/below"):
        for call in (write.output_folder, lambda folder, name, what: write.output_file(folder, f"{name}/x.json", what)):
            with pytest.raises(InputError, match=f"^{run}/{name}: a link that leads out of {run}"):
                call(run, name, "--model_dir")
    with pytest.raises(InputError, match="leaves its folder"):
        write.output_folder(run, "../home", "--split")
    assert write.output_folder("gs://b/run", "best", "--model_dir") == "gs://b/run/best"


def test_folders_for_other_libraries_may_have_no_links(victim):
    (victim / "work" / "journal").mkdir(parents=True)
    write.refuse_links(f"{victim}/work")
    link(victim / "work" / "journal" / "journal_0", "victim")
    with pytest.raises(InputError, match="journal/journal_0: a link, where"):
        write.refuse_links(f"{victim}/work")


def test_pipes_and_links_that_lead_back_are_named(tmp_path):
    (tmp_path / "export" / "variables").mkdir(parents=True)
    write.write_text(f"{tmp_path}/export/variables/a", "x")
    (tmp_path / "elsewhere").mkdir()
    write.write_text(f"{tmp_path}/elsewhere/b", "x")
    (tmp_path / "export" / "linked").symlink_to("../elsewhere")
    assert list(write.folder_digests(f"{tmp_path}/export")) == ["linked/b", "variables/a"]
    os.mkfifo(tmp_path / "elsewhere" / "pipe")
    with pytest.raises(InputError, match="linked/pipe: a pipe, device or socket"):
        write.folder_digests(f"{tmp_path}/export")
    os.unlink(tmp_path / "elsewhere" / "pipe")
    (tmp_path / "elsewhere" / "back").symlink_to("..")
    with pytest.raises(InputError, match="a link to a folder that was reached before"):
        write.folder_digests(f"{tmp_path}/export")


def test_a_file_may_have_the_longest_name(tmp_path):
    path = f"{tmp_path}/{'x' * (LONGEST - 4)}.png"
    with locked(str(tmp_path), "model_dir"), locked_file(path):
        assert len(os.listdir(tmp_path)) == 2
    write.try_file("json", path)
    write.write_text(path, "x")
    assert os.listdir(tmp_path) == [os.path.basename(path)]
    assert write.partial_path("a/b.json") == "a/.partial.b.json"


def test_a_lock_is_taken_again_if_its_folder_vanishes(tmp_path, monkeypatch):
    """Another process may remove the empty folder between the moment it is made and the moment the lock is opened."""
    errors, open_file = [FileNotFoundError()], os.open

    def vanishing(*arguments):
        if errors:
            raise errors.pop()
        return open_file(*arguments)

    monkeypatch.setattr(os, "open", vanishing)
    with locked(str(tmp_path), "model_dir"):
        assert not errors


# === Power cuts ===


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A list of system calls, ('fsync', path) and ('rename', old, new). Paths are relative to the test's folder."""
    asked, fsync = [], os.fsync

    def relative(path):
        return os.path.relpath(path, tmp_path)

    def synced(handle):
        asked.append(("fsync", relative(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def noting(rename):
        def renamed(old, new):
            asked.append(("rename", relative(old), relative(new)))
            rename(old, new)

        return renamed

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    return asked


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, calls):
    write.write_text(f"{tmp_path}/new/er/file", "x")
    assert calls == [
        *[("fsync", "new"), ("fsync", ".")],  # stores the names of the new folders
        *[("fsync", "new/er/.partial.file"), ("rename", "new/er/.partial.file", "new/er/file"), ("fsync", "new/er")],
    ]
    calls.clear()
    write.write_text(f"{tmp_path}/new/er/file", "y")
    assert len(calls) == 3 and (tmp_path / "new" / "er" / "file").read_text() == "y"


def test_a_new_folder_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    with write.new_folder(f"{tmp_path}/export", "spec") as folder:
        os.mkdir(f"{folder}/variables")
        for name in ("spec", "variables/data"):
            with open(f"{folder}/{name}", "w") as file:
                file.write("x")
        calls.clear()
    renamed = calls.index(("rename", ".partial.export", "export"))
    names = (".", "./variables", "./spec", "./variables/data")
    assert {os.path.normpath(path) for _, path in calls[:renamed]} == {
        os.path.normpath(f".partial.export/{name}") for name in names
    }
    assert calls[renamed + 1 :] == [("fsync", ".")]


def test_what_cannot_be_synced_keeps_the_old_file(tmp_path, monkeypatch):
    """If fsync fails, the old file stays. On a file system without fsync, the new file replaces it."""
    path = f"{tmp_path}/file"
    write.write_text(path, "old")

    def failing(number):
        def fsync(_):
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        write.write_text(path, "new")
    assert (tmp_path / "file").read_text() == "old"
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    write.write_text(path, "new")
    assert (tmp_path / "file").read_text() == "new"
