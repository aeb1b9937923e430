"""Draws the attention weights of one query, a pixel of a photo, over the photo.

Axial attention is drawn as in Axial-DeepLab (Wang et al., ECCV 2020, Fig. 7 and 8). The generalised attention of the
spatial-attention study (Zhu et al., ICCV 2019) is drawn as its terms. The models are folded; see `serving.export.fold`.

A layer's input has fewer pixels than the photo. Each of its pixels stands for a patch of the photo, and the pictures
mark the centre of the patch.
"""

import contextlib

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure
from PIL import Image

from axial.errors import InputError, nearest
from axial.io.show import drawn
from axial.io.write import write_whole
from axial.layers.attention.folded import FoldedAttention
from axial.layers.spatial_attention.generalized_attention import GeneralizedAttention
from axial.weights.names import weight_names

LAYERS = FoldedAttention, GeneralizedAttention

TERM_NAMES = {
    "1000": "query and key content",
    "0100": "query content and relative position",
    "0010": "key content only",
    "0001": "relative position only",
}


# === Layers ===


def find_layers(model, block=None):
    """dict from path to layer, for each attention layer of a block.

    Args:
        model: a built model without batch norms.
        block: component of the layers' paths, such as 'stage4_block1'; by default the last layer's block.

    Raises:
        InputError: no layer has such a path, or the model has no attention.
    """
    layers = attention_layers(model)
    blocks = list(dict.fromkeys(block_of(path) for path in layers))
    block = block or blocks[-1]
    if block not in blocks:
        raise InputError(f"no block {block!r} attends{nearest(block, blocks)}: {', '.join(blocks)}")
    return {path: layer for path, layer in layers.items() if block_of(path) == block}


def attention_layers(model, name="the model"):
    """dict from path to layer, for all attention layers. Raises InputError if there is none; see `find_layers`.

    `name` is the model's name in the message.
    """
    paths = {id(weight): name.rpartition("/")[0] for name, weight in weight_names(model).items()}
    layers = {paths[id(x.weights[0])]: x for x in model.submodules if isinstance(x, LAYERS)}
    if not layers:
        raise InputError(f"{name} has no layer that attends")
    return layers


def block_of(path):
    """Name of the block that contains the layer at a path, such as 'stage4_block1'."""
    return path.removeprefix("backbone/").split("/")[0]


def layer_inputs(model, images, layers):
    """List of the tensors [N, h, w, C] that the layers get as inputs when the model processes the images."""
    inside = {id(layer) for layer in model.backbone.submodules}
    network = model.backbone if all(id(layer) in inside for layer in layers) else model

    @tf.function(autograph=False)
    def run(images):  # a graph, which prunes all ops after these layers
        inputs = {}
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(_recorded(layer, inputs))
            network(images)
        return [inputs[id(layer)] for layer in layers]

    return run(images)


@contextlib.contextmanager
def _recorded(layer, inputs):
    call = layer.call

    def record(x, training=False):
        inputs[id(layer)] = x
        return call(x, training=training)

    layer.__dict__["call"] = record  # not setattr, because Keras would track it
    try:
        yield
    finally:
        del layer.__dict__["call"]


# === Weights ===


def query_weights(layer, x, pixel):
    """float32 [heads, Y, X]: attention weights of one query over its keys. The weights of each head sum to one.

    Only this query's logits are computed. Y x X is the whole map, or one of its columns or rows.

    Args:
        layer: a built `FoldedAttention`, or a `GeneralizedAttention` for maps.
        x: [1, H, W, C], the layer's input.
        pixel: (row, column) of the query.
    """
    if isinstance(layer, GeneralizedAttention):
        return layer.query_weights(x, pixel)[0]
    row, column = pixel
    lines, index = {
        "height": (x[:, :, column : column + 1], row),
        "width": (x[:, row : row + 1], column),
        "square": (x, row * x.shape[2] + column),
    }[layer.spec.axis]
    return layer.query_weights(lines, index)[0]


def line_weights(layer, x, pixel):
    """float32 [heads, H, W]: weights of a line of axial queries, one query for each column or row.

    For a layer along the height, the queries are all pixels in the row of `pixel`. Each column of the result has the
    weights of the query in that column. For a layer along the width, rows and columns are swapped.
    """
    return layer.query_weights(x, pixel[0] if layer.spec.axis == "height" else pixel[1])[0]


def term_maps(layer, x, pixel):
    """dict from name to float32 [Y, X]: a query's weights by each term alone and by all terms, averaged over heads.

    Args:
        layer: a built `GeneralizedAttention` for maps.
        x: [1, H, W, C], the layer's input.
        pixel: (row, column) of the query.
    """
    term_bits = [bits for bits in TERM_NAMES if int(bits, 2) & int(layer.setting, 2)]
    maps = {TERM_NAMES[bits]: layer.query_weights(x, pixel, terms=bits) for bits in term_bits}
    maps[f"setting {layer.setting}"] = layer.query_weights(x, pixel)
    return {name: tf.reduce_mean(weights[0], 0).numpy() for name, weights in maps.items()}


