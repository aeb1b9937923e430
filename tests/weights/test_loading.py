"""`axial.load` gives the same outputs from every kind of path. Weights that do not fit raise a one-line error."""

import json
import shutil
import struct
import sys

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

import axial
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.io.write import file_digest, write_json
from axial.models.registry import ModelConfig, build_model
from axial.weights import convert, restore, source
from axial.weights.interchange import make_card, read_safetensors, write_safetensors
from axial.weights.names import weight_names
from axial.weights.zoo import read_zoo
from tests.conftest import GOLDEN, randomize

SPEC = DatasetSpec("three", ("a", "b", "c"), (1, 2, 3), (True, False, False))
NANO = ModelConfig("axial_resnet_nano", arguments={"pixels": "torchvision"})
FILE = str(GOLDEN / "pt_checkpoint_tiny.pth")


@pytest.fixture(scope="module")
def model():
    """A tiny classifier with 3 classes and random weights."""
    model = NANO.build(3, (33, 33))
    randomize(model)
    return model


@pytest.fixture(scope="module")
def photos():
    return tf.constant(np.random.default_rng(1).uniform(-1, 1, [1, 33, 49, 3]), tf.float32)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """Path of the model's safetensors file."""
    path = tmp_path_factory.mktemp("safe") / "nano.safetensors"
    card = make_card(NANO, 3, (33, 33), spec=SPEC)
    write_safetensors(model, str(path), msgspec.structs.replace(card, scores={"top1": 0.25}, scored_split="val"))
    return path


def test_safetensors_there_and_back(model, photos, saved):
    """The file and its folder load as the same model. The card has class names, scores and preprocessing."""
    np.testing.assert_array_equal(axial.load(saved)(photos)["logits"], model(photos)["logits"])
    np.testing.assert_array_equal(
        axial.load(saved.parent, model="axial_resnet_nano")(photos)["logits"], model(photos)["logits"]
    )
    card, arrays = read_safetensors(str(saved))
    assert card.spec.class_names == ["a", "b", "c"] and card.scores == {"top1": 0.25}
    assert card.preprocessing["pixels"] == "torchvision" and card.preprocessing["photo"] == [33, 33]
    assert card.parameters == sum(w.numpy().size for w in model.trainable_weights)
    assert set(arrays) == set(weight_names(model))


def test_weights_of_the_converter(photos, tmp_path):
    """The converter's folder loads with the model arguments of its card.

    So does a checkpoint beside a model.json, as axial 0.2 converted weights.
    """
    conversion, model = convert.convert("csrhddlam", FILE, str(tmp_path / "out"))
    prefix = tf.train.Checkpoint(model=model).save(str(tmp_path / "old" / "ckpt"))
    write_json(str(tmp_path / "old" / "model.json"), conversion.card)
    for path in (tmp_path / "out", tmp_path / "old", prefix):
        np.testing.assert_array_equal(axial.load(path)(photos)["logits"], model(photos)["logits"])


