"""Exports training and inference steps with run.py, a script that times or trains them on a GPU and needs only jax.

%s --export=FOLDER --programs=pair_65x129,axial_deeplab_s_train_1
                        training and inference steps; by default all of `PROGRAMS`
%s --export=FOLDER --quick
                        small programs, for a CPU
%s --export=FOLDER --gin_file=nuclei/axial_deeplab_nano.gin --data_dir=DATA
                        a recipe's train step and batches, with which run.py trains for a given time

The programs of `PROGRAMS` compute in mixed_bfloat16. A program's name says the model, training or inference, and the
batch size: axial_deeplab_s_train_1_block is a training step on one image that recomputes blocks. pair_65x129 is a
training step of an `AxialPair`. These training steps compute the mean square of the outputs as a loss, and its
gradients. They have no optimizer.

A program is a file of portable StableHLO, compressed by xz. All variables are inputs, and variables that the program
assigns are also outputs. For each input, programs.json has the shape, the values, and the index of the output that
becomes the input's next value, so that run.py needs no other file. Large random weights are not stored: run.py draws
normal random numbers with the same mean and standard deviation.
"""

import dataclasses
import functools
import io
import lzma
import os
import re
import sys

import msgspec
import numpy as np
import tensorflow as tf
import tf_keras as keras
from tensorflow.compiler.xla import xla_data_pb2

import axial
from axial import recipes
from axial.analysis.multiply_adds import count_multiply_adds, total
from axial.analysis.step_cost import FORWARD_AND_BACKWARD
from axial.cli import app, flags
from axial.cli.analyze import build_recipe
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed, nearest
from axial.io.read import read_file
from axial.io.show import counted, say, working
from axial.io.write import make_folder, output_file, write_bytes, write_json
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.blocks import AxialPair
from axial.models.registry import build_model, find_variant
from axial.training.train_step import TrainStep
from axial.weights.interchange import count_parameters, make_card
from axial.weights.names import weight_names
from benchmark import training_function

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "tpu"))
import hlo
from tpu_compile import CPU, alone, for_compiler, trace

