"""Weights of csrhddlam/axial-deeplab. Conversion keeps features and logits. Converting back keeps the tensors."""

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.models.axial_deeplab.public_weights import CSRHDDLAM
from axial.weights import convert
from axial.weights.interchange import read_safetensors
from axial.weights.pytorch import read_state_dict, state_dict_bytes
from axial.weights.restore import load_weights
from tests.conftest import GOLDEN

FILE = str(GOLDEN / "pt_checkpoint_tiny.pth")  # by csrhddlam's train.py: 1, 2, 1, 1 blocks, width 0.125
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of the converted golden file."""
    path = tmp_path_factory.mktemp("weights") / "converted"
    convert.convert("csrhddlam", FILE, str(path))
    return path


@pytest.fixture(scope="module")
def restored(folder):
    """The converted model, built and restored from its file."""
    return load_weights(folder)[0]


def test_features_and_logits_are_theirs(restored):
    """For golden photos of 224x224 pixels, 'res2' to 'res5' and logits equal the source's up to 1e-4."""
    with np.load(GOLDEN / "pt_checkpoint_tiny.npz") as expected:
        images = tf.constant(expected["photos"] / np.float32(127.5) - 1)
        features = restored.backbone(images)
        for name, step in (("res2", 8), ("res3", 4), ("res4", 2), ("res5", 1)):
            np.testing.assert_allclose(features[name][:, ::step, ::step], expected[name], atol=TOLERANCE)
        np.testing.assert_allclose(restored(images)["logits"], expected["logits"], atol=TOLERANCE)


def test_the_card_says_what_was_done(folder):
    """The card has the source, arguments, size of photos, hash of the file, unused tensors and parameter count."""
    card, _ = read_safetensors(str(folder / "weights.safetensors"))
    assert card.source == "csrhddlam"
    assert card.arguments["pixels"] == "torchvision" and card.preprocessing["photo"] == 224
    assert list(card.input) == ["pt_checkpoint_tiny.pth"] and len(card.input["pt_checkpoint_tiny.pth"]) == 64
    assert set(card.unused.values()) == set(CSRHDDLAM.unused.values())
    arrays = read_state_dict(FILE)
    theirs = sum(a.size for n, a in arrays.items() if n not in card.unused and "running" not in n)
    assert card.parameters == theirs
    assert "BatchNormConfig.epsilon = 1e-05" in (folder / "model.gin").read_text()


def test_a_larger_photo_is_warned_of(restored):
    """A photo of 257x225 pixels is larger than the 224 pixels that the position tables cover."""
    with pytest.warns(UserWarning, match="position tables for 224"):
        restored(tf.zeros([1, 257, 225, 3]))


def test_converting_back_to_pytorch_keeps_the_tensors(folder, tmp_path):
    """All tensors keep name, shape and dtype. Only batch counts and offsets of logits' batch norms change values."""
    path = tmp_path / "back.pth"
    count = convert.write_csrhddlam(str(folder), str(path))
    theirs, back = read_state_dict(FILE), read_state_dict(str(path))
    assert count == len(theirs) and set(back) == set(theirs)
    for name, array in theirs.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        if not name.endswith(("num_batches_tracked", "bn_similarity.bias")):
            np.testing.assert_array_equal(back[name], array, err_msg=name)


def changed(change, path):
    """Writes a changed golden file and returns its path. `change` modifies the dict of arrays in place."""
    arrays = dict(read_state_dict(FILE))
    change(arrays)
    path.write_bytes(state_dict_bytes({n: np.array(a) for n, a in arrays.items()}))
    return str(path)


def cut(name, where):
    """A function for `changed` that replaces an array by array[where]."""
    return lambda arrays: arrays.update({name: arrays[name][where]})


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda a: a.update(extra=np.ones([2], np.float32)), "no tensor of this network is called 'extra'"),
        (lambda a: a.pop("layer2.1.bn2.weight"), "no tensor 'layer2.1.bn2.weight', and lacks 1 of"),
        (cut("layer3.0.hight_block.relative", np.s_[:, 1:]), "'layer3.0.hight_block.relative' has shape"),
        (cut("fc.weight", np.s_[:0]), "'fc.weight' has shape .*, expected 2 axes of length 1 or more"),
        (lambda a: a.update({"bn1.weight": a["bn1.weight"].astype(np.int64)}), "holds int64"),
        (lambda a: [a.pop(n) for n in list(a) if n.startswith("layer4")], "3 stages"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(change, words, tmp_path):
    """An unknown or missing tensor, or a wrong shape or dtype, raises InputError of one line. No output is written."""
    path, output = changed(change, tmp_path / "a.pth"), tmp_path / "out"
    with pytest.raises(InputError, match=words) as error:
        convert.convert("csrhddlam", path, str(output))
    assert str(error.value).startswith(path) and "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pth"]


def test_the_command(succeed, refuse, folder, tmp_path):
    """`axial-convert weights` converts in both directions. Invalid input gives exit code 2 and one line."""
    out = tmp_path / "weights"
    result = succeed("convert", "weights", "--source=csrhddlam", f"--input={FILE}", f"--output={out}")
    assert "267 weights of 267 filled" in result.out and "softmax ignores" in result.out
    assert {"weights.safetensors", "model.gin", "README.md"} == {path.name for path in out.iterdir()}
    result = succeed("convert", "weights", "--target=csrhddlam", f"--input={out}", f"--output={tmp_path / 'a.pth'}")
    assert "tensors for csrhddlam" in result.out
    bad = tmp_path / "bad.pth"
    bad.write_bytes(b"PK\x03\x04 not an archive")
    for flags, words in (
        (["--source=csrhddlam", f"--input={bad}", f"--output={tmp_path / 'b'}"], "not a whole file"),
        (["--source=csrhddlam", "--model=axial_deeplab_l", f"--input={FILE}", f"--output={tmp_path / 'b'}"], "classif"),
        (["--target=csrhddlam", f"--input={FILE}", f"--output={tmp_path / 'b.pth'}"], "this file is none of"),
    ):
        refuse(words, "convert", "weights", *flags)
    assert not (tmp_path / "b").exists() and not (tmp_path / "b.pth").exists()
