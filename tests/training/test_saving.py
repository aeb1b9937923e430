"""Saving of a run's checkpoints: failing saves, links, and TensorFlow's list of checkpoints."""

import os

import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.io import write
from axial.training.saving import Saver
from axial.weights.checkpoint import remove_unfinished
from axial.weights.restore import find_checkpoint, latest_checkpoint


def saver(folder):
    """Returns a `Saver` for one variable. It keeps two checkpoints."""
    return Saver(tf.train.Checkpoint(x=tf.Variable(1.0)), str(folder), 2, tf.distribute.get_strategy())


def test_a_save_is_tried_again(tmp_path, monkeypatch, capfd):
    """After three errors of a file system, the saver has waited 1, 2 and 4 seconds and printed three lines."""
    waits = []
    failures = [
        tf.errors.ResourceExhaustedError(None, None, "No space left on device"),
        tf.errors.PermissionDeniedError(None, None, "credentials were revoked"),
        tf.errors.UnavailableError(None, None, "503 Service Unavailable"),
    ]
    monkeypatch.setattr(write.time, "sleep", waits.append)
    save = tf.train.CheckpointManager.save

    def failing(manager, **kwargs):
        if failures:
            raise failures.pop()
        return save(manager, **kwargs)

    monkeypatch.setattr(tf.train.CheckpointManager, "save", failing)
    saver(tmp_path).save(7)
    assert waits == [1, 2, 4] and tf.train.latest_checkpoint(tmp_path).endswith("ckpt-7")
    assert capfd.readouterr().err.count(f"{tmp_path}/ckpt-7: cannot be written (") == 3


def test_a_checkpoint_is_on_the_disk_before_the_list_names_it(tmp_path, monkeypatch):
    """Each save syncs its files and the folder, then the list and the folder. The list keeps two checkpoints."""
    checkpoints, syncs, fsync = saver(tmp_path), [], os.fsync

    def synced(handle):
        state = tf.train.get_checkpoint_state(str(tmp_path))
        listed = [os.path.basename(path) for path in (state.all_model_checkpoint_paths if state else ())]
        syncs.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), listed))
        fsync(handle)

    for step in (1, 2, 3):
        before = [f"ckpt-{old}" for old in range(1, step)]
        monkeypatch.setattr(os, "fsync", synced)
        checkpoints.save(step)
        monkeypatch.setattr(os, "fsync", fsync)
        after = [*before, f"ckpt-{step}"][-2:]
        files = [f"ckpt-{step}.data-00000-of-00001", f"ckpt-{step}.index"]
        assert sorted(syncs[:2]) == [(name, before) for name in files] and syncs[2] == (tmp_path.name, before)
        assert syncs[3:] == [("checkpoint", after), (tmp_path.name, after)]
        syncs.clear()


def test_no_checkpoint_is_written_through_a_link(tmp_path):
    """The files of a checkpoint are links out of the run. A save replaces the links, and their targets stay."""
    victim, home, run = tmp_path / "victim", tmp_path / "home", tmp_path / "run"
    victim.write_text("mine")
    for folder in (home, run):
        folder.mkdir()
    (home / "ckpt-7.index").write_text("mine")
    for name, target in {
        "ckpt-7.index": victim,
        "ckpt-7.data-00000-of-00001": tmp_path / "nothing",
        "ckpt-7_temp": home,
        "checkpoint": tmp_path / "nothing",
    }.items():
        (run / name).symlink_to(target)
    saver(run).save(7)
    assert victim.read_text() == "mine" and os.listdir(home) == ["ckpt-7.index"]
    assert (home / "ckpt-7.index").read_text() == "mine" and not (tmp_path / "nothing").exists()
    assert not [path for path in run.iterdir() if path.is_symlink()]
    assert tf.train.load_checkpoint(str(run / "ckpt-7")).get_tensor("x/.ATTRIBUTES/VARIABLE_VALUE") == 1


def test_what_a_killed_save_left_is_removed_without_what_it_leads_to(tmp_path):
    """The temporary folders of a killed save are removed, but not the targets of links in these folders."""
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    (home / "file").write_text("mine")
    (run / "ckpt-3_temp").mkdir(parents=True)
    (run / "ckpt-3_temp" / "below").symlink_to(home)
    (run / "ckpt-4_temp").symlink_to(home)
    remove_unfinished(str(run))
    assert not os.listdir(run) and (home / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["{root}/mine", "below/../../mine", "out/mine", "*/mine"])
def test_a_list_of_checkpoints_names_its_own_folder_alone(tmp_path, name):
    """The list names a checkpoint outside the run. TensorFlow would remove it as the oldest one. The saver does not."""
    run, mine = tmp_path / "run", [tmp_path / "mine.index", tmp_path / "mine.data-00000-of-00001"]
    (run / "below").mkdir(parents=True)
    (run / "out").symlink_to(tmp_path)
    for path in mine:
        path.write_text("mine")
    name = name.format(root=tmp_path)
    (run / "checkpoint").write_text(
        f'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "{name}"\nmodel_checkpoint_path: "{name}"\n'
        "all_model_checkpoint_timestamps: 1.0\nlast_preserved_timestamp: 0.5\n"
    )
    assert latest_checkpoint(str(run)) is None
    with pytest.raises(InputError, match="no checkpoint here"):
        find_checkpoint(str(run))
    saves = saver(run)
    for step in range(1, 6):
        saves.save(step)
    assert latest_checkpoint(str(run)) == f"{run}/ckpt-5"
    assert all(path.read_text() == "mine" for path in mine)
