"""Converted ResNets of tf_keras.applications compute the same features and logits as the originals."""

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tf_keras.src.applications import resnet

from axial.errors import InputError
from axial.weights import convert
from axial.weights.restore import load_weights
from tests.conftest import relative_error


@pytest.fixture(scope="module")
def theirs():
    """A ResNet of tf_keras.applications with fewer channels and random weights."""

    def stages(x):
        for index, (filters, blocks) in enumerate(((32, 1), (64, 2), (128, 1), (256, 1))):
            x = resnet.stack1(x, filters, blocks, stride1=1 if index == 0 else 2, name=f"conv{index + 2}")
        return x

    options = dict(weights=None, input_shape=(96, 64, 3), classes=7, classifier_activation=None)
    model = resnet.ResNet(stages, False, True, **options)
    for weight in model.weights:
        shape, rng = weight.shape, np.random.default_rng(len(weight.name))
        if weight.name.endswith("kernel:0"):
            weight.assign(rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape))
        elif weight.name.endswith(("gamma:0", "variance:0")):
            weight.assign(rng.uniform(0.5, 1, shape))
        else:
            weight.assign(rng.normal(0, 0.1, shape))
    return model


@pytest.fixture
def file(theirs, tmp_path):
    """Path of an .h5 file with the weights of `theirs`."""
    path = tmp_path / "weights.h5"
    theirs.save_weights(path)
    return path


def test_features_and_logits_are_theirs(theirs, file, tmp_path):
    """For two photos of 96x64 pixels, 'res2' to 'res5' and logits agree up to 1e-4. The .h5 file is remote."""
    remote = "ram://test_keras_applications/weights.h5"
    tf.io.gfile.copy(str(file), remote)
    convert.convert("keras_applications", remote, str(tmp_path / "out"))
    ours, card = load_weights(str(tmp_path / "out"))
    assert card.model == "resnet_50" and card.num_classes == 7
    assert card.arguments == {"width": 0.5, "repeats": [1, 2, 1, 1], "stride_first": True, "pixels": "caffe"}
    photo = np.random.default_rng(0).integers(0, 256, [2, 96, 64, 3]).astype(np.float32)
    images = tf.constant(photo / 127.5 - 1)
    outputs = [theirs.get_layer(f"conv{s}_block{b}_out").output for s, b in ((2, 1), (3, 2), (4, 1), (5, 1))]
    expected = keras.Model(theirs.input, [*outputs, theirs.output])(resnet.preprocess_input(photo.copy()))
    features = ours.backbone(images)
    for name, value in zip(("res2", "res3", "res4", "res5"), expected):
        assert relative_error(features[name], value) < 1e-4, name
    assert relative_error(ours(images)["logits"], expected[-1]) < 1e-4


def test_without_the_top_the_last_layer_is_random(file, tmp_path):
    """If the file has no classifier, the card lists the last layer's weights as unfilled."""
    changed("predictions")(file)
    conversion, _ = convert.convert("keras_applications", str(file), str(tmp_path / "out"))
    assert conversion.card.unfilled == ["logits/conv/kernel", "logits/conv/bias"]


def changed(name, shape=None, **options):
    """Returns a function of a path. It replaces a data set of the file by zeros of `shape`, or removes it."""

    def damage(path):
        with h5py.File(path, "a") as file:
            if name in file:
                del file[name]
            if shape:
                file.create_dataset(name, shape, "f4", data=None if options else np.zeros(shape), **options)

    return damage


KERNEL = "conv3_block2_1_conv/conv3_block2_1_conv/kernel:0"


@pytest.mark.parametrize(
    "damage,words",
    [
        (changed("conv1_conv/a/b", (4,), external=[("/etc/passwd", 0, 16)]), "compressed or in another file"),
        (changed("head/head/kernel:0", (2,)), "no weight is called 'head/kernel'"),
        (changed("conv3_block2_3_bn"), "does not fit its bias|no value for"),
        (
            changed("predictions/predictions/kernel:0", (1024, 0)),
            "'logits/conv/kernel' has shape .*, expected 4 axes of",
        ),
        (changed(KERNEL, (1, 1, 2, 2)), "'backbone/stage3_block2/reduce/conv/kernel' has shape"),
        (lambda p: p.write_bytes(p.read_bytes()[:5000]), "not a whole .h5 file"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(damage, words, file, tmp_path):
    """An external, unknown, missing or misshapen data set, or a truncated file, raises InputError of one line."""
    damage(file)
    with pytest.raises(InputError, match=words) as error:
        convert.convert("keras_applications", str(file), str(tmp_path / "out"))
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("*out*"))
