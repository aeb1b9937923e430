"""Writes an HTML page that shows where a model attends from any pixel of a photo, beside what the model predicts.

The page contains the factors of the logits of a block's attention as numbers of 16 bits: queries, keys and position
tables; see `FoldedAttention.factors`. `view.js` multiplies them and takes the softmax. So the page has every query,
head and term, and its size grows with the number of pixels, not of pairs of pixels.
"""

import base64
import collections
import json
import os
import zlib

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.analysis.attention_pictures import LAYERS, attention_layers, block_of, layer_inputs, photo_on_canvas
from axial.data.preprocess import place_labels
from axial.data.tfrecord import photo_name
from axial.errors import InputError, named, nearest
from axial.io.page import page
from axial.io.read import read_text
from axial.io.show import Html
from axial.io.write import bytes_of, write_text
from axial.layers.attention.folded import FoldedAttention
from axial.layers.blocks import AxialPair
from axial.layers.spatial_attention.deformable_conv import DeformableConv
from axial.metrics.panoptic_quality import compare
from axial.tasks.segmentation.drawing import hex_color, segment_colors
from axial.tasks.segmentation.evaluator import segment_table, true_segments
from axial.tasks.segmentation.tiles import Tiled

MEGABYTE = 2**20
FAIR, MOST = 16 * MEGABYTE, 32 * MEGABYTE  # bytes of all blocks by default, and the largest allowed number
QUALITY = 92  # of the photos' JPEG files
HERE = os.path.dirname(__file__)


# === Blocks ===


def attending_blocks(model, name="the model"):
    """dict from the names of the blocks that attend to lists of their layers: one layer, or those of an `AxialPair`.

    Raises InputError if no layer of the model attends. For the arguments see `attention_pictures.attention_layers`.
    """
    units = {}
    for path, layer in attention_layers(model, name, (*LAYERS, DeformableConv)).items():
        units.setdefault(path.removesuffix("/height").removesuffix("/width"), []).append(layer)
    blocks = [block_of(path) for path in units]
    names = [block if blocks.count(block) == 1 else path for path, block in zip(units, blocks)]
    return dict(zip(names, units.values()))


def choose_blocks(blocks, names):
    """The blocks with these names, of the dict of `attending_blocks`; without names the last block of each stage.

    Names that are missing are left out, as another model may have them. Raises InputError if all are missing.
    """
    chosen = names or {name.partition("_block")[0]: name for name in blocks}.values()
    if not set(chosen) & set(blocks):
        raise InputError(f"--block={names[0]}: {_no_block(names[0], blocks)}")
    return {name: block for name, block in blocks.items() if name in chosen}


def _no_block(name, attending):
    return f"no such block attends{nearest(name, attending)}: {', '.join(attending)}"


def pack(numbers):
    """Base64 text of numbers of 16 bits, deflated. All high bytes come first, because they compress better then."""
    planes = np.ravel(numbers).astype(">i2").view(np.uint8).reshape(-1, 2).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def quantized(array):
    """(unit, int16 array): the array is about unit x the int16 array, whose largest value is 32767."""
    array = np.asarray(array, np.float64)
    unit = max(np.abs(array).max(initial=0) / 32767, 1e-30)
    return unit, np.int16(np.round(array / unit))


