"""What the files that come in look like: fields, types and ranges. `read.py` checks them.

Here are what all schemas are made of, COCO's formats, and what rooms share. A file that one module reads has its schema
there.
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
Color = tuple[Byte, Byte, Byte]
Flag = typing.Literal[0, 1] | bool


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
    semantic: Text | None = None  # in results: the PNG of the photo's classes


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

    annotations: list[Annotation]
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


# === axial's own files ===


class AveragePrecision(Struct):
    """Of files of scores, from 0 to 1."""

    ap: float | None = None
    ap50: float | None = None


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
