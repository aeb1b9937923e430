"""axial's tasks and a toy task pass the checks of `contract.py`. The commands accept the toy task."""

import json
import subprocess
import sys

import pytest
import tensorflow as tf
import tf_keras as keras

from axial.layers import device
from axial.models.registry import ModelConfig
from axial.tasks import registry
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from axial.tasks.detection.input_pipeline import DetectionData
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.input_pipeline import DataConfig
from axial.tasks.segmentation.panoptic import SegmentationTask
from axial.tasks.translation.input_pipeline import TextData
from axial.tasks.translation.task import TranslationTask
from tests.conftest import ROOT, make_task
from tests.tasks import contract
from tests.tasks.toy_task import ToyTask

BATCHES = {"translation": 96}  # global batch size in tokens. Other tasks have 2 photos
# Tolerances of compiled steps. The whole panoptic gradient differs by 3e-5, but some batch norms' gradients by 2e-3.
LOOSER = {"panoptic": (1e-5, 3e-3)}


ONE_BLOCK = dict(repeats=(1, 0, 0, 0))
COLOURS = ClassificationData("train", "val", (33, 33))


def panoptic(sample_dir, **_):
    model = {"name": "panoptic_deeplab_resnet_nano", "arguments": ONE_BLOCK}
    return make_task(sample_dir, (33, 33), model=model, data=dict(shuffle=0))


def segmentation(sample_dir, **_):
    model = ModelConfig("ccnet_nano", arguments=dict(ONE_BLOCK, context=16, dropout=0.0))
    return SegmentationTask(model, DataConfig("train2017", "val2017", (33, 33), shuffle=0), sample_dir)


def classification(colours_dir, **_):
    return ClassificationTask(ModelConfig("resnet_nano", arguments=ONE_BLOCK), COLOURS, colours_dir)


def detection(sample_dir, **_):
    small = dict(pyramid_width=8, head_width=8, pre_nms=(50, 20), proposals=(20, 10), sampled=16)
    data = DetectionData("train2017", "val2017", (64, 64), (64, 64), shuffle=0)
    return DetectionTask(ModelConfig("mask_rcnn_resnet_nano", arguments=small), data, sample_dir)


def translation(texts_dir, **_):
    small = dict(layers=1, channels=16, inner=16, heads=2, dropout=0.0)
    model, data = ModelConfig("transformer_nano", arguments=small), TextData("train", "val", (16, 48))
    return TranslationTask(model, data, texts_dir, beams=2, longer=4)


def toy(colours_dir, **_):
    return ToyTask(ModelConfig("resnet_nano", arguments=ONE_BLOCK), COLOURS, colours_dir)


MAKERS = {make.__name__: make for make in (panoptic, segmentation, classification, detection, translation, toy)}


@pytest.fixture
def registered(monkeypatch):
    """Adds the toy task to the task registry."""
    monkeypatch.setattr(registry, "TASKS", [*registry.TASKS, ToyTask])


@pytest.fixture(scope="module", params=MAKERS)
def made_task(request, sample_dir, colours_dir, texts_dir):
    """(task, global batch size, the task's model) for one of `MAKERS`."""
    keras.utils.set_random_seed(0)
    task = MAKERS[request.param](sample_dir=sample_dir, colours_dir=colours_dir, texts_dir=texts_dir)
    model = task.build_model()
    tf.random.set_seed(None)  # `train` does the same
    return task, BATCHES.get(request.param, 2), model


def test_a_task_holds_to_its_contract(made_task, tmp_path):
    task, batch_size, model = made_task
    batch = contract.input_pipeline_resumes(task, batch_size)
    with contract.eagerly():
        contract.losses_are_named(task, model, batch)
        pairs = contract.predictions_keep_the_order(task, model)
        contract.given_is_described(task, model, pairs[0])
    scores, _ = contract.scores_merge(task, pairs)
    contract.tables_fit(task, scores.result())
    contract.results_are_read_back(task, pairs, tmp_path)