def test_features(model, photos, saved):
    """`features_only` gives the backbone's feature maps. Their size is the image's size divided by `strides`."""
    np.testing.assert_array_equal(axial.load(saved, features_only=True)(photos)["res5"], model.backbone(photos)["res5"])
    features = restore.Features(build_model("axial_deeplab_nano", 5).backbone)
    maps = features(tf.zeros([1, 64, 96, 3]))
    assert features.strides == {"res2": 4, "res3": 8, "res4": 16, "res5": 16}
    assert {key: x.shape[1:3] for key, x in maps.items()} == {
        key: (64 // stride, 96 // stride) for key, stride in features.strides.items()
    }


def test_a_plain_checkpoint_takes_arguments_and_gives_its_averages(model, photos, tmp_path):
    """A checkpoint without a card loads with the given arguments. If it has moving averages, these are loaded."""
    prefix = tf.train.Checkpoint(model=model).write(str(tmp_path / "mine"))
    loaded = axial.load(prefix, model="axial_resnet_nano", num_classes=3, pixels="torchvision")
    np.testing.assert_array_equal(loaded(photos)["logits"], model(photos)["logits"])
    averages = [tf.Variable(w + 1) for w in model.trainable_variables]
    prefix = tf.train.Checkpoint(model=model, averages=averages).write(str(tmp_path / "averaged"))
    loaded = axial.load(prefix, model="axial_resnet_nano", num_classes=3)
    np.testing.assert_array_equal(loaded.trainable_variables[3], averages[3])


def test_weights_that_stay_random_are_not_scored(saved, tmp_path):
    """`read_weights` refuses a card that lists unfilled weights, like a converted file with only a backbone."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_card(saved.read_bytes(), lambda card: card.update(unfilled=["logits/conv/kernel"])))
    with pytest.raises(InputError, match="1 weights are random, as the source has none: logits/conv/kernel"):
        restore.read_weights(str(path))


# === Hugging Face's hub ===


@pytest.fixture
def hub(saved, hub_of):
    """The hub's repository has one safetensors file."""
    hub_of(saved.parent)


@pytest.mark.parametrize("path", ["hf://me/nano@first", "hf://me/nano/nano.safetensors"])
def test_from_the_hub(hub, model, photos, path):
    np.testing.assert_array_equal(axial.load(path)(photos)["logits"], model(photos)["logits"])


@pytest.fixture
def row(saved, monkeypatch):
    """A function that changes the zoo's row resnet_50.in1k. Before, its weights are `saved`, on the hub."""

    def change(**fields):
        rows[1] = msgspec.structs.replace(rows[1], **fields)

    rows = read_zoo()
    change(hub="me/nano@first", sha256=file_digest(str(saved))[1])
    monkeypatch.setattr(source, "read_zoo", lambda: rows)
    return change


BY_HAND = (
    "by hand: curl -LO https://storage.googleapis.com/.*.h5 && axial-convert weights --source=keras_applications "
    "--input=resnet50_.*.h5 --output=resnet_50.in1k --model=resnet_50$"
)


def test_a_name_of_the_zoo(hub, row, model, photos, saved, tmp_path, monkeypatch):
    """`axial.load` and INIT download and compare the hash. A local folder with the name is taken instead."""
    np.testing.assert_array_equal(axial.load("resnet_50.in1k")(photos)["logits"], model(photos)["logits"])
    other = NANO.build(3, (33, 33))
    restore.initialize(other, "resnet_50.in1k", NANO)
    np.testing.assert_array_equal(other(photos)["logits"], model(photos)["logits"])
    row(sha256="0" * 64)
    refused(f"SHA-256 [0-9a-f]{{64}}, and the zoo expects {'0' * 64}; {BY_HAND}", None, "resnet_50.in1k")
    shutil.copytree(saved.parent, tmp_path / "resnet_50.in1k")
    monkeypatch.chdir(tmp_path)
    assert source.resolve("resnet_50.in1k").path == "resnet_50.in1k"


def test_a_name_of_the_zoo_without_its_weights(hub, row, monkeypatch):
    """The one line has the commands that make the weights by hand. A wrong name suggests the nearest."""
    row(hub="you/nano@first")
    refused(f"you/nano@first: cannot be downloaded .404.*{BY_HAND}", None, "resnet_50.in1k")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(f"needs pip install .*{BY_HAND}", None, "resnet_50.in1k")
    row(hub="")
    refused(f"^resnet_50.in1k: these weights are not on the hub; {BY_HAND}", None, "resnet_50.in1k")
    refused("no model or file has this name .did you mean 'resnet_50.in1k'", None, "resnet_50.in1")
    with pytest.raises(InputError, match="resnet_50.in1: no such checkpoint .did you mean 'resnet_50.in1k'"):
        restore.find_weights("resnet_50.in1")


def refused(words, name, path, **options):
    """Asserts that `axial.load` raises InputError with a one-line message that matches `words`. Returns it."""
    with pytest.raises(InputError, match=words) as error:
        axial.load(str(path), model=name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_the_hub_refuses(hub):
    """An unknown repository and a path without an owner raise InputError."""
    refused("hf://you/nano: cannot be downloaded .404", "axial_resnet_nano", "hf://you/nano")
    refused("expected hf://OWNER/REPO", "axial_resnet_nano", "hf://nano")


# === Errors ===


def test_other_models_and_paths_are_refused(saved, tmp_path):
    """A wrong model, class count, argument, name or path, and a checkpoint of an unbuilt model raise InputError."""
    nano = "axial_resnet_nano"
    refused("holds 'axial_resnet_nano', not 'axial_resnet_s'", "axial_resnet_s", saved)
    refused("has 3 classes, not 7", nano, saved, num_classes=7)
    refused("no model is called 'axial_resnet_nan' .did you mean", "axial_resnet_nan", saved)
    refused("no model or file has this name", nano, tmp_path / "none")
    refused("this folder is none of a run", nano, tmp_path)
    refused("has no argument 'wide'", nano, saved, wide=1)
    refused("has shape", nano, saved, width=0.5)
    prefix = tf.train.Checkpoint(model=build_model(nano, 3)).write(str(tmp_path / "unbuilt"))
    refused("say which, as model='NAME'", None, prefix)
    refused("of another model, it has no weight", nano, prefix)


def with_card(data, change):
    """The bytes `data` of a safetensors file with a changed card. `change` modifies the card in place."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    card = json.loads(header["__metadata__"]["axial"])
    change(card)
    header["__metadata__"]["axial"] = json.dumps(card)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def flipped(data):
    """The bytes with one bit of a tensor flipped."""
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda d: d[:-100], "not a whole safetensors file"),
        (lambda d: struct.pack("<Q", 2**62) + d[8:], "not a whole safetensors file"),
        (flipped, "not those that its metadata"),
        (lambda _: safetensors.numpy.save({"w": np.zeros(3)}), "no 'axial'; a file of axial is expected"),
        (lambda d: with_card(d, lambda c: c.update(num_classes="3")), "num_classes: expected int, got str"),
        (lambda d: with_card(d, lambda c: c.update(arguments={"width": []})), "no model can be built"),
        (lambda d: with_card(d, lambda c: c.update(arguments={"width": 64})), "has many more weights"),
        (lambda d: with_card(d, lambda c: c.update(arguments={"script": "x"})), "no argument 'script'"),
    ],
)
def test_damaged_files_are_refused(saved, change, words, tmp_path):
    """A truncated or changed file, or a hostile card, raises InputError. The message starts with the path."""
    path = tmp_path / "bad.safetensors"
    path.write_bytes(change(saved.read_bytes()))
    message = refused(words, "axial_resnet_nano", path)
    assert message.startswith(str(path))