def describe_layer(layer, size):
    """JSON dict of a layer for a map of `size` (height, width).

    'queries' and 'keys' are sizes (rows, columns). Key j is at position 'stride' x j of the queries. A query sees the
    keys up to 'reach' positions away. A head of a deformable convolution is an offset group, and its depth the number
    of taps.
    """
    keys, reach = size, None
    if isinstance(layer, FoldedAttention):
        axis, stride, heads = layer.spec.axis, 1, layer.spec.options.heads
        windows, depth = layer.spec.windows(tf.zeros([1, *size, 1])), layer.spec.key_channels // heads
        reach = windows.rows_cut.reach if axis == "square" else windows.reach
    elif isinstance(layer, DeformableConv):
        axis, stride, heads, depth = "map", 1 / layer.strides, layer.offset_groups, layer.side**2
        size = [-(-side // layer.strides) for side in size]
    else:
        axis, stride, heads, depth, (reach, _) = "map", layer.key_stride, layer.heads, layer.depth, layer.reach
        keys = [-(-side // stride) for side in size]
    reach = max(size) if reach is None else reach
    maps = {"queries": list(size), "keys": list(keys)}
    return {"axis": axis, "stride": stride, "reach": reach, "heads": heads, "depth": depth, **maps}


def inputs_of(model, layers, canvases):
    """For each canvas, float32 [h, w, 3], a dict from the ids of the layers to their inputs [1, h, w, C]."""
    read = layer_inputs(model, layers)
    return [dict(zip(map(id, layers), read(canvas[None]))) for canvas in canvases]


def read_blocks(model, blocks, inputs):
    """List of JSON dicts of blocks for one of the dicts of `inputs_of`.

    A block's 'layers' are those of its layers, the column's first; 'arrays' has the shape of each of their factors and
    the unit of its numbers. 'data' is the result of `pack` for all factors. 'step' is the number of rows of the first
    layer's map for each row of the second: a block with a stride drops rows between its layers.
    """
    pairs = {id(pair.width): pair for pair in model.submodules if isinstance(pair, AxialPair)}
    views = []
    for name, block in blocks.items():
        shown, numbers = [], []
        for layer in block:
            x = inputs[id(layer)]
            factors = {factor: quantized(array) for factor, array in layer.factors(x).items()}
            arrays = {factor: {"unit": unit, "shape": list(array.shape)} for factor, (unit, array) in factors.items()}
            shown.append({**describe_layer(layer, x.shape[1:3]), "arrays": arrays})
            numbers += [array.ravel() for _, array in factors.values()]
        pair = pairs.get(id(block[-1]))
        step = pair.strides if pair and not pair.average_pool else 1
        data = pack(np.concatenate(numbers))
        views.append({"name": name, "heads": shown[0]["heads"], "step": step, "layers": shown, "data": data})
    return views


# === Photos ===


def matches(truth, predicted):
    """The fate of every true and every predicted segment, by the matching of the panoptic quality (`compare`).

    Args:
        truth, predicted: `Segments` of one photo.

    Returns:
        Two lists of dicts, of the true and of the predicted segments. 'fate' is 'matched', 'missed' or 'false'; 'wrong
        class' for a missed and a false segment whose IoU is above 0.5; or 'excused' for a crowd, and for a false
        segment that mostly lies on a crowd or on unlabelled pixels. 'other' is the number of the segment of the other
        list with the largest 'iou', or 0.
    """
    pairs = compare(truth, predicted)
    true = [{"fate": "missed" if x else "excused", "iou": 0.0, "other": 0} for x in pairs.required]
    guess = [{"fate": "false" if x else "excused", "iou": 0.0, "other": 0} for x in pairs.unexcused]
    every = compare(*(x._replace(classes=np.zeros_like(x.classes)) for x in (truth, predicted)))
    for k in np.argsort(every.iou):  # the largest IoU last
        i, j, iou = every.true[k], every.predicted[k], float(every.iou[k])
        if iou > 0.5 and pairs.true_classes[i] == pairs.predicted_classes[j]:
            true[i]["fate"] = guess[j]["fate"] = "matched"
        elif iou > 0.5 and (true[i]["fate"], guess[j]["fate"]) == ("missed", "false"):
            true[i]["fate"] = guess[j]["fate"] = "wrong class"
        true[i] |= {"iou": iou, "other": int(j)}
        guess[j] |= {"iou": iou, "other": int(i)}
    return true[1:], guess[1:]


def view_photo(task, predict, example):
    """(JSON dict of an evaluation example and its prediction, the network's canvas).

    The canvas shows the whole photo, or the middle tile of a photo that is larger than the canvas.

    Args:
        task: `Task`.
        predict: the function of `Task.predictions`.
        example: an example of `Task.eval_dataset`, or of `example` of the task and its evaluator.
    """
    ((_, prediction),) = predict([example])
    photo = np.asarray(task.evaluator.given(example))
    description = task.evaluator.describe(photo, prediction, task.spec)
    tiling = Tiled.from_task(task).tiling(example) if task.scale else None
    box, network, note = np.s_[:, :], example, ""
    if tiling:
        box = tiling.boxes[len(tiling.boxes) // 2]
        network, (height, width) = task.example(tf.constant(photo[box])), photo[box].shape[:2]
        note = f"The photo is larger than the input: the page shows {width} x {height} pixels, its middle tile."
    canvas, (height, width) = network["image"], map(int, network["valid_size"])
    image = Image.fromarray(photo_on_canvas(network))
    jpeg = bytes_of(lambda file: image.save(file, "JPEG", quality=QUALITY, subsampling=0))
    view = {
        "canvas": list(canvas.shape[:2]),
        "valid": [height, width],
        "photo": f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}",
        "summary": description.summary,
        "note": note,
        "start": [0.5, 0.5],
    }

    def on_canvas(ids):
        placed = place_labels(np.int32(ids[box]), network["valid_size"], canvas.shape[:2])
        return np.uint16(placed)[:height, :width]

    if description.panoptic is not None:
        table = segment_table(prediction, task.spec)
        view |= _view_segments(task.spec, description, table, on_canvas)
        if "segment/class" in example:
            view |= _view_truth(task.spec, true_segments(example), table, view["objects"], on_canvas=on_canvas)
    return view, canvas


def _view_segments(spec, description, table, on_canvas):
    """JSON dict of the predicted segments. `on_canvas` maps a photo's labels to those of the shown pixels."""
    ids, things = on_canvas(description.panoptic), np.asarray(spec.things, bool)[table.classes]
    names = "id", "class", "thing", "score", "area"
    objects = [
        {**{name: segment[name] for name in names}, "color": hex_color(color)}
        for segment, color in zip(description.segments, segment_colors(table.classes, spec))
    ]
    view = {"prediction": pack(ids), "objects": objects}
    pixels = np.argwhere(np.concatenate([[False], things])[ids])
    if len(pixels):  # the first query is in the middle of the thing that is nearest to the centre
        near = pixels[np.argmin(np.abs(pixels - np.array(ids.shape) / 2).sum(1))]
        thing = np.argwhere(ids == ids[tuple(near)])
        middle = thing[np.argmin(np.abs(thing - thing.mean(0)).sum(1))]
        view["start"] = ((middle + 0.5) / ids.shape).tolist()
    return view


def _view_truth(spec, true, table, objects, on_canvas):
    """JSON dict of the true segments, and of `objects` with their fates. Matched segments have one colour."""
    true_fates, fates = matches(true, table)
    areas = np.bincount(true.ids.ravel(), minlength=len(true.classes) + 1)[1:]
    colors = [
        objects[fate["other"] - 1]["color"] if fate["fate"] == "matched" else hex_color(color)
        for fate, color in zip(true_fates, segment_colors(true.classes, spec))
    ]
    truths = [
        {"id": i + 1, "class": spec.class_names[index], "area": int(area), "color": color, **fate}
        for i, (index, area, color, fate) in enumerate(zip(true.classes, areas, colors, true_fates))
    ]
    objects = [one | fate for one, fate in zip(objects, fates)]
    return {"objects": objects, "truths": truths, "truth": pack(on_canvas(true.ids))}


def split_examples(task, split, names, most=8):
    """dict from the names of a split's photos to their examples, for photos with these names.

    Folder and ending of a name do not matter. Without names, the first `most` photos. Raises InputError if the split
    lacks a photo.
    """
    examples = task.eval_dataset(split)
    if not names:
        return {photo_name(example): example for example in examples.take(most)}
    stems, chosen = dict.fromkeys(map(_stem, names)), {}
    for example in examples:
        stem = _stem(photo_name(example))
        chosen[stem] = example if stem in stems else None
    for name in names:
        if _stem(name) not in chosen:
            raise InputError(f"{name}: no such photo in {task.data_dir}, split {split}{nearest(_stem(name), chosen)}")
    return {photo_name(chosen[stem]): chosen[stem] for stem in stems}


def _stem(path):
    return os.path.splitext(os.path.basename(path))[0]


# === The page ===


def view_model(name, task, model, examples, *, block_names=(), weights=""):
    """JSON dict of a model and of its photos, for `write_view`.

    Args:
        name: name of the model on the page.
        task, model: the `Task` and its folded model; see `serving.export.fold`.
        examples: dict from the photos' names to examples for `view_photo`.
        block_names: see `choose_blocks`.
        weights: path of the weights, whose name the page shows.
    """
    attending, predict = attending_blocks(model, name), task.predictions(model)
    blocks = choose_blocks(attending, block_names)
    views, canvases = zip(*(view_photo(task, predict, example) for example in examples.values()))
    layers = [layer for block in blocks.values() for layer in block]
    photos = [
        {**view, "name": photo, "blocks": read_blocks(model, blocks, inputs)}
        for photo, view, inputs in zip(examples, views, inputs_of(model, layers, canvases))
    ]
    about = [task.model.name, os.path.basename(weights)]
    return {"name": name, "about": about, "attending": list(attending), "photos": photos}


def _fit(model, models, block_names):
    """Removes blocks of a model, one of several `models`; see `write_view`. Returns their names."""
    sizes, removed = collections.Counter(), []  # bytes of the blocks for all photos, the first stage first
    for photo in model["photos"]:
        sizes.update({block["name"]: len(block["data"]) for block in photo["blocks"]})
    while not block_names and len(sizes) > 1 and sizes.total() > FAIR / models:
        removed.append(next(iter(sizes)))
        del sizes[removed[-1]]
    if sizes.total() > MOST / models:
        listed = ", ".join(f"{name} {size / MEGABYTE:.1f} MB" for name, size in sizes.items())
        most = f"{MOST / models / MEGABYTE:.0f} MB: give fewer photos, or fewer blocks with --block"
        raise InputError(f"the blocks of {model['name']} need {listed}; expected at most {most}")
    for photo in model["photos"]:
        photo["blocks"] = [block for block in photo["blocks"] if block["name"] in sizes]
    return removed


def write_view(path, models, block_names=()):
    """Writes the page.

    Args:
        path: path of the HTML file.
        models: list of one or two results of `view_model` for the same photos. Unless `block_names` are given, the
            blocks of early stages are removed from a model until its blocks need at most its part of `FAIR` bytes.
        block_names: see `choose_blocks`.

    Returns:
        Names of the removed blocks.

    Raises:
        InputError: no model has a block with one of the names, or the blocks need more than `MOST` bytes.
    """
    attending = list(dict.fromkeys(name for model in models for name in model["attending"]))
    for name in block_names:
        if name not in attending:
            raise InputError(f"--block={name}: {_no_block(name, attending)}")
    with named(path):
        left_out = [name for model in models for name in _fit(model, len(models), block_names)]
    form, style, script = (read_text(os.path.join(HERE, f"view.{kind}")) for kind in ("html", "css", "js"))
    body = Html(form.replace("{models}", json.dumps(models).replace("<", "\\u003c")))
    title = f"Attention of {' and '.join(model['name'] for model in models)}"
    about = [text for model in models for text in model["about"]]
    write_text(path, page(title, {"": body}, about, style=style, script=script))
    return left_out
