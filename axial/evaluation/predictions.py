"""Predictions for a stream of photos: from a model, or from network outputs that are stored on disk."""

import functools
import io
import itertools
import json
import os
import typing
import zipfile

import numpy as np
import tensorflow as tf

from axial.data.preprocess import ScaledCanvas, check_fits, full_size
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io.read import check_regular, read_json
from axial.io.write import output_folder, write_json, write_whole
from axial.layers.device import local_replicas
from axial.outputs import CLASS, PROBABILITY


class CheckpointPredictions:
    """Predictions of a model for a stream of `evaluation_example`s, batched over all replicas.

    Args:
        task: `PanopticTask`.
        model: its model.
        strategy: `tf.distribute` strategy that the model was made under.
        scales, flip: see `canvas_maps`.
        grouping: `PostprocessConfig`; by default the task's own.
    """

    def __init__(self, task, model, strategy=None, *, scales=(1.0,), flip=False, grouping=None):
        def predict(images, contents):
            return task.segment(task.maps(model, images, contents[:, 1], scales=scales, flip=flip), grouping)

        self._task, self._replicated = task, Replicated(predict, strategy)

    def __call__(self, examples):
        """Yields (example, dict of 'panoptic', 'semantic' and 'instance' at the photo's own size, and of 'score')."""
        for example, result in self._replicated(fitting(examples, self._task.canvases)):
            yield example, full_size(result, example["content"], example["size"])


def fitting(examples, canvas):
    """Yields the examples. Raises InputError, which names the photo, where `check_fits` refuses one."""
    for example in examples:
        if isinstance(canvas, ScaledCanvas):
            check_fits(example["size"], canvas, photo_name(example) if "image/file_name" in example else "")
        yield example