SMALL = 64  # largest number of elements of an input whose values are stored
SCRIPT = "run.py"
SIDE = 257  # largest side of the image that builds a model; the weights do not depend on the side
PIXEL = 127.5  # the network's input is pixel / 127.5 - 1


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step or inference step to export.

    Attributes:
        model: name in the registry; '' for an `AxialPair`.
        images: shape of the input, (batch, height, width, channels).
        training: whether the step computes the gradients of all weights and, for an `AxialPair`, of the input.
        recompute: see `ModelConfig`.
    """

    model: str
    images: tuple
    training: bool = True
    recompute: str = "none"

    @property
    def name(self):
        batch, height, width, _ = self.images
        if not self.model:
            return f"pair_{height}x{width}"
        words = [self.model, "train" if self.training else "infer", str(batch)]
        return "_".join(words + ([self.recompute] if self.recompute != "none" else []))


def _models(model, side, batches, training=True, recompute=("none",)):
    return [Program(model, (batch, side, side, 3), training, how) for batch in batches for how in recompute]


PROGRAMS = (  # in the order of importance
    Program("", (4, 65, 129, 512)),  # stage 4 of Axial-DeepLab-L at 1025x2049
    Program("", (128, 56, 56, 128)),  # stage 2 of Axial-ResNet-L at 224x224
    *_models("axial_deeplab_s", 1025, [1]),
    *_models("axial_deeplab_s", 1025, [1], training=False),
    *_models("axial_resnet_l", 224, [32]),
    *_models("axial_resnet_l", 224, [1, 128], training=False),
    *_models("resnet_101", 224, [32]),
    *_models("resnet_101", 224, [1, 128], training=False),
    *_models("axial_deeplab_s", 1025, [1], recompute=("softmax", "block")),
    *_models("axial_resnet_l", 224, [64, 128]),
    *_models("resnet_101", 224, [64, 128]),
    *_models("axial_deeplab_l", 1025, [1], recompute=("none", "softmax", "block")),
    *_models("axial_deeplab_l", 1025, [1], training=False),
)
QUICK = (
    Program("", (2, 9, 17, 32)),
    *_models("axial_resnet_nano", 33, [2], training=False),
    *_models("axial_resnet_nano", 33, [2], recompute=("none", "block")),
    *_models("axial_deeplab_nano", 65, [1], training=False),
)


def find_programs(names=(), quick=False):
    """Returns the `Program`s with these names, in the order of `PROGRAMS`; by default all.

    Raises:
        InputError: a name is unknown.
    """
    programs = {program.name: program for program in (QUICK if quick else PROGRAMS)}
    for name in names:
        if name not in programs:
            raise InputError(f"--programs={name}: no such program{nearest(name, programs)}: {', '.join(programs)}")
    return [program for name, program in programs.items() if not names or name in names]


# === A program ===


def write_list(folder, entries):
    """Writes programs.json and run.py to a folder."""
    write_json(os.path.join(folder, "programs.json"), {"axial": axial.__version__, "programs": entries})
    write_bytes(os.path.join(folder, SCRIPT), read_file(os.path.join(os.path.dirname(__file__), SCRIPT)))


def _layer(program):
    """Returns the unbuilt layer or model of a program. In inference its batch norms are folded."""
    norm = BatchNormConfig() if program.training else None
    if not program.model:
        channels = program.images[3]
        return AxialPair(channels // 2, channels, norm, name="pair")
    changes = {} if program.recompute == "none" else {"recompute": program.recompute}
    return build_model(program.model, find_variant(program.model).classes, norm, **changes)


def multiply_adds(program):
    """Returns the multiply-adds of a program, counted in its traced graph. Training counts three forward passes."""
    with tf.Graph().as_default() as graph:
        images = tf.compat.v1.placeholder(tf.float32, program.images)
        tf.autograph.experimental.do_not_convert(_layer(program))(images)
    return (FORWARD_AND_BACKWARD if program.training else 1) * total(count_multiply_adds(graph))


def write_program(folder, program):
    """Writes the file of a `Program`. Returns the program's entry in programs.json.

    An inference returns the model's outputs. A training step returns a loss and its gradients.
    """
    _, height, width, channels = program.images
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = _layer(program)
    layer(tf.zeros([1, min(height, SIDE), min(width, SIDE), channels]))
    keras.mixed_precision.set_global_policy("float32")

    def infer(images):
        return tf.nest.flatten(layer(images))

    function = training_function(layer, input_gradient=not program.model) if program.training else infer
    spec = tf.TensorSpec(program.images, tf.float32 if program.model else tf.bfloat16)
    entry = _write(folder, program.name, function, [spec])
    return {**dataclasses.asdict(program), **entry, "multiply_adds": multiply_adds(program)}


def _write(folder, name, function, specs, variables=()):
    """Writes the program of a function of tensors. Returns the program's entry in programs.json.

    Args:
        folder, name: folder and name of the new file.
        function, specs: see `tpu_compile.trace`.
        variables: dict from names to variables. The entry stores the names as 'weight' of the variables' inputs.
    """
    stage, captured = trace(function, specs, CPU)
    serialized = for_compiler(stage("hlo_serialized"))
    module = hlo.parse(serialized)
    shapes = [_shape(x) for x in module.host_program_shape.parameters]
    tensors = tf.nest.flatten(specs)
    next_value = {x.parameter_number: x.output_shape_index[0] for x in module.input_output_alias.entries}
    names = {id(variable.handle): name for name, variable in dict(variables).items()}
    inputs = []
    for i, ((shape, dtype), handle) in enumerate(zip(shapes, [None] * len(tensors) + list(captured), strict=True)):
        fill = _fill(handle) if handle is not None else {"normal": [0.0, 1.0]} if "float" in dtype else {"values": 0}
        given = {"shape": shape, "dtype": dtype, "fill": fill}
        inputs.append({**given, "output": next_value.get(i), "weight": names.get(id(handle))})
    results = module.host_program_shape.result
    outputs = [dict(zip(("shape", "dtype"), _shape(x))) for x in results.tuple_shapes or [results]]
    file = f"{name}.stablehlo.xz"
    write_bytes(output_file(folder, file, "the name of a program"), lzma.compress(_stablehlo(serialized)))
    return {"name": name, "file": file, "inputs": inputs, "outputs": outputs}


def _shape(shape):
    """Returns (list of sides, name of the dtype) of a `ShapeProto`."""
    kind = xla_data_pb2.PrimitiveType.Name(shape.element_type)
    words = {"PRED": "bool", "BF": "bfloat", "F": "float", "S": "int", "U": "uint"}
    dtype = words.get(kind) or re.sub(r"^[A-Z]+", lambda match: words[match[0]], kind)
    return list(shape.dimensions), dtype


def _fill(captured):
    """Returns the dict from which `fill` in run.py makes the values of a captured input."""
    if captured.dtype != tf.resource:
        return {"values": captured.numpy().tolist()}
    kind = tf.dtypes.as_dtype(captured._handle_data.shape_and_type[0].dtype)  # only the handle is available here
    value = tf.raw_ops.ReadVariableOp(resource=captured, dtype=kind).numpy()
    if value.size and (value == value.flat[0]).all():
        return {"values": value.flat[0].item()}
    if value.size > SMALL and value.dtype.kind not in "biu":
        value = value.astype(np.float32)
        return {"normal": [float(value.mean()), float(value.std())]}
    return {"values": value.tolist()}


def _stablehlo(serialized):
    """Converts a serialised HLO module to portable StableHLO bytes, for jax releases of the last twelve weeks."""
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo as dialect

    weeks = dialect.StablehloCompatibilityRequirement.WEEK_12
    version = dialect.get_version_from_compatibility_requirement(weeks)
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(serialized))
        return _jax.mlir.serialize_portable_artifact(module, version, False)


# === A train step ===


def write_training(folder, build, count):
    """Writes the train step of a recipe, and batches for it. Returns the entry of programs.json.

    The total number of steps of the learning rate schedule is a variable of the program. So a training can have any
    number of steps above the recipe's warm-up steps, which are fixed.

    Args:
        folder: new folder for the files.
        build: function without arguments that returns (task, training, optimizer).
        count: number of batches to write.

    Raises:
        InputError: the task is a detector's or a translator's, or the learning rate has no number of steps.
    """
    task, training, optimizer = build()
    if task.counted:  # a translator has no images, and `_packed` would round a detector's boxes to float16
        raise InputError(f"{task.model.name}: the training of a detector or translator cannot be exported")
    schedule = optimizer.learning_rate
    if not hasattr(schedule, "steps"):
        raise InputError("the recipe's learning rate has no number of steps; expected @WarmupPoly() or @WarmupCosine()")
    dataset = task.train_dataset(training.batch, training.seed)
    spec = dataset.element_spec
    arrays = {
        f"{i}/{key}": _packed(key, value)
        for i, batch in enumerate(dataset.take(count).as_numpy_iterator())
        for key, value in batch.items()
    }
    keras.mixed_precision.set_global_policy(training.precision)
    model = task.build_model()
    optimizer = optimizer.build(model.trainable_variables)
    schedule.steps = tf.Variable(float(schedule.steps), trainable=False, name="total_steps")
    loop = TrainStep(task, model, optimizer, training, strategy=tf.distribute.get_strategy())

    def step(batch):
        results = loop.replica_gradients(batch)
        loop.replica_update(*results)
        return [*(results[0][name] for name in task.loss_names), tf.identity(optimizer.bad_step)]

    weights = weight_names(model)
    averages = dict(zip(map(id, model.trainable_variables), optimizer.averages))
    named = {name: averages.get(id(weight), weight) for name, weight in weights.items()}
    name = f"{task.model.name}_recipe"
    entry = _write(folder, name, step, [spec], variables={**named, "total_steps": schedule.steps})
    total = next(i for i, given in enumerate(entry["inputs"]) if given["weight"] == "total_steps")
    entry["inputs"][total]["weight"] = None
    names, batches = sorted(spec), f"{name}.batches.npz"
    entry["inputs"][names.index("image")] |= {"factor": 1 / PIXEL, "offset": -1.0}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    write_bytes(output_file(folder, batches, "the name of a program"), file.getvalue())
    card = make_card(task.model, task.num_classes, task.canvas, spec=task.spec, photo_scale=task.photo_scale)
    card = msgspec.structs.replace(card, parameters=count_parameters(model))
    return {
        **entry,
        "multiply_adds": None,  # not counted
        "trains": {
            "names": names,
            "losses": list(task.loss_names),  # the first outputs; the next output is the number of the bad step, or -1
            "warmup": schedule.warmup,
            "batches": batches,
            "total_steps": total,
            "card": msgspec.to_builtins(card),
        },
    }


def _packed(name, value):
    """Casts a batch's array to a smaller type: images to uint8, other numbers to float16 or small integers."""
    if name == "image":
        return np.clip(np.round((value + 1) * PIXEL), 0, 255).astype(np.uint8)
    if value.dtype.kind == "f":
        return value.astype(np.float16)
    return value.astype(np.min_scalar_type(value.max(initial=0)) if value.min(initial=0) >= 0 else value.dtype)


