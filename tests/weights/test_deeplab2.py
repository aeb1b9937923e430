"""Converted checkpoints of google-research/deeplab2 give the features and head outputs that its code computes."""

import os

import numpy as np
import pytest
import tensorflow as tf

from axial.errors import InputError
from axial.weights import convert
from axial.weights.checkpoint import read_checkpoint
from axial.weights.restore import load_weights
from tests.conftest import GOLDEN, ROOT, relative_error
from tests.weights.test_checkpoint import write_checkpoint

FOLDERS = [GOLDEN / "d2_checkpoint", ROOT.parent / "shared" / "golden" / "d2_checkpoint"]
CHECKPOINTS = next((folder for folder in FOLDERS if folder.is_dir()), None)
NAMES = {"max_deeplab_s_backbone_os16": "max_s_backbone", "axial_swidernet_1_1_1_os16": "axial_swidernet_1_1_1"}
TOLERANCE = 1e-4
pytestmark = pytest.mark.skipif(CHECKPOINTS is None, reason=f"no checkpoints of DeepLab2 in {FOLDERS}")


@pytest.fixture(scope="module", params=NAMES)
def converted(request, tmp_path_factory):
    """Converts each checkpoint. Returns (restored model, dict of golden arrays, card)."""
    folder = tmp_path_factory.mktemp("weights") / "converted"
    convert.convert("deeplab2", str(CHECKPOINTS / f"{request.param}.tar.gz"), str(folder))
    model, card = load_weights(folder)
    assert card.model == NAMES[request.param]
    with np.load(CHECKPOINTS / f"{request.param}.npz") as file:
        return model, {name: file[name] for name in file.files}, card


def test_every_stage_computes_the_same(converted):
    """Each stage gets DeepLab2's input, because consecutive random stages magnify rounding errors."""
    model, golden, _ = converted
    images = tf.constant(golden["image"].astype(np.float32) / 127.5 - 1)
    x = model.backbone.stem(images)
    assert relative_error(x, golden["feature/res1"]) < TOLERANCE
    for index, stage in enumerate(model.backbone.stages):
        x = tf.constant(golden[f"feature/res{index + 1}"])
        for block in stage:
            x = block(x)
        assert relative_error(x, golden[f"feature/res{index + 2}"]) < TOLERANCE, index


def test_the_whole_model_computes_the_same(converted):
    """For a photo of 97x129 pixels, all features and head outputs equal DeepLab2's.

    SWideRNet has a larger tolerance, because a change of its input by 1e-7 changes 'res5' by 7e-4 of its largest value.
    """
    model, golden, card = converted
    tolerance = TOLERANCE if card.model == "max_s_backbone" else 1e-3
    images = tf.constant(golden["image"].astype(np.float32) / 127.5 - 1)
    for name, actual in model.backbone(images).items():
        assert relative_error(actual, golden[f"feature/{name}"]) < tolerance, name
    for name, actual in model(images).items():
        assert relative_error(actual, golden[f"head/{name}"]) < tolerance, name


@pytest.fixture(scope="module")
def arrays():
    """dict from object paths to the variables of MaX-DeepLab-S's backbone."""
    return read_checkpoint(str(CHECKPOINTS / "max_deeplab_s_backbone_os16.tar.gz"))


def convert_changed(arrays, folder):
    """Writes the arrays as a DeepLab2 checkpoint and converts it. Returns (conversion, model)."""
    os.makedirs(folder / "in")
    write_checkpoint(arrays, str(folder / "in" / "ckpt-1"))
    return convert.convert("deeplab2", str(folder / "in"), str(folder / "out"))


def test_an_encoder_alone_leaves_the_heads_random(arrays, tmp_path):
    """A checkpoint with only an encoder, like DeepLab2's for ImageNet, leaves all weights of the heads unfilled."""
    encoder = {name: array for name, array in arrays.items() if name.startswith("encoder/")}
    conversion, model = convert_changed(encoder, tmp_path)
    unfilled = conversion.card.unfilled
    assert unfilled and not any(name.startswith("backbone/") for name in unfilled)
    assert len(unfilled) + len(conversion.values) == len(model.weights)
    assert "random" in "\n".join(convert.summary(conversion, model))


QKV = "encoder/_stage4/_block2/_attention/_height_axis/qkv_kernel"


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda a: a.update({"encoder/_decoder_stage1/kernel": a[QKV]}), "decoder_stage1/kernel"),
        (lambda a: a.update({QKV: a[QKV][1:]}), "'backbone/stage4_block2/attention/height/kernel' has shape"),
        (lambda a: a.pop("encoder/_stem/_conv1_bn_act/_conv/kernel"), "no tensor 'backbone/stem/conv1/conv/kernel'"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(arrays, change, words, tmp_path):
    """An unknown or missing tensor, or a wrong shape, raises InputError of one line. No output is written."""
    changed = dict(arrays)
    change(changed)
    with pytest.raises(InputError, match=words) as error:
        convert_changed(changed, tmp_path)
    assert str(error.value).startswith(str(tmp_path / "in")) and "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