class Replicated:
    """Runs a function of canvases on all replicas.

    Canvases of one size run together.

    Args:
        function: function of images [batch, H, W, 3] and the sizes [batch, 2] of the photos on them; returns a dict of
            tensors.
        strategy: `tf.distribute` strategy.
        batch: photos on each replica.
    """

    def __init__(self, function, strategy=None, batch=1):
        self.strategy, self.batch = strategy or tf.distribute.get_strategy(), batch
        self.together = local_replicas(self.strategy) * batch  # of several workers, one evaluates
        function = tf.function(function, autograph=False)
        self._run = by_size(lambda *x: self.strategy.run(function, x))

    def __call__(self, examples):
        """Yields (example, dict of its tensors, without the batch axis)."""
        examples = iter(examples)
        while waiting := list(itertools.islice(examples, self.together)):
            of_size = {}
            for example in waiting:
                of_size.setdefault(tuple(example["image"].shape), []).append(example)
            found = {size: self._flush(alike) for size, alike in of_size.items()}
            yield from (next(found[tuple(example["image"].shape)]) for example in waiting)

    def _flush(self, examples):
        def spread(value):
            def pick(context):  # repeats the last example if there are too few
                first = context.replica_id_in_sync_group * self.batch
                chosen = (examples[min(first + i, len(examples) - 1)] for i in range(self.batch))
                return tf.stack([value(example) for example in chosen])

            return self.strategy.experimental_distribute_values_from_function(pick)

        results = self._run(spread(lambda e: e["image"]), spread(lambda e: e["content"]))
        parts = {k: self.strategy.experimental_local_results(v) for k, v in results.items()}
        for i, example in enumerate(examples):
            yield example, {k: v[i // self.batch][i % self.batch] for k, v in parts.items()}


def by_size(function):
    """A function that is traced once for each size of its tensors.

    Args:
        function: function of tensors, or of dicts of tensors. Those of one call have one size; replicas have the same.
    """

    @functools.cache
    def graph(shapes):
        return tf.function(functools.partial(function), autograph=False)  # one for all would warn of many traces

    def run(*arguments):
        values = tf.nest.flatten(arguments, expand_composites=True)
        return graph(tuple(tuple(x.shape) for x in values))(*arguments)

    return run


# === Network outputs ===


class NetworkOutputs:
    """The network's maps on the canvas, before the grouping.

    Args: see `CheckpointPredictions`.
    """

    def __init__(self, task, model, strategy=None, *, scales=(1.0,), flip=False):
        self.task = task
        self._replicated = Replicated(
            lambda images, contents: task.maps(model, images, contents[:, 1], scales=scales, flip=flip), strategy
        )

    def __call__(self, examples, store=None):
        """Yields (example, its `canvas_maps` without the batch axis).

        With an `OutputStore`, maps that it holds are read from it, and other maps are computed and saved in it.
        """
        examples = fitting(examples, self.task.canvases)
        if store is None:
            yield from self._replicated(examples)
            return
        for is_stored, group in itertools.groupby(examples, store.holds):
            if is_stored:
                yield from ((example, store.load(example)) for example in group)
                continue
            for example, maps in self._replicated(group):
                store.save(example, maps)
                yield example, maps

    def predictions(self, store=None):
        """A function of examples, like a `CheckpointPredictions`."""
        segment = self.segmenter()
        return lambda examples: ((example, segment(example, maps)) for example, maps in self(examples, store))

    def segmenter(self, grouping=None):
        """A function of an example and its maps. It returns the prediction at the photo's own size."""
        segment = by_size(lambda maps: self.task.segment(maps, grouping))

        def run(example, maps):
            result = segment({name: x[None] for name, x in maps.items()})
            return full_size({k: v[0] for k, v in result.items()}, example["content"], example["size"])

        return run


class OutputStore:
    """Network outputs in a folder, one npz for each photo: FOLDER/SPEC-SPLIT/IMAGE_ID.npz.

    Only the probabilities that a score can need are kept: those of the thing classes that are predicted for some pixel
    of the photo.

    Args:
        folder: parent of the splits' folders.
        spec: `DatasetSpec`.
        split: name of the split.
        identity: dict that differs if the network, its input or the data differ.

    Raises:
        InputError: the folder holds outputs of another identity; the name of the spec or the split leaves it.
    """

    def __init__(self, folder, spec, split, identity):
        self.spec, self.folder = spec, output_folder(folder, f"{spec.name}-{split}", "the spec's name, --split")
        check_identity(os.path.join(self.folder, "outputs.json"), identity, "--outputs_dir")

    def path(self, example):
        return os.path.join(self.folder, f"{int(example['image/id'])}.npz")

    def holds(self, example):
        return tf.io.gfile.exists(self.path(example))

    def save(self, example, maps):
        arrays = {name: x.numpy() for name, x in maps.items()}
        probability = arrays.pop(PROBABILITY)
        present = np.array([c for c in np.unique(arrays[CLASS]) if self.spec.things[c]], np.int32)
        arrays |= {"present": present, PROBABILITY: probability[..., present]}
        arrays[CLASS] = arrays[CLASS].astype(np.min_scalar_type(self.spec.num_classes - 1))
        write_whole(self.path(example), lambda path: _save(path, arrays))

    def load(self, example):
        path = self.path(example)
        check_regular(path)
        try:
            with tf.io.gfile.GFile(path, "rb") as file, np.load(file) as stored:
                arrays = {name: stored[name] for name in stored.files}
            present, of_present = arrays.pop("present"), arrays[PROBABILITY]
            arrays[PROBABILITY] = np.zeros([*of_present.shape[:2], self.spec.num_classes], np.float32)
            arrays[PROBABILITY][..., present] = of_present
            arrays[CLASS] = arrays[CLASS].astype(np.int32)
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: not the outputs of a network ({error}); delete it") from None
        return {name: tf.constant(x) for name, x in arrays.items()}


def _save(path, arrays):
    buffer = io.BytesIO()  # np.savez seeks back while it writes, which not every file system can do
    np.savez(buffer, **arrays)
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(buffer.getvalue())


# === Identities ===


def check_identity(path, identity, flag):
    """Writes `identity`, a dict, to a JSON file, or compares it with what is there.

    Raises:
        InputError: the file holds another identity. The message names the first difference.
    """
    if not tf.io.gfile.exists(path):
        write_json(path, identity)
        return
    compare_identity(path, read_json(path, dict[str, typing.Any])[1], identity, flag)


def compare_identity(path, found, wanted, flag):
    """Raises InputError, which names the first difference, unless `found` has every entry of `wanted`."""
    place, there, here = [], found, json.loads(json.dumps(wanted))
    while isinstance(there, dict) and isinstance(here, dict):
        differing = [key for key, value in here.items() if there.get(key) != value]
        if not differing:
            return
        place.append(differing[0])
        there, here = there.get(place[-1]), here[place[-1]]
    raise InputError(
        f"{path}: of another evaluation, its {'.'.join(place)} is {there!r} and not {here!r}; delete it or choose "
        f"another {flag}"
    )
