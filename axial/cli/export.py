"""Writes an export from a run: its network without batch norms, as a SavedModel or in one file.

%s --model_dir=RUN --output_dir=EXPORT                                  a SavedModel for photos of any size
%s --model_dir=RUN --output_dir=EXPORT --jit_compile                    its network is compiled by XLA
%s --model_dir=RUN --output_dir=EXPORT --format=tflite                  TFLite, float32
%s --model_dir=RUN --output_dir=EXPORT --format=tflite --precision=int8 --data_dir=DATA
%s --model_dir=RUN --output_dir=EXPORT --format=onnx
%s --model_dir=RUN --output_dir=EXPORT --average=5      the mean of the run's last five checkpoints
%s --model_dir=RUN --output_dir=WEIGHTS --format=safetensors      for axial.load

A TFLite or ONNX file takes one canvas and returns the network's maps. axial-predict and axial-evaluate add the scaling
and the grouping. At its end the command compares the export with the checkpoint on a few photos. It deletes an export
that gives NaN or infinite numbers. The SavedModel of a translator takes texts; loading it needs tensorflow_text.

Each export has a card, README.md: input and output, scores and their splits, licence, commands. The scores are those
that chose the checkpoint. --scores adds what axial-evaluate --json wrote, and --license the licence of the weights.

If the run has a DataConfig.photo_scale, the export scales photos by it too, and has only the largest canvas.
axial-predict and axial-evaluate cut larger photos into tiles. The signatures of a SavedModel refuse larger photos.
"""

import functools
import itertools
import os
import shlex
import sys

from axial.cli import app, flags
from axial.cli.checks import check_checkpoint, check_run
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed
from axial.io.gfile import check_plain
from axial.io.read import read_json
from axial.io.show import counted, percent, say, working
from axial.io.write import new_folder
from axial.weights.source import LITE, ONNX, SUFFIX, resolve

COMPARED, RANGES = 4, 100  # photos


class Export(Flags):
    model_dir = flags.MODEL_DIR.but(
        meaning="a run of axial-train (its best checkpoint, else its latest), or the name of a shipped model.",
        needed=True,
    )
    checkpoint = flags.CHECKPOINT
    average = flags.AVERAGE
    output_dir = Flag(str, "folder of the export; must not exist.", path=flags.NEW_FOLDER, needed=True)
    format = Flag(str, "what to write.", "saved_model", choices=("saved_model", "tflite", "onnx", "safetensors"))
    jit_compile = Flag(bool, "XLA compiles the network of the SavedModel when it is first called.", False)
    precision = Flag(str, "type of the weights in a TFLite file.", "float32", choices=("float32", "float16", "int8"))
    data_dir = flags.DATA_DIR
    gin_binding = flags.GIN_BINDING
    license = Flag(str, "licence of the weights for the card, as the hub writes it, like cc-by-4.0.")
    scores = Flag(str, "for the card, what axial-evaluate --json wrote of the checkpoint.", path=flags.IN_FILE)

    def check(self):
        if self.precision != "float32" and self.format != "tflite":
            raise InputError(f"--precision={self.precision} needs --format=tflite")
        if self.jit_compile and self.format != "saved_model":
            raise InputError(f"--jit_compile does not go with --format={self.format}: it is for a SavedModel")
        if self.format == "safetensors" and self.data_dir:
            raise InputError("--data_dir does not go with --format=safetensors: its tensors are compared, not photos")
        if self.format == "onnx":
            check_installed("ONNX needs", "onnx", "tf2onnx", "onnxruntime")
        if self.format == "saved_model":
            check_plain(self.output_dir)

    @property
    def in_file(self):
        """Whether the network is written to one file, for one canvas."""
        return self.format in ("tflite", "onnx")


def _main(given: Export):
    model_dir, output_dir = flags.as_path(given.model_dir), given.output_dir
    check_run(given.model_dir, given.gin_binding)
    check_checkpoint(given.checkpoint)

    from axial import configuration
    from axial.serving.export import export

    app.silence_xla()
    with working(f"building the network of {model_dir} and reading its weights"):
        task, model = configuration.restore_run(
            model_dir, given.checkpoint, bindings=given.gin_binding, average=given.average
        )
    if given.in_file and not task.evaluation.one_file:
        raise InputError(f"--format={given.format}: not for {task.evaluation.name}; saved_model or safetensors")
    if given.jit_compile and not task.evaluation.one_file:
        raise InputError(f"--jit_compile: not for {task.evaluation.name}, whose network has no single canvas")
    card = _card(task, model, given)
    task.one_canvas = True  # as exports have, and what they are compared with
    if given.format == "safetensors":
        say(_write_safetensors(task, model, card, output_dir))
    else:
        photos = _photos(task, given)
        export(
            task,
            model,
            output_dir,
            write=functools.partial(_write_network, given, photos),
            extra=lambda folder: configuration.save(folder, task.spec, task.objects),
            check=lambda folder: _check(given, task, model, folder=folder, photos=photos, card=card),
        )
    say(f"exported {output_dir}")


