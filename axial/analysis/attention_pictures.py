"""Draws the attention weights of one query, a pixel of a photo, over the photo.

Axial attention is drawn as in Axial-DeepLab (Wang et al., ECCV 2020, Fig. 7 and 8). The generalised attention of the
spatial-attention study (Zhu et al., ICCV 2019) is drawn as its terms. The models are folded; see `serving.export.fold`.

A layer's input has fewer pixels than the photo. Each of its pixels stands for a patch of the photo, and the pictures
mark the centre of the patch.
"""

import functools

import numpy as np
import tensorflow as tf
from PIL import Image, ImageColor, ImageDraw, ImageFont, ImageOps

from axial.errors import InputError, nearest
from axial.io.show import percent, plain
from axial.io.write import write_image
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
LINES = {"height": "column, ", "width": "row, ", "": ""}  # what a query attends to along an axis, in titles
PANEL = 264  # pixels of the longer side of a panel

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


def attention_layers(model, name="the model", kinds=LAYERS):
    """dict from path to layer, for all attention layers. Raises InputError if there is none; see `find_layers`.

    `name` is the model's name in the message.
    """
    paths = {id(weight): name.rpartition("/")[0] for name, weight in weight_names(model).items()}
    layers = {paths[id(x.weights[0])]: x for x in model.submodules if isinstance(x, kinds)}
    if not layers:
        raise InputError(f"{name} has no layer that attends")
    return layers


def block_of(path):
    """Name of the block that contains the layer at a path, such as 'stage4_block1'."""
    return path.removeprefix("backbone/").split("/")[0]


def layer_inputs(model, layers):
    """Function of images [N, H, W, 3], which lists the inputs [N, h, w, C] that the layers get in the model."""
    inside = {id(layer) for layer in model.backbone.submodules}
    network = model.backbone if all(id(layer) in inside for layer in layers) else model

    @tf.function(autograph=False)
    def run(images):  # a graph, which prunes all ops after these layers
        inputs = {}

        def record(layer, call, x, training=False):
            inputs[id(layer)] = x
            return call(x, training=training)

        for layer in layers:  # not setattr, because Keras would track it
            layer.__dict__["call"] = functools.partial(record, layer, layer.call)
        try:
            network(images)
        finally:
            for layer in layers:
                del layer.__dict__["call"]
        return [inputs[id(layer)] for layer in layers]

    return run


# === Weights ===


def query_weights(layer, x, pixel):
    """float32 [heads, Y, X]: attention weights over the keys of a map. The weights of each query sum to one per head.

    Only the logits of these weights are computed. A layer for maps or squares has one query. A layer along the height
    has a query in each column, and the weights of a column are those of the query in this column: the queries are all
    pixels in the row of `pixel`. For a layer along the width, rows and columns are swapped.

    Args:
        layer: a built `FoldedAttention`, or a `GeneralizedAttention` for maps.
        x: [1, H, W, C], the layer's input.
        pixel: (row, column) of the query.
    """
    if isinstance(layer, GeneralizedAttention):
        return layer.query_weights(x, pixel)[0]
    row, column = pixel
    index = {"height": row, "width": column, "square": row * x.shape[2] + column}[layer.spec.axis]
    return layer.query_weights(x, index)[0]


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


def photo_on_canvas(example):
    """uint8 [h, w, 3]: the pixels of an example's valid region, for the result of `Task.example`."""
    height, width = example["valid_size"]
    return np.uint8(np.clip(np.round((example["image"][:height, :width] + 1) * 127.5), 0, 255))


