"""README.md of a model's folder, for people and for Hugging Face's hub, whose model cards begin with such a YAML head.

The head has the fields of https://huggingface.co/docs/hub/model-cards: licence, library, tags, data sets, and scores as
a model-index. Below it the page says what the model takes and returns, of which data and split each score is, and the
commands that made the model and that use it.
"""

import json
import os

import msgspec
import yaml

from axial.io import schemas, show
from axial.io.write import folder_digests, write_text
from axial.models.registry import find_variant

PAGE = "README.md"
UNKNOWN = "unknown"  # the hub's word for a licence that nobody has told
FORMS = {
    "saved_model": "SavedModel, its batch norms folded",
    "tflite": "TFLite file, its batch norms folded",
    "onnx": "ONNX file, its batch norms folded",
    "safetensors": "weights as safetensors",
    "weights": "weights as a TensorFlow checkpoint",
}
# Of each task: the hub's name of it, and what it does.
TASKS = {
    "panoptic": ("image-segmentation", "panoptic segmentation"),
    "segmentation": ("image-segmentation", "semantic segmentation"),
    "classification": ("image-classification", "classification"),
    "detection": ("object-detection", "detection"),
    "translation": ("translation", "translation"),
}
# Rows of (name, type, shape, meaning). C is the number of classes. Of networks, h and w are sides of the input.
PHOTOS = ("photos", "float32", "[N, h, w, 3]", "RGB from -1 to 1, a pixel / 127.5 - 1")
CANVAS = "RGB from -1 to 1, a pixel / 127.5 - 1, of a photo on the canvas; what the photo leaves free is 0"
MAPS = {
    "semantic_logits": (
        "float32",
        "[N, h / 4, w / 4, C]",
        "logits of the classes, any number; the largest is the class",
    ),
    "center_heatmap": ("float32", "[N, h / 4, w / 4, 1]", "heat of instances' centres, 1 at a centre and 0 far away"),
    "offset_map": ("float32", "[N, h / 4, w / 4, 2]", "from a pixel to its instance's centre, (y, x) in input pixels"),
    "logits": ("float32", "[N, C]", "logits of the classes, any number; their softmax are probabilities"),
}
NETWORKS = {
    "panoptic": ("semantic_logits", "center_heatmap", "offset_map"),
    "segmentation": ("semantic_logits",),
    "classification": ("logits",),
}
SERVED = {
    "panoptic": {
        "panoptic": ("int32", "[h, w]", "class x label_divisor + instance, of each pixel of the photo"),
        "semantic": ("int32", "[h, w]", "class index of each pixel"),
        "instance": ("int32", "[h, w]", "0 for none, i for the i-th row of score"),
        "score": ("float32", "[K]", "confidence of each instance, 0 to 1"),
    },
    "classification": {
        "probability": ("float32", "[C]", "of every class, 0 to 1"),
        "class": ("string", "[5]", "names of the most probable classes"),
        "score": ("float32", "[5]", "their probabilities, 0 to 1"),
    },
    "detection": {
        "box": ("float32", "[K, 4]", "x, y, width and height in pixels of the photo"),
        "class": ("int32", "[K]", "class index"),
        "score": ("float32", "[K]", "confidence of each object, 0 to 1, the best first"),
        "count": ("int32", "[]", "how many of the K rows are objects"),
    },
    "translation": {
        "translation": ("string", "[N]", "the sentences in the other language"),
        "score": ("float32", "[N]", "log probability by the length penalty, at most 0"),
    },
}
SERVED["segmentation"] = SERVED["panoptic"]


def write_page(folder, card, form, outputs=None):
    """Writes README.md of a folder that holds a model.

    Args:
        folder: of the model, complete but for this page.
        card: `WeightsCard`; see `make_card`.
        form: of `FORMS`.
        outputs: dict from the names of a network's maps in a file to their shapes; None where they are of any size.
    """
    write_text(os.path.join(folder, PAGE), page(card, form, folder_digests(folder, leave=(PAGE,)), outputs))


