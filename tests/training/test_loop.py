"""The loop of training steps."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from axial.errors import InputError, NonFiniteError
from axial.layers import device, random
from axial.layers.batch_norm import BatchNormConfig, all_reduce_sums
from axial.models.registry import ModelConfig
from axial.tasks.classification.feed import ClassificationData
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.detection.feed import DetectionData
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.feed import DataConfig
from axial.tasks.segmentation.semantic import SegmentationTask
from axial.tasks.translation.feed import TextData
from axial.tasks.translation.task import TranslationTask
from axial.training import loop as loop_module
from axial.training.loop import Loop
from axial.training.optimizers import Adam
from axial.training.trainer import TrainingConfig
from tests.conftest import make_task, relative_error, two_replicas
from tests.tasks.contract import moved_by_a_step, run_resumes


class Recorder:
    """A task whose losses record images and random numbers, and of which some images give NaN."""

    def __init__(self, bad):
        self.bad, self.seen = bad, []

    def train_dataset(self, batch, seed, first_step, context):
        share = batch // context.num_replicas_in_sync
        images = tf.data.Dataset.range(first_step * batch, (first_step + 1) * batch).batch(share)
        return images.map(lambda i: {"image": tf.cast(i, tf.float32)[:, None]})

    def by_shape(self, compute, batch):
        return compute(batch)

    def losses(self, model, batch, whole=None):
        images = batch["image"][:, 0].numpy().astype(int).tolist()
        self.seen.append((images, float(random.uniform([]))))
        spoilt = float("nan") if self.bad in images else 0.0
        return {"total": tf.reduce_sum(model(batch["image"])) + spoilt}


@pytest.fixture
def repeat():
    def run(task, step=3):
        model = keras.Sequential([keras.layers.Dense(1)])
        model(tf.zeros([1, 1]))
        config = types.SimpleNamespace(batch=8, seed=0, accumulate=2)
        strategy = types.SimpleNamespace(num_replicas_in_sync=2)
        loop = types.SimpleNamespace(task=task, model=model, config=config, strategy=strategy)
        return Loop._repeat(loop, step)

    return run


def test_a_step_is_repeated_in_the_parts_that_memory_held(repeat):
    """Eight images of step 3 on two replicas, each in two parts: the first that is not finite ends it."""
    task = Recorder(bad=29)
    assert repeat(task)[0] == "loss total"
    assert [images for images, _ in task.seen] == [[24, 25], [26, 27], [28, 29]]
    for (_, drawn), (part, replica) in zip(task.seen, [(0, 0), (1, 0), (0, 1)]):
        with random.seeded(0, 3 * 2 + part, replica):
            assert drawn == float(random.uniform([]))


def test_a_step_that_is_finite_when_it_is_repeated_says_so(repeat):
    task = Recorder(bad=None)
    assert repeat(task) == ["none when the step is repeated operation by operation"]
    assert len(task.seen) == 4


def test_a_step_too_large_to_be_repeated_is_named_too():
    def repeat(step):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    loop = types.SimpleNamespace(bad_step=tf.Variable(7), _repeat=repeat)
    with pytest.raises(NonFiniteError, match="step 7: .* not finite; first: not known, there is not enough memory"):
        Loop._raise_if_stopped(loop)


# === A batch in parts ===

FROZEN = BatchNormConfig(frozen=True)  # live statistics are those of a part
TOLERANCE = 1e-4  # of the largest gradient of a weight; float32 sums in another order
ONE_EACH = dict(repeats=(1, 1, 1, 1))


def make_panoptic(sample_dir, colours_dir, texts_dir):
    return make_task(sample_dir, model=dict(norm=FROZEN), data=dict(shuffle=0))


def make_segmentation(sample_dir, colours_dir, texts_dir):
    model = ModelConfig("ccnet_nano", FROZEN, arguments=dict(context=16, dropout=0.0))
    return SegmentationTask(model, DataConfig("train2017", "val2017", (65, 65), shuffle=0), sample_dir)


def make_classification(sample_dir, colours_dir, texts_dir):
    return ClassificationTask(ModelConfig("resnet_nano", FROZEN), ClassificationData("train", "val"), colours_dir)


def make_detection(sample_dir, colours_dir, texts_dir):
    small = dict(pyramid_width=16, head_width=16, pre_nms=(100, 50), proposals=(50, 20), sampled=32)
    data = DetectionData("train2017", "val2017", (128, 128), (128, 128), shuffle=0)
    return DetectionTask(ModelConfig("mask_rcnn_resnet_nano", FROZEN, arguments=small), data, sample_dir)


def make_translation(sample_dir, colours_dir, texts_dir):
    small = dict(layers=1, channels=16, inner=16, heads=2, dropout=0.0)
    return TranslationTask(
        ModelConfig("transformer_nano", arguments=small), TextData("train", "val", (16, 48)), texts_dir
    )


def step_of_a_batch(task, batch, values, *, accumulate=1, strategy=None):
    """(mean losses, gradients) of a batch, in parts on each replica of a strategy."""
    strategy = strategy or tf.distribute.get_strategy()
    replicas, size = strategy.num_replicas_in_sync, len(next(iter(batch.values())))
    with strategy.scope():
        model = task.build_model()
        for variable, value in zip(model.trainable_variables, values, strict=True):
            variable.assign(value)
        optimizer = Adam()
        optimizer.build(model.trainable_variables)
    loop = Loop(task, model, optimizer, config=TrainingConfig(1, size, accumulate), strategy=strategy)
    statistics = [weight.numpy() for weight in model.non_trainable_variables]

    def of_replica(context):
        share = size // replicas
        start = context.replica_id_in_sync_group * share
        return {name: x[start : start + share] for name, x in batch.items()}

    @tf.function(autograph=False)
    def step(batch):
        def replica(batch):
            losses, gradients = loop._accumulated(batch, tf.constant(0, tf.int64), 0)
            return all_reduce_sums(*losses.values(), *gradients)

        return strategy.run(replica, (batch,))

    found = step(strategy.experimental_distribute_values_from_function(of_replica))
    found = [strategy.experimental_local_results(x)[0].numpy() for x in found]
    for weight, value in zip(model.non_trainable_variables, statistics, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    losses = dict(zip(task.loss_names, found))
    names = [variable.name for variable in model.trainable_variables]
    return {n: x / replicas for n, x in losses.items()}, dict(zip(names, found[len(losses) :], strict=True))


MAKERS = make_panoptic, make_segmentation, make_classification, make_detection, make_translation
# Each takes half a minute or more. The detector has a quick test in `test_detection_task`.
CASES = [
    pytest.param(make, *case, marks=[] if make is make_translation and case == (2, 1) else pytest.mark.slow)
    for make in MAKERS
    for case in ((2, 1), (1, 2), (2, 2))
]


@pytest.mark.parametrize("make,accumulate,replicas", CASES)
def test_a_batch_in_parts_has_the_gradients_of_the_whole(
    make, accumulate, replicas, sample_dir, colours_dir, texts_dir, monkeypatch
):
    """Parts have unlike numbers of objects and of tokens."""
    # The same boxes of a photo are drawn in every part.
    monkeypatch.setattr(random, "uniform", lambda shape: tf.broadcast_to(tf.linspace(0.0, 1.0, shape[-1]), shape))
    task = make(sample_dir, colours_dir, texts_dir)
    batch = next(iter(task.train_dataset(192 if make is make_translation else 4, 0)))
    if make is make_translation:
        order = tf.argsort(tf.math.count_nonzero(batch["target"], 1))
        batch = {name: tf.gather(x, order) for name, x in batch.items()}
    rng = np.random.default_rng(0)
    variables = task.build_model().trainable_variables
    values = [rng.normal(0, 0.05, v.shape) + ("gamma" in v.name) for v in variables]
    losses, gradients = step_of_a_batch(task, batch, values)
    assert all(value > 0 for value in losses.values())
    strategy = two_replicas() if replicas > 1 else None
    of_parts, found = step_of_a_batch(task, batch, values, accumulate=accumulate, strategy=strategy)
    for name, value in losses.items():
        assert of_parts[name] == pytest.approx(value, rel=TOLERANCE), name
    for name, value in gradients.items():
        assert relative_error(found[name], value) < TOLERANCE or np.abs(value).max() < 1e-7, name


# === Compiled by XLA ===


def test_the_parts_of_a_step_are_the_step(colours_dir, monkeypatch):
    """Replicas that compile update in a second part. CPUs compile no sums over replicas, so nothing compiles here."""
    model = ModelConfig("resnet_nano", arguments=ONE_EACH)
    task = ClassificationTask(model, ClassificationData("train", "val", (33, 33)), colours_dir)
    _, whole = moved_by_a_step(task, 4, "no", two_replicas())
    with pytest.raises(InputError, match="^TrainingConfig.jit_compile = 'yes': XLA sums over no replicas on CPUs"):
        moved_by_a_step(task, 4, "yes", two_replicas())
    monkeypatch.setattr(loop_module, "_compiled", lambda function: function)
    monkeypatch.setattr(loop_module, "on_cpu", lambda: False)
    _, parts = moved_by_a_step(task, 4, "yes", two_replicas())
    assert any("moving" in name and np.any(value) for name, value in whole.items())
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


class Spoilt(ClassificationTask):
    """A task whose images are infinite in one step."""

    bad_step = 2

    def train_dataset(self, batch, seed, first_step=0, context=None, service=None):
        def spoil(step, example):
            return {**example, "image": tf.where(first_step + step == self.bad_step, np.inf, example["image"])}

        return super().train_dataset(batch, seed, first_step, context, service).enumerate().map(spoil)


@pytest.fixture
def compiled(colours_dir):
    """A maker of a classifier of one block, in a context of the accelerators' forms."""
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    model = ModelConfig("resnet_nano", arguments=dict(repeats=(1, 0, 0, 0)))
    data = ClassificationData("train", "val", (33, 33))
    with device.portable():
        yield lambda kind: kind(model, data, colours_dir)


def test_a_compiled_step_that_is_not_finite_stops_training_there(compiled):
    """The step is in the middle of a loop. Weights, moving statistics, slots and step stay as they were before it."""
    task = compiled(Spoilt)
    model, optimizer = task.build_model(), Adam(0.01)
    optimizer.build(model.trainable_variables)
    config = TrainingConfig(8, 4, jit_compile="yes")
    loop = Loop(task, model, optimizer, config, tf.distribute.get_strategy())
    loop.train_dataset = task.train_dataset(4, config.seed)
    begun = [w.numpy() for w in model.weights]
    loop.run(2)
    held = [w.numpy() for w in (*model.weights, *optimizer.variables)]
    assert any(np.any(a != b) for a, b in zip(begun, held))
    with pytest.raises(NonFiniteError, match="^step 2: the loss or a gradient is not finite; first: input image"):
        loop.run(4)
    assert optimizer.iterations.numpy() == 2
    for weight, value in zip((*model.weights, *optimizer.variables), held, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value, err_msg=weight.name)


def test_a_compiled_run_resumes(compiled, tmp_path):
    run_resumes(compiled(ClassificationTask), 4, tmp_path, jit_compile="yes")