def draw_block(stem, model, layers, example, *, queries):
    """Draws every layer of a block for each query, and yields the paths of the pictures. Runs the network once.

    Args:
        stem: start of the pictures' paths.
        model: model that contains the layers.
        layers: layers from `find_layers`.
        example: result of `Task.example`: the photo on its canvas, and its valid size.
        queries: dict from what follows the stem to a query: its (row, column), as fractions of the photo's sides.
    """
    image, valid, photo = example["image"], np.array(example["valid_size"]), photo_on_canvas(example)
    inputs = layer_inputs(model, list(layers.values()))(image[None])
    for name, fractions in queries.items():
        pictures = {}  # path -> rows of panels
        for (path, layer), x in zip(layers.items(), inputs):
            cells = np.array(x.shape[1:3])
            pixel = tuple(np.minimum(fractions * valid / image.shape[:2] * cells, cells - 1).astype(int).tolist())
            what, axis = path.removeprefix("backbone/").replace("/", "_"), ""
            if isinstance(layer, GeneralizedAttention):
                maps = term_maps(layer, x, pixel)
            else:
                if layer.spec.axis != "square":
                    what, axis = block_of(path), layer.spec.axis
                maps = {f"head {i}": head for i, head in enumerate(query_weights(layer, x, pixel).numpy(), 1)}
            pictures.setdefault(f"{stem}{name}.{what}.png", []).append((axis, maps, pixel))
        for path, rows in pictures.items():
            draw_panels(path, photo, image.shape[:2], rows)
            yield path


def draw_panels(path, photo, canvas, rows):
    """Draws maps of weights over a photo: a row of panels for each layer, all on one scale. A cross marks the query.

    The padding is left out. The title of a panel has the share of the weight that is there.

    Args:
        path: picture to write.
        photo: uint8 [h, w, 3], at the top left of the network's input. The rest of the input is padding.
        canvas: (height, width) of the network's input.
        rows: list of (axis, maps, pixel). axis: 'height' or 'width' for a query in each column or row, else ''. maps:
            dict from names, like 'head 1', to weights [Y, X]. pixel: (row, column) of the query on the maps.
    """
    names = max((list(maps) for _, maps, _ in rows), key=len)
    colors = [ImageColor.getrgb(f"hsl({360 * i // len(names)}, 100%, 65%)") for i in range(len(names))]
    most = max(weights.max() for _, maps, _ in rows for weights in maps.values())
    grey = ImageOps.contain(Image.fromarray(photo).convert("L"), (PANEL, PANEL))
    wide, high = PANEL + 8, grey.height + 48
    sheet = Image.new("RGB", (max(len(names), 3) * wide, len(rows) * high + 60), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for i, (axis, maps, pixel) in enumerate(rows):
        for j, (color, (name, weights)) in enumerate(zip(colors, maps.items())):
            keys = photo.shape[:2] / np.divide(canvas, weights.shape)  # rows and columns of the map on the photo
            shown = weights[tuple(map(slice, np.ceil(keys).astype(int)))]
            queries = {"height": shown.shape[1], "width": shown.shape[0], "": 1}[axis]
            padding = f"{percent(abs(1 - shown.sum() / queries), 0)} % on padding"
            draw.text((j * wide, i * high), f"{plain(LINES[axis] + name)}\n{padding}", "black", font)
            opacity = Image.fromarray(255 * np.sqrt(shown / most)).convert("L")
            opacity = opacity.resize(grey.size, Image.BILINEAR, (0, 0, *keys[::-1]))
            panel = Image.composite(Image.new("RGB", grey.size, color), grey.convert("RGB"), opacity)
            _mark_query(panel, axis, (np.array(pixel) + 0.5) / keys * grey.size[::-1])
            sheet.paste(panel, (j * wide, i * high + 40))
    for j, (name, color) in enumerate(zip(names, colors)):
        draw.rectangle((j * wide, len(rows) * high, j * wide + 14, len(rows) * high + 14), color)
        draw.text((j * wide + 20, len(rows) * high), plain(name), "black", font)
    note = f"Colour: the square root of the weight, full at {most:.2g}. Cross: the query."
    if axis:
        note += "\nLine: more queries; each has the weights of its own column, or row."
    draw.text((0, len(rows) * high + 22), note, "black", font)
    write_image(path, sheet)


def _mark_query(panel, axis, point):
    """Draws a cross at the query's point (y, x), and a line through the other queries along an axis."""
    (y, x), draw = point, ImageDraw.Draw(panel)
    if axis:
        draw.line((0, y, panel.width, y) if axis == "height" else (x, 0, x, panel.height), "white")
    for width, color in ((5, "black"), (3, "white")):
        draw.line((x - 8, y, x + 8, y), color, width)
        draw.line((x, y - 8, x, y + 8), color, width)
