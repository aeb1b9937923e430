"""Programs that jax runs without axial: their results, run.py's budget and failures, and a training."""

import importlib.util
import lzma
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import gpu
from axial.layers.batch_norm import BatchNormConfig
from axial.models.registry import ModelConfig
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from axial.training.optimizers import RAdamLookahead, WarmupPoly
from axial.training.trainer import TrainingConfig
from axial.weights.interchange import read_safetensors, restore_tensors
from gpu import Program
from tests.conftest import ROOT

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("xla")
RUN = ROOT / "experiments" / "speed" / "run.py"
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def run():
    """run.py, imported as a module."""
    spec = importlib.util.spec_from_file_location("run", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(folder, *arguments):
    """Runs a folder's run.py in a process that cannot import TensorFlow or axial. Returns the finished process."""
    blocked = (
        "import runpy, sys\n"
        "for name in ('tensorflow', 'tf_keras', 'axial', 'absl', 'flatbuffers'): sys.modules[name] = None\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", blocked, folder / "run.py", *arguments]
    return subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, env=ENVIRONMENT, cwd=folder, timeout=800
    )


def entry(folder, function, specs, variables=()):
    return {**gpu._write(str(folder), "toy", function, specs, variables), "multiply_adds": 1}


def test_multiply_adds_of_a_pair_are_those_of_its_equation():
    """Training has three times as many multiply-adds as the projections and the attention products."""
    height, width, channels = 5, 7, 16
    pixels = 2 * height * width
    projections = 2 * pixels * channels * (8 + 8 + 16)  # queries and keys have half as many channels as values
    attention = pixels * (height + width) * (3 * 8 + 2 * 16)  # q k, q r and k r; values and positions of values
    program = Program("", (2, height, width, channels))
    assert gpu.multiply_adds(program) == 3 * (projections + attention)


def test_an_exported_function_computes_the_same(tmp_path, run):
    """Variables are inputs. Assigned variables are outputs that reuse the memory of their inputs."""
    weight, count = tf.Variable(tf.reshape(tf.range(12.0), [3, 4])), tf.Variable(5, dtype=tf.int64)
    scale = tf.cast(tf.constant([0.5, 2, 4, 8]), tf.bfloat16)

    def function(x):
        count.assign_add(2)
        weight.assign_sub(0.5 * weight)
        return [tf.matmul(x, weight), tf.cast(scale, tf.float32)]

    program = entry(tmp_path, function, [tf.TensorSpec([2, 3])])
    assert len(program["outputs"]) == 4
    assert [given["dtype"] for given in program["inputs"]].count("int64") == 1
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    before = weight.numpy()
    with jax.enable_x64(True):
        compiled, _ = run.compile_program(tmp_path, program)
        inputs = [x, *(run.fill(given, None) for given in program["inputs"][1:])]
        outputs = compiled(*map(jax.numpy.asarray, inputs))
        left = [np.asarray(value) for value in run.next_inputs(program, inputs, outputs)]
    assert compiled.memory_analysis().alias_size_in_bytes == 12 * 4 + 8
    np.testing.assert_allclose(outputs[0], x @ before / 2)
    np.testing.assert_allclose(outputs[1], [0.5, 2, 4, 8])
    kept = {value.dtype.name + str(value.shape): value for value in left}
    assert kept["int64()"] == 7 and (kept["float32(3, 4)"] == before / 2).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an exported `AxialPair`, and an entry whose file is no program."""
    folder = tmp_path_factory.mktemp("programs")
    pair = gpu.write_program(str(folder), Program("", (1, 3, 4, 16), training=False))
    (folder / "broken.xz").write_bytes(lzma.compress(b"no program"))
    gpu.write_list(str(folder), [{**pair, "name": "broken", "file": "broken.xz"}, pair])
    return folder


def test_a_program_that_fails_does_not_end_the_others(folder, run):
    done = call(folder, "time", "--csv=times.csv", "--budget=300")
    assert done.returncode == 0, done.stderr
    assert "\npair_3x4: " in done.stdout and "GiB" in done.stdout and "NOT FINITE" not in done.stdout
    header, *rows = (folder / "times.csv").read_text().splitlines()
    assert header.split(",") == list(run.COLUMNS)
    broken, pair = (dict(zip(run.COLUMNS, row.split(","))) for row in rows)
    assert broken["failed"] and not broken["ms"] and not pair["failed"]
    assert 0 < float(pair["least_ms"]) <= float(pair["ms"]) < 1e5 and float(pair["memory_gib"]) > 0
    assert pair["finite"] == "True" and float(pair["of_bandwidth"]) > 0 and float(pair["of_products"]) > 0


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A folder with a train step like a recipe's. The loss is the batch's number, and step 30 is not finite.

    The weight has two elements, the number of finite steps and the total number of steps.
    """
    folder = tmp_path_factory.mktemp("counting")
    weight, total = tf.Variable([0.0, 0.0]), tf.Variable(1000.0)
    bad_step, at = tf.Variable(-1, dtype=tf.int64), tf.Variable(0, dtype=tf.int64)

    def step(batch):
        bad_step.assign(tf.where(at < 30, bad_step, 30))
        weight.assign(tf.stack([weight[0] + tf.cast(bad_step < 0, tf.float32), total]))
        at.assign_add(1)
        return [batch["x"] + 0.0, tf.identity(bad_step)]

    program = entry(folder, step, [{"x": tf.TensorSpec([])}], {"w": weight, "total_steps": total})
    index = next(i for i, given in enumerate(program["inputs"]) if given["weight"] == "total_steps")
    program["inputs"][index]["weight"] = None
    np.savez(folder / "toy.batches.npz", **{"0/x": np.float16(3)})
    trains = {"names": ["x"], "losses": ["total"], "batches": "toy.batches.npz", "total_steps": index, "warmup": 20}
    gpu.write_list(str(folder), [{**program, "trains": {**trains, "card": {}}}])
    return folder


