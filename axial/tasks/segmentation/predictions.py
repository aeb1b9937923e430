"""Predictions for a stream of photos: from a model, or from network outputs that are stored on disk."""

import collections
import dataclasses
import functools
import io
import itertools
import os
import typing
import zipfile

import numpy as np
import tensorflow as tf

from axial.data.preprocess import STRIDE, ScaledCanvas, is_whole
from axial.data.specs import DatasetSpec
from axial.data.streams import photo_of
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io.identity import check_identity
from axial.io.read import check_regular
from axial.io.write import output_folder, write_bytes
from axial.models.outputs import CLASS, PROBABILITY
from axial.tasks.replicated import Replicated, by_size
from axial.tasks.segmentation.grouping import PostprocessConfig, of_photo
from axial.tasks.segmentation.tiles import Tiling, join


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

        self._tiled, self._about = Tiled.of(task, grouping), dict(spec=task.spec, config=grouping or task.grouping)
        self._replicated = Replicated(predict, strategy, compiled=task.is_compiled())

    def __call__(self, examples):
        """Yields (example, dict of 'panoptic', 'semantic' and 'instance' at the photo's own size, and of 'score').

        Raises:
            InputError: a photo that `is_whole` or `join` refuses. The message names it.
        """
        return self._tiled(self._of_canvases, examples)

    def _of_canvases(self, examples):
        for example, result in self._replicated(examples):
            yield example, of_photo(result, example["content"], example["size"], **self._about)


@dataclasses.dataclass
class Tiled:
    """Predictions of photos of any size from those of photos that a canvas holds.

    With a `ScaledCanvas`, larger photos are cut into tiles, which are predicted as photos of their own and joined.

    Args:
        canvas: what `preprocess` puts photos on.
        example: function of a tile, uint8 [h, w, 3], that returns an example of it, for predictions.
        spec, grouping, instances: see `join`.
    """

    canvas: ScaledCanvas | tuple[int, int]
    example: typing.Callable
    spec: DatasetSpec
    grouping: PostprocessConfig
    instances: bool = True

    @classmethod
    def of(cls, task, grouping=None):
        """The one of a `PanopticTask`, with its own grouping or another one."""
        grouping = grouping or task.grouping
        return cls(task.canvases, task.example, task.spec, grouping, instances=task.instances)

    def __call__(self, predictions, examples):
        """Yields (example, prediction at the photo's own size).

        Args:
            predictions: function of examples, each of a photo or a tile that the canvas holds. It yields (example,
                prediction) in their order.
            examples: of photos of any size.

        Raises:
            InputError: see `CheckpointPredictions`.
        """
        for example, found in self.parts(predictions, examples):
            yield example, self.joined(example, found)

    def parts(self, predictions, examples):
        """Yields (example, iterator of the predictions of its tiles, or of its own one); see `__call__`.

        `joined` takes such an iterator, which is used up before the next example.
        """
        waiting = collections.deque()  # examples whose tiles have been asked for, with the numbers of these
        found = iter(predictions(self._pieces(examples, waiting)))
        for _, first in found:
            example, count = waiting.popleft()
            yield example, itertools.chain([first], (result for _, result in itertools.islice(found, count - 1)))

    def _pieces(self, examples, waiting):
        for example in examples:
            tiling = self._tiling(example)
            waiting.append((example, len(tiling.boxes) if tiling else 1))
            if not tiling:
                yield example
                continue
            photo, about = np.asarray(photo_of(example)), {key: example[key] for key in ("image/id",) if key in example}
            for number, box in enumerate(tiling.boxes):
                yield {**self.example(tf.constant(photo[box])), "tile": number, **about}

    def joined(self, example, found, grouping=None):
        """The prediction of an example from the predictions of its tiles, or from its own one."""
        tiling, name = self._tiling(example), _name(example)
        if not tiling:
            (result,) = found
            return result
        about = dict(spec=self.spec, grouping=grouping or self.grouping, instances=self.instances)
        try:
            return join(found, tiling, scale=self.canvas.scale, **about)
        except InputError as error:
            raise InputError(f"{name}: {error}" if name else str(error)) from None

    def _tiling(self, example):
        """`Tiling` of a photo that no canvas holds; None of others."""
        if not isinstance(self.canvas, ScaledCanvas) or is_whole(example["size"], self.canvas, _name(example)):
            return None
        size, stride = tuple(map(int, example["size"])), STRIDE / self.canvas.scale
        return Tiling(size, self.canvas.tile, self.canvas.overlap, stride)


def _name(example):
    return photo_name(example) if "image/file_name" in example else ""


# === Network outputs ===


class NetworkOutputs:
    """The network's maps on the canvas, before the grouping.

    Args: see `CheckpointPredictions`.
    """

    def __init__(self, task, model, strategy=None, *, scales=(1.0,), flip=False):
        self.task = task

        def maps(images, contents):
            return task.maps(model, images, contents[:, 1], scales=scales, flip=flip)

        self._replicated = Replicated(maps, strategy, compiled=task.is_compiled())

    def __call__(self, examples, store=None):
        """Yields (example, its `canvas_maps` without the batch axis).

        With an `OutputStore`, maps that it holds are read from it, and other maps are computed and saved in it.
        """
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
        segment, tiled = self.segmenter(), Tiled.of(self.task)

        def of_canvases(examples):
            return ((example, segment(example, maps)) for example, maps in self(examples, store))

        return functools.partial(tiled, of_canvases)

    def segmenter(self, grouping=None):
        """A function of an example and its maps. It returns the prediction at the photo's own size."""
        segment = by_size(lambda maps: self.task.segment(maps, grouping))
        about = dict(spec=self.task.spec, config=grouping or self.task.grouping)

        def run(example, maps):
            result = segment({name: x[None] for name, x in maps.items()})
            return of_photo({k: v[0] for k, v in result.items()}, example["content"], example["size"], **about)

        return run


class OutputStore:
    """Network outputs in a folder, one npz for each photo: FOLDER/SPEC-SPLIT/IMAGE_ID.npz, or IMAGE_ID-TILE.npz.

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
        if "tile" in example:
            return os.path.join(self.folder, f"{int(example['image/id'])}-{int(example['tile'])}.npz")
        return os.path.join(self.folder, f"{int(example['image/id'])}.npz")

    def holds(self, example):
        return tf.io.gfile.exists(self.path(example))

    def save(self, example, maps):
        arrays = {name: x.numpy() for name, x in maps.items()}
        probability = arrays.pop(PROBABILITY)
        present = np.array([c for c in np.unique(arrays[CLASS]) if self.spec.things[c]], np.int32)
        arrays |= {"present": present, PROBABILITY: probability[..., present]}
        arrays[CLASS] = arrays[CLASS].astype(np.min_scalar_type(self.spec.num_classes - 1))
        buffer = io.BytesIO()  # np.savez seeks back while it writes, which not every file system can do
        np.savez(buffer, **arrays)
        write_bytes(self.path(example), buffer.getvalue())

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
