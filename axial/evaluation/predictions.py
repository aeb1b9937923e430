"""Predictions for a stream of photos, from a model or from what it said before."""

import io
import itertools
import json
import os
import zipfile

import numpy as np
import tensorflow as tf

from axial.data import tfrecord
from axial.data.preprocess import restore
from axial.errors import InputError
from axial.postprocess import CLASS


class CheckpointPredictions:
    """Predictions of a model for a stream of `evaluation_example`s, batched over all replicas.

    Args:
        task: `PanopticTask`.
        model: its model.
        strategy: `tf.distribute` strategy that the model was made under.
        scales, flip: as of `canvas_maps`.
    """

    def __init__(self, task, model, strategy=None, scales=(1.0,), flip=False):
        def predict(images, widths):
            return task.segment(task.maps(model, images, widths, scales, flip))

        self._replicated = Replicated(predict, strategy)

    def __call__(self, examples):
        """Yields (example, dict of 'panoptic', 'semantic', 'instance' at the photo's size, 'score')."""
        for example, result in self._replicated(examples):
            yield example, full_size(result, example["content"], example["size"])


class Replicated:
    """A function of canvases that sees as many photos at a time as there are replicas.

    Args:
        function: of images [1, H, W, 3] and the photos' widths on them [1], to a dict of tensors.
        strategy: `tf.distribute` strategy.
    """

    def __init__(self, function, strategy=None):
        self.strategy = strategy or tf.distribute.get_strategy()
        function = tf.function(function, autograph=False)
        self._run = tf.function(lambda *x: self.strategy.run(function, x), autograph=False)

    def __call__(self, examples):
        """Yields (example, dict of its tensors, without the axis of images)."""
        examples = iter(examples)
        while waiting := list(itertools.islice(examples, self.strategy.num_replicas_in_sync)):
            yield from self._flush(waiting)

    def _flush(self, examples):
        def spread(value):
            def pick(context):
                return value(examples[min(context.replica_id_in_sync_group, len(examples) - 1)])

            return self.strategy.experimental_distribute_values_from_function(pick)  # repeats the last one

        results = self._run(spread(lambda e: e["image"][None]), spread(lambda e: e["content"][1:]))
        parts = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        for i, example in enumerate(examples):
            yield example, {k: v[i][0] for k, v in parts.items()}


def full_size(result, content, size):
    """One image's result on the canvas -> the same at the photo's own size."""
    maps = {k: restore(result[k], content, size) for k in ("panoptic", "semantic", "instance")}
    return {**maps, "score": result["score"]}


class NetworkOutputs:
    """The network's maps on the canvas, kept in a folder: one npz a photo, float32, 17 bytes a pixel.

    Args:
        task: `PanopticTask`.
        model: its model.
        folder: where the files go and are looked for; None keeps nothing.
        identity: dict that differs when the network would say something else.
        strategy, scales, flip: as of `CheckpointPredictions`.

    Raises:
        InputError: the folder's outputs have another identity.
    """

    def __init__(self, task, model, folder=None, identity=None, strategy=None, scales=(1.0,), flip=False):
        self.task, self.folder = task, folder

        def run(images, widths):
            return task.maps(model, images, widths, scales, flip)

        self._replicated = Replicated(run, strategy)
        if folder:
            check_identity(os.path.join(folder, "outputs.json"), identity, "--outputs_dir")

    def __call__(self, examples):
        """Yields (example, `canvas_maps` of it without the axis of images)."""
        for stored, group in itertools.groupby(examples, self._is_stored):
            yield from map(self._load, group) if stored else self._compute(group)

    def predictions(self, grouping):
        """Function of examples as `CheckpointPredictions` is one, grouped by a `PostprocessConfig`."""
        segment = self.segmenter(grouping)
        return lambda examples: ((example, segment(example, maps)) for example, maps in self(examples))

    def segmenter(self, grouping):
        """Function of an example and its maps: its prediction at the photo's own size."""
        segment = tf.function(lambda maps: self.task.segment(maps, grouping), autograph=False)

        def run(example, maps):
            result = segment({name: x[None] for name, x in maps.items()})
            return full_size({k: v[0] for k, v in result.items()}, example["content"], example["size"])

        return run

    def _path(self, example):
        name = os.path.splitext(example["image/file_name"].numpy().decode())[0]
        return os.path.join(self.folder, f"{name}.npz")

    def _is_stored(self, example):
        return bool(self.folder) and tf.io.gfile.exists(self._path(example))

    def _load(self, example):
        path = self._path(example)
        try:
            with tf.io.gfile.GFile(path, "rb") as file, np.load(file) as maps:
                maps = {name: tf.constant(maps[name]) for name in maps.files}
            maps[CLASS] = tf.cast(maps[CLASS], tf.int32)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: not the outputs of a network ({error}); delete it") from None
        return example, maps

    def _compute(self, examples):
        for example, maps in self._replicated(examples):
            if self.folder:
                arrays = {name: x.numpy() for name, x in maps.items()}
                arrays[CLASS] = arrays[CLASS].astype(np.min_scalar_type(self.task.spec.num_classes - 1))
                tfrecord.write_whole(self._path(example), lambda path: _save(path, arrays))
            yield example, maps


def _save(path, arrays):
    buffer = io.BytesIO()  # an archive is written back and forth, which not every file system can
    np.savez(buffer, **arrays)
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(buffer.getvalue())


def check_identity(path, identity, flag):
    """Writes `identity`, a dict, to a JSON file, or compares it with what is there.

    Raises:
        InputError: the file says something else; names the first difference.
    """
    identity = json.loads(json.dumps(identity))
    if not tf.io.gfile.exists(path):
        tfrecord.write_json(path, identity)
        return
    with tf.io.gfile.GFile(path) as file:
        compare_identity(path, json.load(file), identity, flag)


def compare_identity(path, found, wanted, flag):
    """InputError, naming the first difference, unless both dicts are the same."""
    for key, value in json.loads(json.dumps(wanted)).items():
        if found.get(key) != value:
            raise InputError(
                f"{path}: of another evaluation, its {key} is {found.get(key)!r} and not {value!r}; "
                f"delete it or choose another {flag}"
            )
