"""The functions of axial-export, which run after the checks of the flags. Imports TensorFlow."""

import functools
import itertools
import os
import shlex

import msgspec
import numpy as np
import tensorflow as tf

from axial.cli import flags
from axial.data.converters.coco import sample_data_dir
from axial.data.objects import read_objects
from axial.data.preprocess import tile_size
from axial.data.specs import COCO
from axial.data.streams import decode_photo, evaluation_stream, name_damaged_records
from axial.data.tfrecord import find_splits, read_manifest
from axial.errors import InputError
from axial.io.read import read_json
from axial.io.show import counted, percent, say, working
from axial.io.write import new_folder
from axial.recipes import configuration
from axial.serving import export, files
from axial.serving.parity import NUMBERS, QUALITY, latency, map_differences, prediction_differences
from axial.serving.predictor import Predictor
from axial.weights import interchange
from axial.weights.card import write_page
from axial.weights.convert import input_hashes
from axial.weights.interchange import count_parameters, make_card, read_safetensors, write_safetensors
from axial.weights.restore import find_weights, load_weights
from axial.weights.source import LITE, ONNX, SUFFIX, resolve

COMPARED, RANGES = 4, 100  # number of photos for the comparison, and for int8's activation ranges
IN_FILE = ("tflite", "onnx")  # formats with the network in one file, for one canvas


def run(given):
    """Writes an export with its card, and compares the export with the checkpoint."""
    model_dir, output_dir = flags.as_path(given.model_dir), given.output_dir
    with working(f"building the network of {model_dir} and reading its weights"):
        task, model = configuration.restore_run(
            model_dir, given.checkpoint, bindings=given.gin_binding, average=given.average
        )
    if given.format in IN_FILE and (task.evaluator.takes == "text" or (given.maps and not task.evaluator.one_file)):
        form = f"--format={given.format}{' --maps' * given.maps}"
        raise InputError(f"{form}: not for {task.evaluator.name}; saved_model or safetensors")
    if given.jit_compile and not task.evaluator.one_file:
        raise InputError(f"--jit_compile: not for {task.evaluator.name}, whose network has no single canvas")
    card = _card(task, model, given)
    task, objects = configuration.exported(task), read_objects(resolve(model_dir).folder)
    if given.format == "safetensors":
        say(_write_safetensors(task, model, card, output_dir, objects=objects))
    else:
        photos = _photos(task, given)
        export.export(
            task,
            model,
            output_dir,
            write=functools.partial(_write_network, given, photos, card.license),
            extra=lambda folder: configuration.save(folder, task.spec, objects),
            check=lambda folder: _check(given, task, model, folder=folder, photos=photos, card=card, objects=objects),
        )
    say(f"exported {output_dir}")


def _write_network(given, photos, license, task, folded, folder):
    """Writes the folded network of a task in --format. The photos give the activation ranges for int8."""
    with working(f"writing {given.format} for {given.output_dir}"):
        if given.format == "saved_model":
            export.write_saved_model(task, folded, folder, given.jit_compile)
            return
        network = files.maps_network(folded, task.canvas) if given.maps else files.photo_network(task, folded)
        about = files.description(task, license)
        if given.format == "onnx":
            files.write_onnx(network, os.path.join(folder, ONNX), about=about)
        else:
            images = [task.example(tf.constant(photo))["image"] for photo in photos]
            files.write_lite(network, os.path.join(folder, LITE), about=about, precision=given.precision, images=images)


def _photos(task, given):
    """Inputs for the task's predictors, from the run's evaluation split or else from the samples."""
    try:
        folder = given.data_dir or task.data_dir
        (split,) = find_splits(folder, {"val": task.data.eval_split})
        examples = task.evaluator.examples(folder, split, task.spec)
    except InputError:
        if given.data_dir:
            raise
        if task.evaluator.takes == "text":
            return ["Two dogs run through the snow."]
        folder, split = sample_data_dir(), "val2017"
        examples = evaluation_stream(folder, split, COCO, lambda record: {"photo": decode_photo(record)})
    count = RANGES if given.precision == "int8" else COMPARED
    with name_damaged_records(folder, split):
        photos = [np.asarray(task.evaluator.given(example))[()] for example in itertools.islice(examples, count)]
    if (scale := task.scale) is not None:  # photos larger than the canvas are cropped
        height, width = (max(side, 1) for side in tile_size(task.canvas, scale))
        photos = [photo[:height, :width] for photo in photos]
    return photos


def _check(given, task, model, *, folder, photos, card, objects):
    """Compares an export with the checkpoint, and writes its card."""
    with working(f"comparing it with the checkpoint, on {counted(len(photos[:COMPARED]), task.evaluator.unit)}"):
        compared = _compared(task, model, configuration.load_export(folder), photos, in_file=given.format in IN_FILE)
    file = resolve(folder).file
    say(f"{compared}; {os.path.getsize(file) / 1e6:.1f} MB" if file else compared)
    outputs = files.FileModel(file).shapes if given.maps else None
    write_page(folder, card, given.format, task=task, outputs=outputs, objects=objects)