def page(card, form, files, outputs=None):
    """The text of README.md; see `write_page`. `files` is a dict from the files of the folder to their SHA-256."""
    task = find_variant(card.model).task
    head = yaml.safe_dump(_head(card, form, task), sort_keys=False, allow_unicode=True)
    lines = ["---", *head.splitlines(), "---", "", f"# {show.markdown(card.model)}", ""]
    lines += [f"{TASKS[task][1].capitalize()}: {FORMS[form]}, by axial.", ""]
    header = ("name", "type", "shape", "what it is")
    lines += ["## Input", "", *show.markdown_table(header, _inputs(card, form, task)), "", *_preparation(card), ""]
    rows = _outputs(card, form, task, outputs)
    lines += ["## Output", "", *(show.markdown_table(header, rows) if rows else [_other_output(task)]), ""]
    lines += [*_data(card), ""]
    lines += ["## Scores", "", *_scores(card), ""]
    lines += ["## Weights", "", *_weights(card), ""]
    names = [(show.code(name), show.code(digest)) for name, digest in files.items()]
    lines += ["## Files", "", *show.markdown_table(("file", "SHA-256"), names), ""]
    if card.input:
        names = [(show.code(name), show.code(digest)) for name, digest in card.input.items()]
        lines += ["They are made from:", "", *show.markdown_table(("file", "SHA-256"), names), ""]
    lines += ["## Licence", "", _licence(card), ""]
    lines += ["## Commands", "", *_commands(card, form, task), ""]
    return "\n".join(lines)


def _head(card, form, task):
    """The YAML head, as plain values."""
    metrics = [
        {
            "task": {"type": TASKS[task][0], "name": TASKS[task][1]},
            "dataset": {"type": _data_name(card), "name": _data_name(card), "split": one.split},
            "metrics": [
                {"type": name, "name": name, "value": round(value, 6)}
                for name, value in one.scores.items()
                if value is not None and value == value  # the hub takes no metric without a value
            ],
        }
        for one in results(card)
    ]
    return {
        "license": card.license or UNKNOWN,
        "library_name": "axial",
        "pipeline_tag": TASKS[task][0],
        "tags": ["axial", "tensorflow", TASKS[task][1].replace(" ", "-"), form.replace("_", "-"), card.model],
        **({"datasets": [_data_name(card)]} if card.spec else {}),
        **({"model-index": [{"name": card.model, "results": metrics}]} if metrics else {}),
    }


def results(card):
    """List of the card's `CardScores`: those of its run's best evaluation, and those that were added."""
    if not card.scores:
        return card.results
    return [
        schemas.CardScores(card.scored_split or UNKNOWN, card.scored_photos, card.scores, chosen=True),
        *card.results,
    ]


def _data_name(card):
    return card.spec.name if card.spec else UNKNOWN


def _inputs(card, form, task):
    if task == "translation":
        tokens = ("source, target", "int32", "[N, length]", "tokens of the vocabulary, from 0 to C - 1; 0 is padding")
        return [("text", "string", "[N]", "UTF-8, a sentence each")] if form == "saved_model" else [tokens]
    if form in ("tflite", "onnx"):
        height, width = card.preprocessing["photo"]
        return [("image", "float32", f"[1, {height}, {width}, 3]", CANVAS)]
    if form == "saved_model":
        return [
            ("serving_default: encoded", "string", "[]", "the bytes of a photo's file: JPEG, PNG, WebP, GIF or BMP"),
            ("image: image", "uint8", "[h, w, 3]", "RGB from 0 to 255"),
        ]
    return [PHOTOS]


def _preparation(card):
    """What is done to a photo, and at which size."""
    told = card.preprocessing
    if not told:
        return []
    photo = told.get("photo")
    size = "x".join(map(str, photo)) if isinstance(photo, (list, tuple)) else photo
    lines = []
    if "photo_scale" in told:
        lines += [
            f"- scale: {told['photo_scale']} times the photo's own",
            f"- largest canvas: {size} pixels (height x width); axial cuts larger photos into tiles",
        ]
    elif size:
        lines.append(f"- canvas: {size} pixels (height x width), which axial fits photos to")
    mean, deviation = show.code(told.get("mean")), show.code(told.get("deviation"))
    return [
        *lines,
        f"- pixels: the network brings them to the mean {mean} and the deviation",
        f"  {deviation} of 0 to 255",
    ]


