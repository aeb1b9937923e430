"""Compares an ONNX or TFLite file of axial-export with the SavedModel, pixel by pixel, on photos of many sizes.

    python experiments/speed/equal_files.py --model_dir=nuclei --format=onnx
    python experiments/speed/equal_files.py --model_dir=nuclei --format=onnx --gin_binding='DataConfig.photo_scale=None'

The second command fits each photo to the canvas, so that the model takes photos of any size.

The photos are real: parts of the sample photos of nuclei, and mirrored repetitions of them for larger sizes. The sizes
are fixed odd ones (1x1, 1x300, ...) and then random ones, from 1 pixel to the largest that the model takes in one
piece. A pixel whose two largest logits differ by less than `TIE` of the logits' range is a tie, which rounding may
decide either way.
"""

import os
import sys
import tempfile

import numpy as np
import tensorflow as tf
from absl import app, flags

from axial.data.converters.nuclei import nuclei_data_dir
from axial.data.preprocess import restore, tile_size
from axial.data.streams import decode_photo
from axial.io.show import progress, say
from axial.models.outputs import SEMANTIC
from axial.recipes import configuration
from axial.serving import export, files
from axial.tasks.segmentation.canvas_maps import upsample

TIE = 1e-5
LARGEST = 2000, 3000  # of a model that takes photos of any size
SIZES = ((1, 1), (1, 300), (300, 1), (2, 2), (3, 7), (17, 401), (255, 257), (256, 256), (427, 427), (2000, 3000))

FLAGS = flags.FLAGS
flags.DEFINE_string("model_dir", "nuclei", "a run of axial-train, or the name of a shipped model.")
flags.DEFINE_enum("format", "onnx", ["onnx", "tflite"], "format of the file.")
flags.DEFINE_multi_string("gin_binding", [], "bindings that replace the run's own.")
flags.DEFINE_integer("photos", 200, "number of photos.")


def sizes(task, count):
    """List of (height, width): the `SIZES` that fit, then random ones."""
    most = LARGEST if task.scale is None else tile_size(task.canvas, task.scale)
    chosen = [size for size in SIZES if size[0] <= most[0] and size[1] <= most[1]]
    random = np.random.default_rng(0).random([count, 2])
    # Most photos are small, so that the large ones do not take all of the time.
    chosen += [tuple(int(1 + side * x**2) for side, x in zip(most, pair)) for pair in random]
    return chosen[:count]


def photo_of(sources, size, number):
    """A part of a real photo, uint8 [*size, 3]. Mirrored copies continue a photo that is too small."""
    source = sources[number % len(sources)]
    while any(side < least for side, least in zip(source.shape, size)):
        axis = int(np.argmin(np.divide(source.shape[:2], size)))
        source = np.concatenate([source, np.flip(source, axis)], axis)
    rng = np.random.default_rng(number)
    top, left = (int(rng.integers(side - least + 1)) for side, least in zip(source.shape, size))
    return np.ascontiguousarray(source[top : top + size[0], left : left + size[1]])


def ties(task, folded, photo):
    """bool [h, w]: the pixels whose two largest logits are nearly equal."""
    example = task.example(tf.constant(photo))
    logits = upsample(folded(example["image"][None]), task.canvas)[SEMANTIC][0]
    first, second = tf.unstack(tf.math.top_k(logits, 2)[0], axis=-1)
    near = first - second < TIE * (tf.reduce_max(logits) - tf.reduce_min(logits))
    return restore(tf.cast(near, tf.int32), example["valid_size"], photo.shape[:2]).numpy() > 0


def main(_):
    task, model = configuration.restore_run(FLAGS.model_dir, bindings=FLAGS.gin_binding)
    task = configuration.exported(task)
    folded = export.folded_model(task, model)
    sources = [decode_photo(example).numpy() for example in task.eval_dataset("test", nuclei_data_dir())]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"model.{FLAGS.format}")
        write = files.write_onnx if FLAGS.format == "onnx" else files.write_lite
        write(files.photo_network(task, folded), path)
        file = files.FileModel(path)
        say(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB")
    server = export.Server(task, folded)
    pixels = unequal = tied = wrong = 0
    score = 0.0
    chosen = sizes(task, FLAGS.photos)
    for number, size in enumerate(progress(chosen, "comparing", unit="photo")):
        photo = photo_of(sources, size, number)
        expected, actual = server.image(tf.constant(photo)), file.predict(photo)
        differs = np.any([np.asarray(expected[k]) != actual[k] for k in ("panoptic", "semantic")], 0)
        pixels, unequal, wrong = pixels + differs.size, unequal + differs.sum(), wrong + differs.any()
        if differs.any():
            tied += (differs & ties(task, folded, photo)).sum()
            say(f"{size[0]}x{size[1]}: {differs.sum()} pixels differ")
        else:
            score = max(score, float(np.abs(expected["score"] - actual["score"]).max()))
    say(
        f"{FLAGS.format}: {len(chosen)} photos of {min(chosen)} to {max(chosen)} pixels, {pixels:,} pixels: {unequal} "
        f"differ, in {wrong} photos; {tied} of them are ties. In equal photos scores differ by at most {score:.1e}"
    )
    sys.exit(int(unequal > tied))


if __name__ == "__main__":
    app.run(main)