def _card(task, model, given):
    """The `WeightsCard` of a run, or of weights in a safetensors file."""
    paths = find_weights(given.checkpoint or flags.as_path(given.model_dir), given.average)
    # Training, scores and licence come from the card of a safetensors file, or from the run's best scores and data.
    told = read_safetensors(paths[0])[0] if paths[0].endswith(SUFFIX) else _run_card(task, given.data_dir, paths)
    card = make_card(task.model, task.num_classes, task.canvas, spec=task.spec, scale=task.scale)
    return msgspec.structs.replace(
        card,
        parameters=count_parameters(model),
        input=told.input,
        scores=told.scores,
        scored_split=told.scored_split,
        scored_photos=told.scored_photos,
        results=told.results,
        trained=told.trained,
        license=given.license or told.license,
        made=[*told.made, _command(given)],
    )


def _run_card(task, data_dir, prefixes):
    """The `WeightsCard` of a run's checkpoints, with its best scores and its data."""
    folder = os.path.dirname(prefixes[-1])
    best, scores = os.path.join(folder, "scores.json"), {}
    if tf.io.gfile.exists(best):
        scores = task.evaluator.headline(msgspec.to_builtins(read_json(best, task.best_scores)[1]))
    run = folder if os.path.basename(folder) != "best" else os.path.dirname(folder)
    is_run = tf.io.gfile.exists(os.path.join(run, "config.gin"))
    return msgspec.structs.replace(
        make_card(task.model, task.num_classes),
        scores=scores,
        scored_split=task.data.eval_split if scores else "",
        scored_photos=_records(task, data_dir, task.data.eval_split) if scores else 0,
        trained=interchange.CardSplit(task.data.train_split, _records(task, data_dir, task.data.train_split)),
        made=["axial-train --gin_file=RUN/config.gin --data_dir=DATA --model_dir=RUN"] if is_run else [],
        input={name: value for prefix in prefixes for name, value in input_hashes(f"{prefix}.").items()},
    )


def _records(task, data_dir, split):
    """Number of examples in a split of the run's data; 0 if the data is missing."""
    try:
        return read_manifest(data_dir or task.data_dir, split)["examples"]
    except InputError:
        return 0


def _command(given):
    """The command that makes the export, for its card, with placeholders for folders."""
    named = given.changed("format", "jit_compile", "precision", "average", "maps")
    options = [f" --{name}={value}" for name, value in named.items()]
    bindings = [f" --gin_binding={shlex.quote(binding)}" for binding in given.gin_binding]
    return "".join(["axial-export --model_dir=RUN --output_dir=FOLDER", *options, *bindings])


def _write_safetensors(task, model, card, output_dir, *, objects):
    """Writes the weights and their card, reads the weights back, and returns a line about the comparison."""
    name = task.model.name + SUFFIX
    with new_folder(output_dir, name) as folder:
        path = os.path.join(folder, name)
        card = write_safetensors(model, path, card)
        configuration.save(folder, task.spec, objects)
        write_page(folder, card, "safetensors", task=task, objects=objects)
        again, _ = load_weights(path)
        if not all(np.array_equal(a, b) for a, b in zip(model.get_weights(), again.get_weights(), strict=True)):
            raise RuntimeError("the weights of the file differ from the checkpoint's")
    return f"against the checkpoint: all {len(model.weights)} tensors are equal"


def _compared(task, model, predictor, photos, *, in_file):
    """A line that says how the export differs from the checkpoint, and how long a photo takes."""
    photos = photos[:COMPARED]
    differences = prediction_differences(Predictor.of_task(task, model), predictor, photos)
    quality = differences.pop(QUALITY, None)
    unit, what = task.evaluator.unit, "objects" if "box" in differences else "pixels"
    what = "sentences" if task.evaluator.takes == "text" else what
    parts = [
        f"{name} differs by {value:.1e}" if name in NUMBERS else f"{name} equal on {100 * value:.2f} % of {what}"
        for name, value in differences.items()
    ]
    if quality is not None:
        parts.append(f"PQ of its segments against the checkpoint's {percent(quality)}")
    seconds = f"{1000 * latency(predictor, photos[0]):.0f} ms a {unit}"
    folded = export.folded_model(task, model) if in_file or task.evaluator.one_file else None
    if task.evaluator.one_file:  # a prediction's labels do not show NaN in a map
        maps = map_differences(task, model, predictor.model or folded, photos)
        if predictor.model:
            parts += [f"{name} differs by {value:.1e} of the largest value" for name, value in maps.items()]
    if in_file:
        server = export.Server(task, folded)  # a reference, because the tf.function of its method keeps none
        seconds += f", a SavedModel {1000 * latency(server.image, photos[0]):.0f} ms"
    return f"against the checkpoint, on {counted(len(photos), unit)}: {'; '.join([*parts, seconds])}"