def _outputs(card, form, task, outputs):
    if form == "saved_model":
        rows = dict(SERVED[task])
        if task == "detection" and card.model.startswith("mask"):
            rows["mask"] = ("float32", "[K, 28, 28]", "probabilities on the box, 0 to 1")
        return [(name, *row) for name, row in rows.items()]
    names = outputs or NETWORKS.get(task, ())
    if not outputs and card.spec and not any(card.spec.things):  # a network of such classes has no instance branch
        names = [name for name in names if "logits" in name]
    rows = []
    for name in names:
        kind, shape, meaning = MAPS.get(name, ("float32", "", "a map of the network"))
        shape = shape.replace("4", "8") if task == "segmentation" else shape  # CCNet's stride
        rows.append((name, kind, str(list(outputs[name])) if outputs else shape, meaning))
    return rows


def _other_output(task):
    return f"What axial's {TASKS[task][1]} model returns; see its docstring."


def _data(card):
    spec = card.spec
    if spec is None:
        return ["## Data", "", f"{card.num_classes} classes; the source does not name them."]
    what = "words" if not isinstance(spec.class_names, list) or not spec.class_names else "classes"
    names = f": {', '.join(spec.class_names)}" if spec.class_names else ""
    lines = ["## Data", "", f"- {show.markdown(spec.name)}, {card.num_classes} {what}{show.markdown(names)}"]
    if card.trained:
        lines.append(f"- trained on the split {show.code(card.trained.split)}{_photos(card.trained.photos)}")
    return lines


def _photos(number):
    return f", {number:,} records" if number else ", whose number of records is not told"


def _scores(card):
    """Paragraphs and tables: of each split its scores, and whether the checkpoint was chosen by them."""
    lines = []
    for one in results(card):
        chosen = ", on which this checkpoint was chosen as its run's best" if one.chosen else ""
        lines += [
            f"Of the split {show.code(one.split)} of {show.markdown(_data_name(card))}{_photos(one.photos)}{chosen}:"
        ]
        rows = [(name, "" if value is None or value != value else f"{value:.4f}") for name, value in one.scores.items()]
        lines += ["", *show.markdown_table(("score", "value, from 0 to 1"), rows), ""]
    return lines[:-1] or ["None is told."]


def _weights(card):
    random = f"- random, as the source has none: {show.markdown(', '.join(card.unfilled))}"
    digest = [f"- SHA-256 of the tensors: `{card.weights}`"] if card.weights else []
    return [
        f"- {card.parameters:,} parameters, from {show.markdown(card.source)}",
        *digest,
        f"- arguments of the model: {show.code(json.dumps(card.arguments))}",
        f"- batch norms: {show.code(json.dumps(msgspec.to_builtins(card.norm)))}",
        *([random] if card.unfilled else []),
    ]


def _licence(card):
    if card.license:
        return f"{show.markdown(card.license)}, of the weights."
    return (
        "Nobody has told the licence of these weights; `axial-export --license` states it. axial itself is Apache-2.0."
    )


def _commands(card, form, task):
    made = [f"    {show.plain(line)}" for line in card.made]
    use = {
        "saved_model": "axial-predict --saved_model=FOLDER --output_dir=OUT PHOTO",
        "safetensors": "axial-predict --model=FOLDER --output_dir=OUT PHOTO",
        "weights": "axial-evaluate --gin_file=RECIPE --model=FOLDER --data_dir=DATA",
    }
    used = [use.get(form, use["saved_model"])]
    if task == "translation":
        used = [used[0].partition(" --output_dir")[0] + ' --text="A sentence."']
    if form in ("safetensors", "weights"):
        used += ["python -c \"import axial; model = axial.load('FOLDER')\""]
    made = ["It was made by:", "", *made, ""] if made else []
    return [*made, "FOLDER is the folder of this page. It is used by:", "", *(f"    {line}" for line in used)]
