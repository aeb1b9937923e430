"""The panoptic task: test-time averages over scales and mirror images, options of the model, and batches."""

import numpy as np
import pytest
import tensorflow as tf

from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.layers import device
from axial.layers.attention.layer import Attention
from axial.layers.conv import RowsDepthwiseConv2D, resize_antialiased
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY, SEMANTIC
from axial.models.registry import ModelConfig
from axial.tasks.segmentation.canvas_maps import canvas_maps, scaled_canvas, upsample
from axial.tasks.segmentation.grouping import PostprocessConfig, postprocess
from axial.tasks.segmentation.input_pipeline import DataConfig
from axial.tasks.segmentation.panoptic import PanopticTask
from axial.training.trainer import TrainingConfig, check_loop

CANVAS = (49, 81)
WIDTHS = np.array([81, 60])
SPEC = DatasetSpec("test", tuple("abcde"), (1, 2, 3, 4, 5), (True, True, False, False, False))
GROUPING = PostprocessConfig(center_threshold=0.0, nms_kernel=7, top_k=20, stuff_area=5)


@pytest.fixture(scope="module")
def kernels():
    """Random kernels of a 5x5 convolution, whose 8 output channels are the channels of all heads."""
    return np.random.default_rng(0).normal(0, 0.3, [5, 5, 3, 8]).astype(np.float32)


@pytest.fixture(scope="module")
def model(kernels):
    """A network of one convolution, as a function from images to the head outputs."""

    def heads(images):
        x = tf.tanh(tf.nn.conv2d(images, kernels, 4, "SAME"))
        return {SEMANTIC: 3 * x[..., :5], CENTER: x[..., 5:6], OFFSET: 4 * x[..., 6:]}

    return heads


def photos():
    """Two random images, float32 [2, *CANVAS, 3]. The second one has padding on its right."""
    images = tf.random.stateless_uniform([2, *CANVAS, 3], [0, 1], -1, 1).numpy()
    images[1, :, WIDTHS[1] :] = 0
    return images


def mirror(x, widths=WIDTHS):
    """Flips the valid columns of each image. `widths` are the numbers of valid columns."""
    x = np.array(x)
    for image, width in zip(x, widths):
        image[:, :width] = image[:, :width][:, ::-1].copy()
    return x


def run(model, images, scales=(1.0,), flip=False):
    """Computes `canvas_maps` in a graph. Returns a dict of arrays."""
    function = tf.function(lambda x: canvas_maps(model, x, tf.constant(WIDTHS), scales, flip=flip), autograph=False)
    return {k: v.numpy() for k, v in function(tf.constant(images)).items()}


def test_a_mirrored_photo_gives_the_mirrored_answer(model):
    """With `flip`, the outputs for a mirrored photo are exactly the mirrored outputs for the photo."""
    images, scales = photos(), (0.5, 1.0, 1.5)
    plain, turned = run(model, images, scales, True), run(model, mirror(images), scales, True)
    for name, x in turned.items():
        x = mirror(x) * ([1, -1] if name == OFFSET else 1)
        np.testing.assert_array_equal(x, plain[name])
    results = [postprocess(maps, SPEC, GROUPING)["panoptic"][0] for maps in (plain, turned)]
    classes = [result.numpy() // SPEC.label_divisor for result in results]  # instance numbers follow raster order
    np.testing.assert_array_equal(classes[1][:, ::-1], classes[0])
    assert np.any(run(model, images, scales)[PROBABILITY] != plain[PROBABILITY])  # `flip` has an effect


def test_the_mean_is_over_scales_and_mirror_images(model):
    images, scales = photos(), (0.5, 2.0)
    probability, heat, offset = [], [], []
    for scale in scales:
        for flip in (False, True):
            x = mirror(images) if flip else images
            maps = upsample(model(resize_antialiased(tf.constant(x), scaled_canvas(CANVAS, scale))), CANVAS)
            maps = {k: mirror(v) if flip else v.numpy() for k, v in maps.items()}
            probability.append(tf.nn.softmax(maps[SEMANTIC]))
            heat.append(maps[CENTER])
            offset.append(maps[OFFSET] * ([1, -1] if flip else 1))
    actual = run(model, images, scales, True)
    np.testing.assert_allclose(actual[PROBABILITY], np.mean(probability, 0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(actual[CENTER], np.mean(heat, 0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(actual[OFFSET], np.mean(offset, 0), rtol=1e-3, atol=1e-3)
    assert np.mean(actual[CLASS] == np.mean(probability, 0).argmax(-1)) > 0.999


def test_canvases_keep_the_grid():
    assert scaled_canvas((1025, 2049), 0.5) == (513, 1025)
    assert scaled_canvas((1025, 1025), 4) == (4097, 4097)
    assert scaled_canvas((65, 65), 0.01) == (17, 17)
    assert scaled_canvas((50, 70), 1) == (50, 70)


def test_recomputing_and_backend_are_a_choice_of_the_recipe():
    def build(name="axial_deeplab_nano", **options):
        data = DataConfig("train", "val", (33, 33))
        return PanopticTask(ModelConfig(name, **options), data, "", spec=SPEC).build_model()

    def chosen(model):
        options = [layer.spec.options for layer in model.submodules if isinstance(layer, Attention)]
        return {(each.recompute, each.backend) for each in options}, model.backbone.stages[0][0].recompute

    assert chosen(build()) == ({("none", "auto")}, "none")
    assert chosen(build(recompute="block", backend="kernel")) == ({("block", "kernel")}, "block")
    resnet = build("panoptic_deeplab_resnet_nano", recompute="block", backend="kernel")
    assert resnet.backbone.stages[0][0].recompute == "block"
    depthwise = [layer for layer in resnet.submodules if isinstance(layer, RowsDepthwiseConv2D)]
    assert depthwise and {layer.backend for layer in depthwise} == {"kernel"}
    for options, words in (
        (dict(recompute="blocks"), "ModelConfig.recompute = 'blocks': expected one of auto, none, softmax, block"),
        (dict(backend="tpu"), "ModelConfig.backend = 'tpu': expected one of auto, cpu, xla, kernel, reference"),
        (dict(arguments={"spam": 65}), "has no argument 'spam' .did you mean 'span'"),
        (dict(name="panoptic_deeplab_resnet_nano", recompute="softmax"), "recompute = .softmax.: expected one of none"),
    ):
        with pytest.raises(InputError, match=words):
            build(**options)


@pytest.mark.parametrize("missing,recompute", [((), "none"), (("jax",), "block")])
def test_blocks_are_recomputed_on_a_tpu_without_kernels(missing, recompute, monkeypatch):
    monkeypatch.setattr(device, "has_tpu", lambda: True)
    monkeypatch.setattr(device, "has_kernels", lambda: not missing)
    config = ModelConfig("axial_deeplab_nano", recompute="auto", backend="kernel")
    model = PanopticTask(config, DataConfig("train", "val", (33, 33)), "", spec=SPEC).build_model()
    assert model.backbone.stages[0][0].recompute == recompute


@pytest.mark.parametrize("name", ["axial_deeplab_nano", "attended_deeplab_nano"])  # kernels in layers, and in the loss
def test_cores_do_not_share_an_image_with_the_kernels(name):
    config = ModelConfig(name, backend="kernel")
    task = PanopticTask(config, DataConfig("train", "val", (33, 33)), "", spec=SPEC)
    training = TrainingConfig(steps=1, batch=1, partitions=2)
    with pytest.raises(InputError, match="TrainingConfig.partitions = 2: TPU kernels cannot split an image"):
        check_loop(task, task.build_model(), training, tf.distribute.get_strategy())