def test_a_training_takes_its_steps_and_stops_where_one_is_not_finite(counting, run, tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    with jax.enable_x64(True):
        rows = run.train(counting, "toy", steps=25, path=path)
        assert [row["step"] for row in rows] == list(range(1, 26)) and {row["total"] for row in rows} == {3}
        assert np.frombuffer(path.read_bytes()[-8:], "<f4").tolist() == [25, 25]
        with pytest.raises(SystemExit, match="toy: a loss or a gradient is not finite after 30 steps; no"):
            run.train(counting, "toy", steps=40, path=tmp_path / "stopped.safetensors")
    assert not (tmp_path / "stopped.safetensors").exists()


@pytest.mark.slow
def test_training_elsewhere_gives_weights_that_axial_reads(tmp_path, colours_dir):
    """The train step learns colours. The learning rate falls to 0 at the last step, whose number run.py chooses."""
    config = ModelConfig("resnet_nano", norm=BatchNormConfig(momentum=0.8))
    task = ClassificationTask(config, ClassificationData("train", "val", image=(33, 33)), str(colours_dir))
    optimizer = RAdamLookahead(WarmupPoly(peak=0.003, steps=1000, warmup=0))
    training = TrainingConfig(steps=1000, batch=4)
    program = gpu.write_training(str(tmp_path), lambda: (task, training, optimizer), 6)
    gpu.write_list(str(tmp_path), [program])
    assert program["name"] == "resnet_nano_recipe" and program["trains"]["names"] == ["image", "label"]
    model = task.build_model()
    assert len([given for given in program["inputs"] if given["weight"]]) == len(model.weights)
    done = call(tmp_path, "train", program["name"], "--steps=40", "--weights=w.safetensors", "--csv=losses.csv")
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows = (tmp_path / "losses.csv").read_text().splitlines()
    losses = [float(row.split(",")[2]) for row in rows]
    assert header == "step,seconds,total" and len(rows) == 20 and rows[-1].startswith("40,")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    path = str(tmp_path / "w.safetensors")
    restore_tensors(model, path, "resnet_nano", task.spec)
    card, arrays = read_safetensors(path)
    assert card.num_classes == task.num_classes and len(arrays) == len(model.weights)
    images, labels = zip(*((batch["image"], batch["label"]) for batch in task.train_dataset(4, 0).take(3)))
    right = tf.argmax(model(tf.concat(images, 0))["logits"], 1) == tf.argmax(tf.concat(labels, 0), 1)
    assert float(tf.reduce_mean(tf.cast(right, tf.float32))) > 0.5
