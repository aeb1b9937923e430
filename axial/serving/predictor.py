"""Predictions of a SavedModel or a run for photos, and their segments as JSON."""

import os

import numpy as np
import tensorflow as tf
from PIL import ImageOps
from scipy.ndimage import find_objects

from axial.data.files import to_rgb
from axial.data.preprocess import preprocess
from axial.data.specs import DatasetSpec
from axial.data.streams import decode_photo
from axial.errors import InputError
from axial.evaluation.predictions import CheckpointPredictions
from axial.io.read import first_line, open_image, read_file, read_json
from axial.io.write import folder_digests
from axial.serving.export import HASHES


class Predictor:
    """A loaded export.

    Args:
        path: folder that axial-export wrote.

    Raises:
        InputError: the folder is not an export.
    """

    def __init__(self, path):
        spec = os.path.join(path, "assets.extra", "spec.json")
        if not tf.io.gfile.exists(spec):
            raise InputError(f"{path}: not a SavedModel of axial-export, it has no assets.extra/spec.json")
        self.spec = DatasetSpec.read(spec)
        _check_hashes(path)
        try:
            self._loaded = tf.saved_model.load(path)
            self._image = self._loaded.signatures["image"]
            self.canvas = tuple(self._loaded.signatures["classes"]()["canvas"].numpy().tolist())
        except Exception as error:  # whatever TensorFlow raises for a damaged graph or damaged variables
            raise InputError(f"{path}: not a whole SavedModel of axial-export ({first_line(error)})") from None

    def __call__(self, image):
        """dict of 'panoptic', 'semantic', 'instance' [h, w] and 'score' for an image, uint8 [h, w, 3]."""
        return {k: v.numpy() for k, v in self._image(image=tf.constant(image)).items()}

    def examples(self, examples):
        """Yields (example, prediction) for `evaluation_example`s, in the form that the evaluator takes."""
        for example in examples:
            # The pixels as they are stored: the labels of data sets belong to these, whatever the EXIF tag says.
            yield example, self._image(image=decode_photo(example))


def _check_hashes(path):
    """Raises InputError unless every file of an export has the bytes that were exported. Old exports have no hashes."""
    hashes = os.path.join(path, HASHES)
    if not tf.io.gfile.exists(hashes):
        return
    written, found = read_json(hashes, dict[str, str])[1], folder_digests(path, leave=(HASHES,))
    for name in sorted({*written, *found}):
        if written.get(name) != found.get(name):
            known = {name not in found: "missing", name not in written: "not a file of the export"}
            raise InputError(f"{os.path.join(path, name)}: {known.get(True, 'changed since the export')}; export again")


class RunPredictor:
    """A trained model that predicts at several scales, optionally with mirror images.

    Args:
        task, model: task and model of a run.
        scales, flip: see `canvas_maps`.
    """

    def __init__(self, task, model, scales=(1.0,), flip=False):
        self.spec, self._canvas = task.spec, task.canvas
        self._predictions = CheckpointPredictions(task, model, scales=scales, flip=flip)

    def __call__(self, image):
        """See `Predictor`."""
        canvas, content = preprocess(tf.constant(image), self._canvas)
        example = {"image": canvas, "content": content, "size": tf.constant(image.shape[:2])}
        ((_, result),) = self._predictions([example])
        return {k: v.numpy() for k, v in result.items()}


def load_photo(path):
    """Reads a photo of any format as uint8 [h, w, 3], rotated as its EXIF tag says.

    Raises:
        InputError: the file is missing, cut short or not an image.
    """
    image = open_image(path, read_file(path))
    return np.asarray(to_rgb(ImageOps.exif_transpose(image)))


def segments_json(table, spec):
    """List of the segments of a `segment_table`: class, score, area and box (x, y, width, height)."""
    segments, classes, scores = table
    area = np.bincount(segments.ravel(), minlength=len(classes) + 1)
    boxes = find_objects(segments, len(classes))
    return [
        {
            "id": i + 1,
            "class": spec.class_names[index],
            "category_id": int(spec.category_ids[index]),
            "thing": bool(spec.things[index]),
            "score": round(float(score), 4),
            "area": int(area[i + 1]),
            "box": [x.start, y.start, x.stop - x.start, y.stop - y.start],
        }
        for i, (index, score, (y, x)) in enumerate(zip(classes, scores, boxes))
    ]
