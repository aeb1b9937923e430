"""What the files that come in look like: fields, types and ranges. `read.py` checks them.

The files that one task alone has stand beside the task.
"""

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1, max_length=1000)]
ImageId = Annotated[int, Meta(ge=0, le=2**53)] | Text  # cityscapesscripts has names
Side = Annotated[int, Meta(ge=1, le=2**16)]
Category = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
SegmentId = Annotated[int, Meta(ge=1, lt=2**24)]
Byte = Annotated[int, Meta(ge=0, le=255)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Pixels = Annotated[float, Meta(gt=0, le=2**16)]
Level = Annotated[float, Meta(ge=0, le=255)]
Color = tuple[Byte, Byte, Byte]
Flag = typing.Literal[0, 1] | bool
Divisor = Annotated[int, Meta(ge=1, le=2**24)]
# The largest panoptic label is (ignore + 1) x label_divisor and must fit an int32.
Ignore = Annotated[int, Meta(ge=1, le=2**15)]


class Struct(msgspec.Struct, frozen=True):
    """Fields that the schema does not name are ignored."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields that the schema does not name are an error."""


# === COCO's panoptic format, and cityscapesscripts' ===


class Photo(Struct):
    """Of its file_name `paths.inside` makes a path, as of an annotation's; both may have folders of their own."""

    id: ImageId
    file_name: Text


class Image(Photo):
    width: Side
    height: Side


class Segment(Struct):
    id: SegmentId
    category_id: Category
    iscrowd: Flag = 0
    score: Annotated[float, Meta(ge=0)] = 1.0  # of ours above 1, where a heat is


class Annotation(Struct):
    image_id: ImageId
    file_name: Text
    segments_info: list[Segment]


class WrittenAnnotation(Annotation):
    """An annotation of results. `semantic` is the PNG of the photo's classes."""

    semantic: Text | None = None


class CategoryRow(Struct):
    """A category of a JSON. What a JSON does not say of it is None."""

    id: Category
    name: str | int | float | None = None
    isthing: Flag | None = None
    color: Any = None


class Panoptic(Struct):
    """panoptic_SPLIT.json."""

    images: list[Image]
    annotations: list[Annotation]
    categories: list[CategoryRow]


class ImageInfo(Struct):
    """image_info_SPLIT.json, of splits without labels."""

    images: list[Photo]


class Results(Struct):
    """Panoptic results."""

    annotations: list[WrittenAnnotation]
    categories: list[CategoryRow] | None = None


class PredictedSegment(Segment, kw_only=True):
    name: Text = msgspec.field(name="class")
    thing: bool


class Predicted(Struct):
    """PHOTO.json of axial-predict, of a segmentation."""

    segments: list[PredictedSegment]


# === COCO's detection format ===

Box = tuple[float, float, float, float]  # x, y, width, height in pixels


class Instance(Struct):
    """An object. Its segmentation is polygons or run lengths."""

    id: Count
    image_id: ImageId
    category_id: Category
    bbox: Box
    area: Annotated[float, Meta(ge=0)]
    iscrowd: Flag = 0
    segmentation: list[Any] | dict[str, Any] | None = None


class Instances(Struct):
    """instances_SPLIT.json."""

    images: list[Image]
    annotations: list[Instance]
    categories: Annotated[list[CategoryRow], Meta(min_length=1)]


class RunLengths(Struct):
    """A mask, as pycocotools encodes it: its counts are numbers, or a text of them."""

    size: tuple[Side, Side]
    counts: str


class AnyRunLengths(RunLengths):
    """A mask of COCO's own annotations, whose counts may be plain numbers."""

    counts: str | list[Annotated[int, Meta(ge=0, lt=2**32)]]


class Detection(Struct):
    """An entry of detection results, a list of them."""

    image_id: ImageId
    category_id: Category
    bbox: Box
    score: float
    segmentation: RunLengths | None = None


# === Mapillary Vistas ===


class Label(Struct):
    name: Text
    readable: Text
    evaluate: bool
    instances: bool
    color: Color


class VistasConfig(Struct):
    """config_VERSION.json."""

    labels: list[Label]


# === axial's own files ===


class Spec(Strict):
    """A `DatasetSpec`; see there."""

    name: Text
    class_names: list[Text]
    category_ids: list[Category]
    things: list[bool]
    label_divisor: Divisor = 1000
    ignore: Ignore = 255
    palette: list[Color] = []
    ignored_ids: list[Category] = []
    levels: typing.Literal["depth", "percentiles"] = "depth"
    languages: list[Text] = []  # with the vocabulary, of a `TextSpec` alone
    vocabulary: str = ""


class ClassRow(Strict):
    id: Category
    name: Text
    thing: bool = False
    color: Color | None = None


class SpecFile(Strict):
    """The user's YAML of classes."""

    name: Text
    classes: Annotated[list[ClassRow], Meta(min_length=1)]
    ignored_ids: list[Category] = []
    label_divisor: Divisor = 1000
    ignore: Ignore = 255


class Plan(Struct):
    """.SPLIT.plan, of a conversion that goes on. Stamps are hashes of the sizes and times of a shard's input files."""

    format: typing.Literal[1]
    spec: Spec
    split: Text
    examples: Annotated[int, Meta(ge=1, le=2**40)]
    source: Text
    stamps: list[Text] = []
    labels: typing.Literal["panoptic", "objects", "class", "text"] = "panoptic"  # of `tfrecord.SCHEMAS`
    # Seed of the order of the records, of `tfrecord.item_numbers`; None where they have the order of the items.
    permutation: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    shards: list[tuple[Text, Count, Count]] = []
    hashes: list[Text] = []
    left_out: list[tuple[Count, str]] = []


class Manifest(Plan, kw_only=True):
    """SPLIT.json, of a converted split: shards are [file, records, bytes], hashes their SHA-256.

    The items that --skip_broken left out are (number in the data set's list, what is wrong).
    """

    shards: Annotated[list[tuple[Text, Count, Count]], Meta(min_length=1)]


class AveragePrecision(Struct):
    """Of files of scores, from 0 to 1."""

    ap: float | None = None
    ap50: float | None = None


class Evaluated(Struct):
    """evaluated.json: the last step whose evaluation was finished; also of best/scores.json.

    `evaluation` is what the scores depend on beside the weights. Older versions did not write it.
    """

    step: Count
    evaluation: dict[str, Any] | None = None


class SettingChange(Strict):
    """A setting that a resumed training has changed from that step on."""

    step: Count
    setting: Text
    before: Any
    after: Any


class TrainingSettings(Strict):
    """training.json of a run: what it is trained with; see `axial.training.continuing`."""

    format: typing.Literal[1]
    settings: dict[str, Any]
    changes: list[SettingChange] = []


class Objects(Strict):
    """objects.json of runs and exports: what the things of the training photos looked like, by their labels.

    Each range has the 5th percentile, the median and the 95th percentile: of the diameters of circles of the objects'
    areas, in pixels of the photos as they are stored, and of the photos' `grey_level`s.
    """

    photos: Count  # that were looked at
    objects: Count
    diameter: tuple[Pixels, Pixels, Pixels]
    level: tuple[Level, Level, Level]


STATUS = "status.json"  # in the folder of a run


class RunStatus(Struct):
    """status.json of a run: how far it is, and how fast. axial-train writes it; axial-tpu and the page read it."""

    state: typing.Literal["training", "evaluating", "done", "preempted", "failed"]
    step: Count
    steps: Count
    updated: str = ""  # ISO 8601, UTC
    host: str = ""
    seconds_per_step: Annotated[float, Meta(ge=0)] | None = None
    seconds_per_step_p90: Annotated[float, Meta(ge=0)] | None = None
    seconds_per_step_p99: Annotated[float, Meta(ge=0)] | None = None
    images_per_second: Annotated[float, Meta(ge=0)] | None = None
    input_bound: Annotated[float, Meta(ge=0)] | None = None
    machine: dict[str, str] = {}


class EvaluationState(Struct):
    """The state of an evaluation that goes on. Its annotations are those of `Evaluation.results`."""

    identity: dict[str, Any]
    complete: bool
    spec: Spec
    annotations: list[dict[str, Any]]
    scores: dict[str, Any]
    kind: str = "panoptic"
    model: str = ""


class Norm(Strict):
    """A `BatchNormConfig`."""

    momentum: Annotated[float, Meta(ge=0, lt=1)]
    epsilon: Annotated[float, Meta(gt=0)]
    unbiased: bool
    group: Count = 0
    frozen: bool = False


class CardSplit(Struct):
    """A split of a converted data set, and its number of records; 0 where nobody has told it."""

    split: Text
    photos: Count = 0


class CardScores(Struct):
    """Scores of a split, from 0 to 1, and whether the checkpoint was chosen by them."""

    split: Text
    photos: Count
    scores: dict[str, float | None]
    chosen: bool = False


class WeightsCard(Struct):
    """model.json of converted weights, card.json of runs, and the metadata of a safetensors file.

    preprocessing has the side of the photos and the mean and deviation of their pixels, from 0 to 255, and the scale of
    photos that are not fitted to that side. input has the SHA-256 of the files that the weights come from, scores has
    numbers from 0 to 1. scored_split is the split that the scores are of, and that the checkpoint was chosen on as the
    best of its run.
    """

    format: typing.Literal[1]
    model: Text
    num_classes: Annotated[int, Meta(ge=1, le=2**24)]
    arguments: dict[str, Any]
    norm: Norm
    source: Text
    preprocessing: dict[str, Any] = {}
    parameters: Count = 0
    input: dict[str, str] = {}
    unused: dict[str, str] = {}
    unfilled: list[str] = []
    spec: Spec | None = None
    scores: dict[str, float | None] = {}
    scored_split: str = ""
    scored_photos: Count = 0
    results: list[CardScores] = []  # of further evaluations, which chose nothing
    trained: CardSplit | None = None
    license: str = ""  # of the weights, as SPDX or the hub writes it
    made: list[str] = []  # the commands
    weights: str = ""  # SHA-256 of the tensors of a safetensors file


class TensorsHeader(Struct, rename={"metadata": "__metadata__"}):
    """The header of a safetensors file, without its tensors."""

    metadata: dict[str, str] = {}


class ZooRow(Strict):
    """A row of experiments/zoo.csv, of text alone. `experiments/paper/counts.py` counts the last two columns.

    Attributes:
        holds: which part of the model the file has: a classifier, a whole panoptic model, or the backbone of one.
        params: trainable numbers of this part.
        macs: multiply-adds of this part for a photo of the row's size.
    """

    checkpoint: Text
    model: Text
    source: Text
    holds: typing.Literal["classifier", "backbone", "panoptic"]
    data: Text
    photo: Annotated[str, Meta(pattern=r"^\d{1,5}x\d{1,5}$")]
    published: str
    published_at: Annotated[str, Meta(pattern="^https?://")]
    file: Annotated[str, Meta(pattern="^(https?://|axial/shipped/)")]
    licence: Text
    ours: str
    ours_on: str
    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    recipe: Text
    params: Annotated[str, Meta(pattern=r"^\d*$")] = ""
    macs: Annotated[str, Meta(pattern=r"^\d*$")] = ""


# === Reports of a training's input ===


class Arrivals(Struct):
    """What reached one host of a training with --data_service; see `axial.data.service`."""

    hosts: Annotated[int, Meta(ge=1)]
    epoch: Count
    examples: Count
    skipped: Count
    arrived: list[Count]


# === Conversion by Apache Beam ===


class WrittenShard(Strict):
    """What a worker says of a shard. One without a file has no digest.

    Broken items are (place in the shard, what is wrong), remarks (text, photo). After an `error` the job ends.
    """

    path: str
    size: Count = 0
    digest: str = ""
    seconds: dict[str, float] = {}
    error: str = ""
    broken: list[tuple[Count, str]] = []
    remarks: list[tuple[str, str]] = []


WrittenShards = list[WrittenShard]