# === Drawing ===


def draw_block(stem, model, layers, example, *, fractions):
    """Draws every layer of a block, and yields the paths of the pictures.

    Args:
        stem: start of the pictures' paths.
        model: model that contains the layers.
        layers: layers from `find_layers`.
        example: result of `Task.example`: the photo on its canvas, and its valid size.
        fractions: (row, column) of the query, as fractions of the photo's sides.
    """
    image, lines = example["image"], {}
    photo = np.uint8(np.clip(np.round((image + 1) * 127.5), 0, 255))
    fractions = [f * n / side for f, n, side in zip(fractions, np.array(example["valid_size"]), photo.shape)]
    for (path, layer), x in zip(layers.items(), layer_inputs(model, image[None], list(layers.values()))):
        pixel = tuple(min(int(f * n), n - 1) for f, n in zip(fractions, x.shape[1:3]))
        name = f"{stem}.{path.removeprefix('backbone/').replace('/', '_')}.png"
        if isinstance(layer, GeneralizedAttention):
            draw_maps(name, photo, term_maps(layer, x, pixel), pixel)
        elif layer.spec.axis != "square":
            lines[layer.spec.axis] = line_weights(layer, x, pixel).numpy(), pixel
            continue
        else:
            maps = query_weights(layer, x, pixel).numpy()
            draw_maps(name, photo, {f"head {i + 1}": head for i, head in enumerate(maps)}, pixel)
        yield name
    if lines:
        name = f"{stem}.{block_of(next(iter(layers)))}.png"
        draw_lines(name, photo, lines)
        yield name


def draw_maps(path, photo, maps, pixel):
    """Draws maps of weights over a photo, one panel for each map, and marks the query.

    Args:
        path: picture to write.
        photo: uint8 [h, w, 3].
        maps: dict from titles to weights [Y, X].
        pixel: (row, column) of the query on a map.
    """
    figure = Figure(figsize=(3.2 * len(maps), 3.4), layout="constrained")
    for axes, (title, weights) in zip(np.atleast_1d(figure.subplots(1, len(maps))), maps.items()):
        _show(axes, photo, title)
        axes.imshow(_enlarged(weights, photo), cmap="inferno", alpha=0.6)
        axes.plot(*_middle(pixel, weights.shape, photo), **_MARK)
    _save(figure, path)


def draw_lines(path, photo, lines):
    """Draws the weights of lines of queries over a photo: a row of panels for each layer, a panel for each head.

    Args:
        path: picture to write.
        photo: uint8 [h, w, 3].
        lines: dict from 'height' and 'width' to (result of `line_weights`, its pixel).
    """
    heads = max(len(weights) for weights, _ in lines.values())
    shape = photo.shape[0] / photo.shape[1]
    figure = Figure(figsize=(2.2 * heads, (2.2 * shape + 0.3) * len(lines)), layout="constrained")
    for row, (axis, (weights, pixel)) in zip(figure.subplots(len(lines), heads, squeeze=False), lines.items()):
        for axes in row:
            axes.set_axis_off()
        for head, (axes, line) in enumerate(zip(row, weights), 1):
            _show(axes, photo, f"{'column' if axis == 'height' else 'row'} head {head}")
            # Each line is divided by its largest weight, so that a query with spread-out weights is visible too.
            large = _enlarged(line / line.max(0 if axis == "height" else 1, keepdims=True), photo)
            axes.imshow(large, cmap="Reds", vmin=0, alpha=large.clip(0, 1) * 0.85)
            x, y = _middle(pixel, line.shape, photo)
            (axes.axhline if axis == "height" else axes.axvline)(y if axis == "height" else x, color="blue", lw=1.5)
    _save(figure, path)


_MARK = {"marker": "P", "color": "cyan", "markeredgecolor": "black", "markersize": 10}


def _show(axes, image, title):
    axes.imshow(image)
    axes.set_title(drawn(title), fontsize=9)
    axes.set_axis_off()


def _save(figure, path):
    write_whole(path, lambda partial: figure.savefig(partial, dpi=110))


def _enlarged(weights, photo):
    """A map [Y, X], resized to the size of a photo."""
    return np.asarray(Image.fromarray(weights.astype(np.float32)).resize(photo.shape[1::-1], Image.BILINEAR))


def _middle(pixel, size, photo):
    """The centre of a map's pixel, as (x, y) on the photo."""
    rows, columns = ((np.asarray(p) + 0.5) * n / m - 0.5 for p, n, m in zip(pixel, photo.shape, size))
    return columns, rows
