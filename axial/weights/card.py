"""The model card, README.md of a model's folder, for people and for Hugging Face's hub.

The card begins with the hub's YAML head (https://huggingface.co/docs/hub/model-cards): licence, library, tags, data
sets, and scores as a model-index. The text after it describes the model's input, output and data, lists the scores of
each split, and shows the commands that made the model and the commands that use it.
"""

import json
import os

import msgspec
import yaml

from axial.data.levels import LEVELS
from axial.data.preprocess import SCALE
from axial.io import show
from axial.io.write import folder_digests, write_text
from axial.models.outputs import MEANINGS
from axial.models.registry import find_variant
from axial.weights.interchange import CardScores

PAGE = "README.md"
NO_LICENCE = "The licence of these weights is unknown; `axial-export --license` states it. axial itself is Apache-2.0."
UNKNOWN = "unknown"  # the hub's word for an unknown licence; the card also uses it for unknown data sets and splits
FORMS = {
    "saved_model": "SavedModel, its batch norms folded",
    "tflite": "TFLite file, its batch norms folded",
    "onnx": "ONNX file, its batch norms folded",
    "safetensors": "weights as safetensors",
    "weights": "weights as safetensors, without a recipe",
}
CANVAS = "RGB from -1 to 1, a pixel / 127.5 - 1, of a photo on the canvas; 0 outside of the valid region"
# Maps what a task takes ('text' or 'photo') to the rows (name, type, shape, meaning) of its SavedModel's inputs.
SERVER_INPUTS = {
    "text": [("text", "string", "[N]", "UTF-8, a sentence each")],
    "photo": [
        ("serving_default: encoded", "string", "[]", "the bytes of a photo's file: JPEG, PNG, WebP, GIF or BMP"),
        ("batch: encoded", "string", "[n]", "n such photos; outputs are padded with 0, and size and error are added"),
        ("image: image", "uint8", "[h, w, 3]", "RGB from 0 to 255"),
    ],
}


def write_page(folder, card, form, *, task=None, outputs=None, objects=None):
    """Writes README.md of a model's folder.

    Args:
        folder: the model's folder, with all files but this page.
        card: `WeightsCard`; see `make_card`.
        form: format of the model's files, one of `FORMS`.
        task: the model's task; None for weights without a recipe, whose card names the model.
        outputs: dict from the name of each map of an exported network to its shape; None if the shapes are not fixed.
        objects: statistics (`Objects`) of the training photos' objects, or None.
    """
    digests = folder_digests(folder, leave=(PAGE,))
    write_text(os.path.join(folder, PAGE), page(card, form, digests, task=task, outputs=outputs, objects=objects))


def page(card, form, files, *, task=None, outputs=None, objects=None):
    """The text of README.md; see `write_page`. `files` is a dict from the name of each file to its SHA-256."""
    network = find_variant(card.model).model
    made_from = ["", "They are made from:", "", *_digests(card.input)] if card.input else []
    sections = {
        "Input": [*_tensors(_inputs(card, form, network, task, outputs=outputs)), "", *_preparation(card)],
        "Output": _outputs(card, form, network, task, outputs=outputs),
        "Data": [*_data(card), *_objects(objects)],
        "Scores": _scores(card),
        "Weights": _weights(card),
        "Files": [*_digests(files), *made_from],
        "Licence": [f"{show.markdown(card.license)}, of the weights." if card.license else NO_LICENCE],
        "Commands": _commands(card, form, task),
    }
    head = yaml.safe_dump(_head(card, form, network), sort_keys=False, allow_unicode=True)
    lines = [f"---\n{head}---\n\n# {show.markdown(card.model)}\n"]
    lines += [f"{network.title.capitalize()}: {FORMS[form]}, by axial."]
    for title, section in sections.items():
        lines += ["", f"## {title}", "", *section]
    return "\n".join(lines) + "\n"


def _tensors(rows):
    return show.markdown_table(("name", "type", "shape", "what it is"), rows)


def _digests(files):
    """A table with the name and the SHA-256 of each file."""
    return show.markdown_table(("file", "SHA-256"), [tuple(map(show.code, file)) for file in files.items()])


def _head(card, form, network):
    """The YAML head as a dict of plain values."""
    metrics = [
        {
            "task": {"type": network.hub, "name": network.title},
            "dataset": {"type": _data_name(card), "name": _data_name(card), "split": result.split},
            "metrics": [
                {"type": name, "name": name, "value": round(value, 6)}
                for name, value in result.scores.items()
                if value is not None and value == value  # the hub accepts only metrics that have a value
            ],
        }
        for result in results(card)
    ]
    return {
        "license": card.license or UNKNOWN,
        "library_name": "axial",
        "pipeline_tag": network.hub,
        "tags": ["axial", "tensorflow", network.title.replace(" ", "-"), form.replace("_", "-"), card.model],
        **({"datasets": [_data_name(card)]} if card.spec else {}),
        **({"model-index": [{"name": card.model, "results": metrics}]} if metrics else {}),
    }


def results(card):
    """List of the card's `CardScores`: the run's best evaluation, then the evaluations that were added later."""
    best = CardScores(card.scored_split or UNKNOWN, card.scored_photos, card.scores, chosen=True)
    return [best, *card.results] if card.scores else card.results


def _data_name(card):
    return card.spec.name if card.spec else UNKNOWN