def _write_network(given, photos, task, folded, folder):
    """Writes the folded network of a task in --format; the ranges of int8 are those of the photos."""
    import tensorflow as tf

    from axial.serving import export, files

    with working(f"writing {given.format} for {given.output_dir}"):
        if given.format == "saved_model":
            (export.write_compiled if given.jit_compile else export.write_saved_model)(task, folded, folder)
        elif given.format == "onnx":
            files.write_onnx(folded, task.canvas, os.path.join(folder, ONNX))
        else:
            images = [task.example(tf.constant(photo))["image"] for photo in photos]
            path = os.path.join(folder, LITE)
            files.write_lite(folded, task.canvas, path, precision=given.precision, images=images)


def _photos(task, given):
    """What the task's predictors take, of the split that the run evaluates or, without that, a sample."""
    import numpy as np

    from axial.data.converters.coco import sample_data_dir
    from axial.data.preprocess import tile_size
    from axial.data.specs import COCO
    from axial.data.streams import decode_photo, evaluation_stream, name_damaged_records
    from axial.data.tfrecord import find_splits

    try:
        folder = given.data_dir or task.data_dir
        (split,) = find_splits(folder, {"val": task.data.eval_split})
        examples = task.evaluation.examples(folder, split, task.spec, task.canvas)
    except InputError:
        if given.data_dir:
            raise
        if task.evaluation.takes == "text":
            return ["Two dogs run through the snow."]
        folder, split = sample_data_dir(), "val2017"
        examples = evaluation_stream(folder, split, COCO, lambda record: {"photo": decode_photo(record)})
    count = RANGES if given.precision == "int8" else COMPARED
    with name_damaged_records(folder, split):
        photos = [np.asarray(task.evaluation.given(example))[()] for example in itertools.islice(examples, count)]
    if (scale := task.photo_scale) is not None:  # of a larger photo, what the canvas holds
        height, width = (max(side, 1) for side in tile_size(task.canvas, scale))
        photos = [photo[:height, :width] for photo in photos]
    return photos


def _check(given, task, model, *, folder, photos, card):
    """Compares an export with the checkpoint, and writes its card."""
    from axial.configuration import load_export
    from axial.serving.files import FileModel
    from axial.weights.card import write_page

    with working(f"comparing it with the checkpoint, on {counted(len(photos[:COMPARED]), task.evaluation.unit)}"):
        compared = _compared(task, model, load_export(folder), photos, in_file=given.in_file)
    say(compared)
    outputs = FileModel(resolve(folder).file).shapes if given.in_file else None
    write_page(folder, card, given.format, task=task, outputs=outputs)


def _card(task, model, given):
    """The `WeightsCard` of a run's model, or of one whose weights are a safetensors file."""
    from axial.weights.interchange import count_parameters, make_card
    from axial.weights.restore import find_weights

    files = find_weights(given.checkpoint or flags.as_path(given.model_dir), given.average)
    known = _of_file(files[0]) if files[0].endswith(SUFFIX) else _of_checkpoints(task, given.data_dir, files)
    known["results"] += _results(task, given)
    known["made"] += [_command(given)]
    return make_card(
        task.model,
        task.spec,
        task.canvas,
        photo_scale=task.photo_scale,
        num_classes=task.num_classes,
        parameters=count_parameters(model),
        **known | ({"license": given.license} if given.license else {}),
    )


def _of_file(path):
    """What the card of a safetensors file says of its training, its scores and its licence, as fields of a card."""
    from axial.weights.interchange import read_safetensors

    card = read_safetensors(path)[0]
    names = ("scores", "scored_split", "scored_photos", "results", "trained", "license", "made", "input")
    return {name: getattr(card, name) for name in names}