# === The command ===


class Export(Flags):
    export = Flag(str, "new folder for the programs, for another machine.", path=flags.NEW_FOLDER, needed=True)
    programs = Flag(list, "names of programs; by default all.", (), alone=("gin_file",))
    quick = Flag(bool, "small programs.", False, alone=("gin_file",))
    gin_file = flags.GIN_FILE.but(meaning="recipe whose train step is exported.")
    gin_binding = flags.GIN_BINDING.but(needs="gin_file")
    data_dir = flags.DATA_DIR.but(needs="gin_file")
    batches = Flag(int, "number of batches to write for a training.", 64, least=1, most=2**16, needs="gin_file")


def _main(given):
    """Writes programs, run.py and programs.json to --export."""
    programs, folder = find_programs(given.programs, given.quick), given.export.rstrip("/")
    tasks = [(program.name, write_program, program) for program in programs]
    if given.gin_file:
        recipe = recipes.read(given.gin_file, given.gin_binding)
        if not recipe.value(f"{recipe.task()}.data_dir"):
            given.need("data_dir")
        build = functools.partial(build_recipe, given.gin_file, given.gin_binding, given.data_dir)
        what = f"the training step of {' '.join(given.gin_file)}, {given.batches} batches"
        tasks = [(what, functools.partial(write_training, count=given.batches), build)]
    check_installed("--export wants", "analysis", "jax")
    make_folder(folder)
    entries = []
    for i, (name, write, what) in enumerate(tasks):
        with working(f"{name}: {i + 1} of {len(tasks)}, lowering"):
            entries.append(entry := alone(write, folder, what))
        write_list(folder, entries)  # after each program, because all of them take long
        size = os.path.getsize(os.path.join(folder, entry["file"])) / 2**20
        say(f"{entry['name']}: {counted(len(entry['inputs']), 'input')}, {size:.2f} MiB")
    say(f"on a machine with a GPU and jax: python {folder}/{SCRIPT} --help")


if __name__ == "__main__":
    app.run({"": (Export, _main)})
