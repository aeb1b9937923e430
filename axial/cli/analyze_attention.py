"""axial-analyze attention: where the attention of a trained model looks from one pixel of a photo."""

import os

from absl import flags

from axial.cli import app
from axial.cli.checks import check_export, check_run
from axial.io import gfile
from axial.io.show import say, working

FLAGS = flags.FLAGS

flags.DEFINE_string("saved_model", None, "a SavedModel of axial-export.")
flags.DEFINE_string("checkpoint", None, "a run of axial-train, or one of its checkpoints.")
flags.DEFINE_string("image", None, "the photo.")
flags.DEFINE_string("query", None, "x,y: a pixel of the photo; by default its middle.")
flags.DEFINE_string("block", None, "the block that is drawn, such as stage4_block1; by default the last one.")
flags.DEFINE_string("output_dir", None, "folder for the pictures.")


def run_attention(_):
    """Writes a picture for each way in which a block attends, and prints their names."""
    from axial.data.files import load_photo
    from axial.errors import InputError
    from axial.io.images import PERCENTILES
    from axial.io.write import try_folder

    if (FLAGS.saved_model is None) == (FLAGS.checkpoint is None):
        raise InputError("--saved_model=EXPORT or --checkpoint=RUN is expected, one of them")
    output_dir = app.flag("output_dir")
    photo = load_photo(app.flag("image"))
    query = _query(photo)
    try_folder("output_dir", output_dir)
    run = FLAGS.checkpoint and _run_of(FLAGS.checkpoint)
    check_run(run) if run else check_export(FLAGS.saved_model)

    import numpy as np
    import tensorflow as tf

    app.silence_xla()
    with working(f"building the network of {FLAGS.saved_model or run} and reading its weights"):
        task, model = _folded()
    if task.evaluation.takes != "photo":
        path = FLAGS.saved_model or FLAGS.checkpoint
        raise InputError(f"{path}: does {task.evaluation.name}; a model that takes photos is expected")
    if task.spec.levels != PERCENTILES:
        photo = load_photo(app.flag("image"), task.spec.levels)
    example = task.example(tf.constant(photo))
    image, content = example["image"], np.array(example["content"])
    # The pixel of the canvas, from 0 to 1 of its sides.
    place = [(q + 0.5) / n * c / s for q, n, c, s in zip(query[::-1], photo.shape, content, image.shape)]
    seen = np.uint8(np.clip(np.round((image + 1) * 127.5), 0, 255))
    stem = os.path.join(output_dir, os.path.splitext(os.path.basename(FLAGS.image))[0])
    for path in _draw(stem, model, image[None], photo=seen, place=place):
        say(path)


def _query(photo):
    """(x, y) of --query."""
    from axial.errors import InputError

    height, width = photo.shape[:2]
    if FLAGS.query is None:
        return width // 2, height // 2
    try:
        x, y = (int(part) for part in FLAGS.query.split(","))
    except ValueError:
        raise InputError(f"--query={FLAGS.query}: expected x,y, two whole numbers") from None
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(f"--query={FLAGS.query}: outside of the photo of {width}x{height} pixels")
    return x, y


def _folded():
    """(task, folded model with its weights) of --saved_model or --checkpoint."""
    from axial import configuration
    from axial.serving.export import folded_model

    if FLAGS.saved_model:
        return configuration.load_folded(FLAGS.saved_model)
    path = FLAGS.checkpoint.rstrip("/")
    run = _run_of(path)
    task, model = configuration.restore_run(run, None if run == path else path)
    return task, folded_model(task, model)


def _run_of(checkpoint):
    """The folder of the run of a checkpoint; a run as it is."""
    path = checkpoint.rstrip("/")
    folders = path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))
    return next((folder for folder in folders if gfile.exists(os.path.join(folder, "config.gin"))), path)


def _draw(stem, model, image, *, photo, place):
    """Draws every layer of the block, and yields the names of the pictures."""
    from axial.analysis import attention_pictures as pictures

    layers = pictures.find_layers(model, FLAGS.block)
    inputs = pictures.layer_inputs(model, image, list(layers.values()))
    lines = {}
    for (path, layer), x in zip(layers.items(), inputs):
        size = x.shape[1:3]
        pixel = tuple(min(int(share * n), n - 1) for share, n in zip(place, size))
        name = f"{stem}.{path.removeprefix('backbone/').replace('/', '_')}.png"
        if isinstance(layer, pictures.DeformableConv):
            output = tuple(i // layer.strides for i in pixel)
            points = pictures.sampling_points(layer, x, output)
            tap = tuple(i * layer.strides for i in output)
            pictures.draw_points(name, photo, points, place=tap, size=size)
        elif isinstance(layer, pictures.DynamicConv):
            pictures.draw_kernels(name, pictures.query_kernels(layer, x, pixel))
        elif isinstance(layer, pictures.GeneralizedAttention):
            pictures.draw_maps(name, photo, pictures.term_maps(layer, x, pixel), pixel)
        elif pictures.axis_of(layer):
            lines[pictures.axis_of(layer)] = pictures.line_weights(layer, x, pixel).numpy(), pixel
            continue
        else:
            maps = pictures.query_weights(layer, x, pixel).numpy()
            pictures.draw_maps(name, photo, {f"head {i + 1}": head for i, head in enumerate(maps)}, pixel)
        yield name
    if lines:
        name = f"{stem}.{pictures.block_of(next(iter(layers)))}.png"
        pictures.draw_lines(name, photo, lines)
        yield name