def _of_checkpoints(task, data_dir, prefixes):
    """The same fields for checkpoints of a run, from its best scores and its data."""
    import msgspec
    import tensorflow as tf

    from axial.weights.convert import input_hashes

    folder = os.path.dirname(prefixes[-1])
    best, scores = os.path.join(folder, "scores.json"), {}
    if tf.io.gfile.exists(best):
        scores = task.evaluation.headline(msgspec.to_builtins(read_json(best, task.best_scores)[1]))
    run = folder if os.path.basename(folder) != "best" else os.path.dirname(folder)
    is_run = tf.io.gfile.exists(os.path.join(run, "config.gin"))
    return {
        "scores": scores,
        "scored_split": task.data.eval_split if scores else "",
        "scored_photos": _records(task, data_dir, task.data.eval_split) if scores else 0,
        "results": [],
        "trained": {"split": task.data.train_split, "photos": _records(task, data_dir, task.data.train_split)},
        "made": ["axial-train --gin_file=RUN/config.gin --data_dir=DATA --model_dir=RUN"] if is_run else [],
        "input": {name: value for prefix in prefixes for name, value in input_hashes(f"{prefix}.").items()},
    }


def _records(task, data_dir, split):
    """Number of records of a split of the run's data; 0 where the data is not at hand."""
    from axial.data.tfrecord import read_manifest

    try:
        return read_manifest(data_dir or task.data_dir, split)["examples"]
    except InputError:
        return 0


def _results(task, given):
    """The main scores in the file of --scores, for `CardScores`. Raises InputError."""
    if not given.scores:
        return []
    found = read_json(given.scores, dict[str, dict])[1]
    try:
        scores = {split: task.evaluation.headline(result) for split, result in found.items()}
    except (KeyError, TypeError):
        raise InputError(
            f"--scores={given.scores}: not what axial-evaluate --json writes of {task.evaluation.name}"
        ) from None
    numbers = {name: _records(task, given.data_dir, name) for name in scores}
    return [{"split": name, "photos": numbers[name], "scores": value} for name, value in scores.items()]


def _command(given):
    """The command that makes the export, for its card. Folders have names that stand for them."""
    named = [name for name in ("format", "jit_compile", "precision", "average") if given.has(name)]
    options = [f" --{name}={getattr(given, name)}" for name in named]
    bindings = [f" --gin_binding={shlex.quote(binding)}" for binding in given.gin_binding]
    return "".join(["axial-export --model_dir=RUN --output_dir=FOLDER", *options, *bindings])


def _write_safetensors(task, model, card, output_dir):
    """Writes the weights with their card, reads them again, and returns a line that says what was compared."""
    import numpy as np

    from axial import configuration
    from axial.weights.card import write_page
    from axial.weights.interchange import write_safetensors
    from axial.weights.loading import load_weights

    name = task.model.name + SUFFIX
    with new_folder(output_dir, name) as folder:
        path = os.path.join(folder, name)
        card = write_safetensors(model, path, card)
        configuration.save(folder, task.spec, task.objects)
        write_page(folder, card, "safetensors", task=task)
        again, _ = load_weights(path)
        equal = all(np.array_equal(a, b) for a, b in zip(model.get_weights(), again.get_weights(), strict=True))
        if not equal:
            raise RuntimeError("the weights of the file are not those of the checkpoint")
    return f"against the checkpoint: all {len(model.weights)} tensors are equal"


def _compared(task, model, predictor, photos, *, in_file):
    """A line on how the export differs from the checkpoint, and how long a photo takes."""
    from axial.serving.export import Server, folded_model
    from axial.serving.parity import NUMBERS, QUALITY, latency, map_differences, prediction_differences
    from axial.serving.predictor import Predictor

    photos = photos[:COMPARED]
    found = prediction_differences(Predictor.of_task(task, model), predictor, photos)
    quality = found.pop(QUALITY, None)
    unit, what = task.evaluation.unit, "objects" if "box" in found else "pixels"
    what = "sentences" if task.evaluation.takes == "text" else what
    parts = [
        f"{name} differs by {value:.1e}" if name in NUMBERS else f"{name} equal on {100 * value:.2f} % of {what}"
        for name, value in found.items()
    ]
    if quality is not None:
        parts.append(f"PQ of its segments against the checkpoint's {percent(quality)}")
    seconds = f"{1000 * latency(predictor, photos[0]):.0f} ms a {unit}"
    if task.evaluation.one_file:  # the labels of a prediction do not show that a map is NaN
        folded = folded_model(task, model)
        maps = map_differences(task, model, predictor.model if in_file else folded, photos)
        if in_file:
            parts += [f"{name} differs by {value:.1e} of the largest value" for name, value in maps.items()]
            server = Server(task, folded)  # a tf.function does not keep the object that it is a method of
            seconds += f", a SavedModel {1000 * latency(server.image, photos[0]):.0f} ms"
    return f"against the checkpoint, on {counted(len(photos), unit)}: {'; '.join([*parts, seconds])}"


def main():
    app.run(_main, sys.modules[__name__])
