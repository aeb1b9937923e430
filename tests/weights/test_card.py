"""Model cards: the YAML header for Hugging Face's hub, and a complete page that shows all names literally."""

import re

import msgspec
import pytest
import yaml
from markdown_it import MarkdownIt

from axial.data.levels import LEVELS
from axial.data.specs import DatasetSpec
from axial.models.outputs import MEANINGS
from axial.models.registry import VARIANTS, ModelConfig
from axial.tasks.classification.task import ClassificationData, ClassificationTask
from axial.tasks.detection.input_pipeline import DetectionData
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.input_pipeline import DataConfig
from axial.tasks.segmentation.panoptic import PanopticTask, SegmentationTask
from axial.weights.card import FORMS, page
from axial.weights.interchange import CardScores, CardSplit, make_card
from tests.hostile import NAMES

SPEC = DatasetSpec("three", ("a", "b", "c"), (1, 2, 3), (True, False, False))
NANO = ModelConfig("axial_resnet_nano", arguments={"pixels": "torchvision"})
# For each model: (class of its task, class of its data, the hub's name of the task, a row of its table of outputs).
TASKS = {
    "axial_deeplab_nano": (PanopticTask, DataConfig, "image-segmentation", "| instance | int32 |"),
    "ccnet_nano": (SegmentationTask, DataConfig, "image-segmentation", "| semantic | int32 |"),
    "resnet_nano": (ClassificationTask, ClassificationData, "image-classification", "| class | string |"),
    "mask_rcnn_resnet_50": (DetectionTask, DetectionData, "object-detection", "| mask | float32 |"),
    "faster_rcnn_resnet_50": (DetectionTask, DetectionData, "object-detection", "| box | float32 |"),
}


def make(name, make_task, make_data, data_dir):
    """The task of the model `name`, with data in `data_dir`: the samples of COCO or the photos of colours."""
    splits = ("train", "val") if make_data is ClassificationData else ("train2017", "val2017")
    return make_task(ModelConfig(name), make_data(*splits), data_dir)


def split_page(text):
    """Splits a card into (dict of the YAML header, text below it)."""
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
    return yaml.safe_load(head), body


def full_card():
    """A card with a value in every field. Its second result also has the scores None and NaN."""
    return msgspec.structs.replace(
        make_card(NANO, 3, (33, 33), spec=SPEC),
        scores={"top1": 0.25},
        scored_split="val",
        scored_photos=12,
        results=[CardScores("test", 1500, {"top1": 0.5, "top5": None, "ece": float("nan")})],
        trained=CardSplit("train", 300),
        license="cc-by-4.0",
        made=["axial-train --model_dir=RUN"],
        input={"ckpt-1.index": "ab" * 32},
        parameters=1234,
        weights="ef" * 32,
    )


def test_the_page_says_all():
    """The header of a full card's page has all scores except None and NaN. The body has all fields."""
    head, body = split_page(page(full_card(), "safetensors", {"a.safetensors": "cd" * 32}))
    assert head["license"] == "cc-by-4.0" and head["library_name"] == "axial" and head["datasets"] == ["three"]
    assert head["pipeline_tag"] == "image-classification" and "safetensors" in head["tags"]
    (model,) = head["model-index"]
    assert model["name"] == "axial_resnet_nano"
    results = [(one["dataset"]["split"], one["metrics"]) for one in model["results"]]
    metric = {"type": "top1", "name": "top1"}
    assert results == [("val", [{**metric, "value": 0.25}]), ("test", [{**metric, "value": 0.5}])]
    for words in (
        *("# axial_resnet_nano", "a, b, c", "33x33 pixels", "123.675", "ab" * 32, "cd" * 32, "ef" * 32, "1,234"),
        "On the split `val` of three, 12 records, on which this checkpoint was chosen as its run's best:",
        "On the split `test` of three, 1,500 records:",
        "| top1 | 0.2500 |",
        "trained on the split `train`, 300 records",
        "| photos | float32 | \\[N, h, w, 3\\] | RGB from -1 to 1",
        "| logits | float32 | \\[N, C\\] |",
        '"pixels": "torchvision"',
        "    axial-train --model_dir=RUN",
        "    axial-predict --model=FOLDER",
        "cc-by-4.0, of the weights.",
    ):
        assert words in body, words