# Translation is tested by default, because only its batches differ in shape. The other tasks are slow tests.
@pytest.mark.parametrize(
    "name", [name if name == "translation" else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS]
)
@contract.eagerly()
def test_a_killed_run_resumes(name, sample_dir, colours_dir, texts_dir, tmp_path):
    task = MAKERS[name](sample_dir=sample_dir, colours_dir=colours_dir, texts_dir=texts_dir)
    contract.run_resumes(task, BATCHES.get(name, 2), tmp_path)


@pytest.mark.parametrize(
    "made_task",
    # Two are slow, because other tests export them too: the commands' tests a detector, this file's last test the toy.
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("detection", "toy"))) for name in MAKERS],
    indirect=True,
)
def test_an_export_holds_to_it_too(made_task, registered, tmp_path):
    task, _, model = made_task
    contract.exports_predict(task, model, next(iter(task.eval_dataset())), tmp_path / "export")


@pytest.mark.parametrize(
    "name",
    # Tasks other than classification take up to a minute each.
    [pytest.param(n, marks=[] if n == "classification" else pytest.mark.slow) for n in MAKERS if n != "toy"],
)
def test_a_compiled_step_is_the_plain_one(name, sample_dir, colours_dir, texts_dir):
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    task = MAKERS[name](sample_dir=sample_dir, colours_dir=colours_dir, texts_dir=texts_dir)
    contract.compiled_step_is_the_plain_one(task, BATCHES.get(name, 2), LOOSER.get(name, contract.TOLERANCES))


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("panoptic", "segmentation")), "classification"]
)
def test_compiled_predictions_are_the_plain_ones(name, sample_dir, colours_dir):
    if not device.has_xla():
        pytest.skip("this TensorFlow has XLA for TPUs only")
    task = MAKERS[name](sample_dir=sample_dir, colours_dir=colours_dir)
    keras.utils.set_random_seed(0)
    contract.compiled_predictions_are_the_plain_ones(task, task.build_model())


def test_every_task_is_here():
    names = [task.__name__.removesuffix("Task").lower() for task in (*registry.TASKS, ToyTask)]
    assert sorted(MAKERS) == sorted(names)


RECIPE = """\
ModelConfig.name = 'resnet_nano'
ModelConfig.arguments = {'repeats': (1, 0, 0, 0)}
ClassificationData.train_split = 'train'
ClassificationData.eval_split = 'val'
ClassificationData.image = (33, 33)
ToyTask.model = @ModelConfig()
ToyTask.data = @ClassificationData()
TrainingConfig.steps = 1
TrainingConfig.batch = 2
experiment.task = @ToyTask()
experiment.training = @TrainingConfig()
experiment.optimizer = @Adam()
"""
PROGRAM = """
import importlib, json, os, sys
from axial.tasks.registry import TASKS
from tests.tasks.toy_task import ToyTask
TASKS.append(ToyTask)
import axial.recipes.configuration, axial.serving.predictor
for command, *flags in json.loads(sys.argv[1]):
    pid = os.fork()  # two commands may define the same flag
    if not pid:
        sys.argv = [f"axial-{command}", *flags]
        importlib.import_module(f"axial.cli.{command}").main()
    assert not os.waitpid(pid, 0)[1], command
"""


@pytest.mark.slow  # takes a minute
def test_commands_take_a_users_task(colours_dir, tmp_path):
    """One line registers the toy task. Then axial's commands train it, export it, predict with it and check data."""
    recipe, run, export = (tmp_path / name for name in ("toy.gin", "run", "export"))
    recipe.write_text(RECIPE)
    photo = next((ROOT / "axial" / "data" / "sample" / "val2017").glob("*.jpg"))
    commands = [
        ("train", f"--gin_file={recipe}", f"--data_dir={colours_dir}", f"--model_dir={run}"),
        ("export", f"--model_dir={run}", f"--output_dir={export}"),
        ("predict", f"--model={export}", f"--output_dir={tmp_path}", str(photo)),
        ("convert", "check", f"--data_dir={colours_dir}", "--split=val"),
    ]
    call = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(call, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "right" in json.loads((run / "best" / "scores.json").read_text())
    assert json.loads((tmp_path / f"{photo.stem}.json").read_text())["class"]
