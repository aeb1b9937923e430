"""axial-analyze attention: where the attention of a trained model looks from one pixel of a photo."""

import os

from axial.cli import app, flags
from axial.cli.checks import check_model
from axial.cli.flags import Flag, Flags
from axial.data.files import load_photo
from axial.errors import InputError
from axial.io.images import PERCENTILES
from axial.io.show import say, working
from axial.weights.source import without_recipe


class Attention(Flags):
    model = flags.MODEL.but(needed=True, old=("checkpoint", "saved_model"))
    image = Flag(str, "the photo.", path=flags.IN_FILE, needed=True)
    query = Flag(
        str,
        "x,y: a pixel of the photo; by default its middle.",
        read=flags.matched(r"(\d+),(\d+)", "x,y, two whole numbers"),
    )
    block = Flag(str, "the block that is drawn, such as stage4_block1; by default the last one.")
    output_dir = Flag(str, "folder for the pictures.", path=flags.OUT_FOLDER, needed=True)


def run_attention(given: Attention):
    """Writes a picture for each way in which a block attends, and prints their names."""
    photo = load_photo(given.image)
    height, width = photo.shape[:2]
    x, y = given.query or (width // 2, height // 2)
    if not (x < width and y < height):
        raise InputError(f"--query={x},{y}: outside of the photo of {width}x{height} pixels")
    source = check_model(given.model)
    if source.kind == "weights":
        raise InputError(without_recipe(given.model))

    import numpy as np
    import tensorflow as tf

    from axial.analysis import attention_pictures as pictures

    app.silence_xla()
    with working(f"building the network of {given.model} and reading its weights"):
        task, model = _folded(source)
    if task.evaluation.takes != "photo":
        raise InputError(f"{given.model}: does {task.evaluation.name}; a model that takes photos is expected")
    if task.spec.levels != PERCENTILES:
        photo = load_photo(given.image, task.spec.levels)
    example = task.example(tf.constant(photo))
    image, content = example["image"], np.array(example["content"])
    # The pixel of the canvas, from 0 to 1 of its sides.
    place = [(q + 0.5) / n * c / s for q, n, c, s in zip((y, x), photo.shape, content, image.shape)]
    seen = np.uint8(np.clip(np.round((image + 1) * 127.5), 0, 255))
    stem = os.path.join(given.output_dir, os.path.splitext(os.path.basename(given.image))[0])
    layers = pictures.find_layers(model, given.block)
    inputs = pictures.layer_inputs(model, image[None], list(layers.values()))
    for path in _draw(stem, layers, inputs, photo=seen, place=place):
        say(path)


def _folded(source):
    """(task, folded model with its weights) of a `Source`, an export or a run."""
    from axial import configuration
    from axial.serving.export import folded_model

    if source.kind == "export":
        return configuration.load_folded(source)
    task, model = configuration.restore_run(source)
    return task, folded_model(task, model)


def _draw(stem, layers, inputs, *, photo, place):
    """Draws every layer of the block, and yields the names of the pictures."""
    from axial.analysis import attention_pictures as pictures

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
        elif layer.spec.axis != "square":
            lines[layer.spec.axis] = pictures.line_weights(layer, x, pixel).numpy(), pixel
            continue
        else:
            maps = pictures.query_weights(layer, x, pixel).numpy()
            pictures.draw_maps(name, photo, {f"head {i + 1}": head for i, head in enumerate(maps)}, pixel)
        yield name
    if lines:
        name = f"{stem}.{pictures.block_of(next(iter(layers)))}.png"
        pictures.draw_lines(name, photo, lines)
        yield name