def test_a_card_of_before_has_a_page_too():
    """The card of converted weights has no spec, scores or commands. Its page says what is unknown."""
    card = msgspec.structs.replace(make_card(NANO, 3, source="deeplab2"), unfilled=["logits/conv/kernel"])
    head, body = split_page(page(card, "weights", {}))
    assert head["license"] == "unknown" and "model-index" not in head and "datasets" not in head
    for words in ("No scores", "3 classes; the source does not name them", "weights is unknown", "logits/conv/kernel"):
        assert words in body


@pytest.mark.parametrize(
    "name,form", [*((name, "saved_model") for name in TASKS), *(("axial_deeplab_nano", form) for form in FORMS)]
)
def test_every_form_says_what_goes_in_and_comes_out(name, form, sample_dir, colours_dir):
    """The page describes preprocessing, input and output of each task's SavedModel and each panoptic export format."""
    card = make_card(ModelConfig(name), 3, (65, 97), spec=SPEC, scale=1.5)
    outputs = {"semantic_logits": (1, 17, 25, 3)} if form in ("tflite", "onnx") else None
    make_task, make_data, hub, row = TASKS[name]
    task = make(name, make_task, make_data, colours_dir if make_data is ClassificationData else sample_dir)
    head, body = split_page(page(card, form, {}, task=task, outputs=outputs))
    assert head["pipeline_tag"] == hub and form.replace("_", "-") in head["tags"]
    assert "1.5 times the photo's own\n- largest canvas: 65x97 pixels" in body
    assert f"- a photo of more than 8 bits:\n  {LEVELS[SPEC.levels]}" in body
    given, returned = body.split("## Input")[1].split("## Output")[0], body.split("## Output")[1].split("## Data")[0]
    assert {"saved_model": "uint8", "tflite": "1, 65, 97, 3", "onnx": "1, 65, 97, 3"}.get(form, "N, h, w, 3") in given
    if outputs:
        assert "| semantic_logits | float32 | \\[1, 17, 25, 3\\] |" in returned
    elif form == "saved_model":
        assert row in returned and ("| mask |" in returned) == name.startswith("mask")
    else:
        assert "| offset_map | float32 | \\[N, h / 4, w / 4, 2\\] |" in returned and "pixels of the map" in returned


def test_every_model_says_what_it_is_for():
    """Each model variant has a title and the hub's task. `MEANINGS` describes each of its outputs."""
    for variant in VARIANTS.values():
        assert variant.model.title and variant.model.hub.islower()
        assert {name for name, _ in variant.model.maps} <= set(MEANINGS)


def test_a_card_shows_names_as_they_are():
    """Hostile names of classes, files, scores and weights add no markup and do not leave their table cells."""
    names = [name for name in NAMES if name.isprintable()]
    spec = DatasetSpec("mine <b> | *c*", tuple(names), tuple(range(len(names))), (True,) * len(names))
    files = {f"{name}.index": "ab" * 32 for name in names}
    card = msgspec.structs.replace(
        make_card(NANO, len(names), (33, 33), spec=spec),
        scores=dict.fromkeys(names, 0.25),
        scored_split="<b> `val` | *c*\n---",
        input=files,
        unfilled=names,
        license="<b> | *c*\n---\n# x",
        made=[f"axial-train --gin_binding={name}" for name in names],
    )
    head, body = split_page(page(card, "safetensors", files))
    assert head["license"] == card.license and head["datasets"] == [spec.name]
    assert [metric["type"] for metric in head["model-index"][0]["results"][0]["metrics"]] == names
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    texts = ["".join(child.content for child in token.children) for token in tokens if token.type == "inline"]
    children = [child for token in tokens for child in token.children or [token]]
    assert {child.content for child in children if child.type == "html_inline"} <= {"<code>", "</code>"}
    assert not {child.type for child in children} & {"html_block", "link_open", "em_open", "strong_open", "image"}
    assert f"{spec.name}, {len(names)} classes: {', '.join(names)}" in texts
    first = texts.index("score") + 2
    assert texts[first : first + 2 * len(names)] == [text for name in names for text in (name.strip(), "0.2500")]