def _inputs(card, form, network, task, *, outputs):
    if form in ("tflite", "onnx"):
        if not outputs:
            return SERVER_INPUTS["photo"][1:]
        height, width = card.preprocessing["photo"]
        return [("image", "float32", f"[1, {height}, {width}, 3]", CANVAS)]
    return SERVER_INPUTS[task.evaluator.takes] if form == "saved_model" else [network.input_row]


def _preparation(card):
    """Lines that describe the preprocessing and the size of a photo."""
    preprocessing = card.preprocessing
    if not preprocessing:
        return []
    photo, lines = preprocessing.get("photo"), []
    size = "x".join(map(str, photo)) if isinstance(photo, (list, tuple)) else photo
    if SCALE in preprocessing:
        lines = [
            f"- scale: {preprocessing[SCALE]} times the photo's own",
            f"- largest canvas: {size} pixels (height x width); axial cuts larger photos into tiles",
        ]
    elif size:
        lines = [f"- canvas: {size} pixels (height x width), which axial fits photos to"]
    lines += [
        f"- pixels: the network normalises them by the mean {show.code(preprocessing.get('mean'))} and the deviation",
        f"  {show.code(preprocessing.get('deviation'))}, from 0 to 255",
    ]
    return lines + (["- a photo of more than 8 bits:", f"  {LEVELS[card.spec.levels]}"] if card.spec else [])


def _outputs(card, form, network, task, outputs):
    if form == "saved_model":
        return _tensors(task.served) if task.served else [f"What `{type(task).__name__}.serve` returns."]
    if form in ("tflite", "onnx") and not outputs:
        return _tensors(task.served_in_file or task.served)
    maps = network.maps
    if outputs:
        maps = [(name, str(list(shape))) for name, shape in outputs.items()]
    elif card.spec and not any(card.spec.things):  # a network without thing classes has no instance branch
        maps = [(name, shape) for name, shape in maps if "logits" in name]
    rows = [(name, "float32", shape, MEANINGS.get(name, "a map of the network")) for name, shape in maps]
    return _tensors(rows) if rows else [f"What axial's {network.title} model returns; see its docstring."]


def _data(card):
    spec = card.spec
    if spec is None:
        return [f"{card.num_classes} classes; the source does not name them."]
    what = "classes" if isinstance(spec.class_names, list) and spec.class_names else "words"
    names = f": {', '.join(spec.class_names)}" if spec.class_names else ""
    lines = [f"- {show.markdown(spec.name)}, {card.num_classes} {what}{show.markdown(names)}"]
    if card.trained:
        lines.append(f"- trained on the split {show.code(card.trained.split)}{_photos(card.trained.photos)}")
    return lines


def _objects(objects):
    """Lines on the sizes of the training photos' objects and on the photos' grey levels. `objects` may be None."""
    if not objects:
        return []
    (low, median, high), (dark, grey, bright) = objects.diameter, objects.level
    return [
        f"- its objects are {median:g} pixels wide at the median, {low:g} to {high:g} from the 5th to the 95th",
        f"  percentile: the diameters of circles of their areas, of {objects.objects:,} objects in {objects.photos:,}",
        "  photos as they are stored",
        f"- the median grey level of a photo, 0 to 255, is {grey:g} at the median, {dark:g} to {bright:g} from the 5th",
        "  to the 95th percentile",
    ]


def _photos(number):
    return f", {number:,} records" if number else ", whose number of records is unknown"


def _scores(card):
    """Lines with a table of scores for each split.

    The line above a table says if the checkpoint was chosen as its run's best by these scores.
    """
    lines = []
    for result in results(card):
        chosen = ", on which this checkpoint was chosen as its run's best" if result.chosen else ""
        rows = [(name, "" if x is None or x != x else f"{x:.4f}") for name, x in result.scores.items()]
        split = f"{show.code(result.split)} of {show.markdown(_data_name(card))}{_photos(result.photos)}{chosen}"
        lines += ["", f"On the split {split}:", "", *show.markdown_table(("score", "value, from 0 to 1"), rows)]
    return lines[1:] or ["No scores are recorded."]


def _weights(card):
    lines = [f"- {card.parameters:,} parameters, from {show.markdown(card.source)}"]
    lines += [f"- SHA-256 of the tensors: `{card.weights}`"] if card.weights else []
    lines.append(f"- arguments of the model: {show.code(json.dumps(card.arguments))}")
    lines.append(f"- batch norms: {show.code(json.dumps(msgspec.to_builtins(card.norm)))}")
    random = show.markdown(", ".join(card.unfilled))
    return lines + ([f"- random, as the source has none: {random}"] if card.unfilled else [])


def _commands(card, form, task):
    used = ["axial-predict --model=FOLDER --output_dir=OUT PHOTO"]
    if form in ("safetensors", "weights"):
        python = "python -c \"import axial; model = axial.load('FOLDER')\""
        scored = "axial-evaluate --gin_file=RECIPE --model=FOLDER --data_dir=DATA"
        used = [scored if form == "weights" else "axial-predict --model=FOLDER --output_dir=OUT PHOTO", python]
    if task and task.evaluator.takes == "text":
        used[0] = used[0].partition(" --output_dir")[0] + ' --text="A sentence."'
    made = ["It was made by:", "", *(f"    {show.plain(line)}" for line in card.made), ""] if card.made else []
    return [*made, "FOLDER is the folder of this page. It is used by:", "", *(f"    {line}" for line in used)]
