"""Schemas of input files: fields, types and ranges, which `read.py` checks.

This module has the base classes, COCO's formats, and the schemas that several packages share. A schema that only one
module uses is in that module.
"""

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1, max_length=1000)]
ImageId = Annotated[int, Meta(ge=0, le=2**53)] | Text  # cityscapesscripts uses names
Side = Annotated[int, Meta(ge=1, le=2**16)]
Category = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
SegmentId = Annotated[int, Meta(ge=1, lt=2**24)]
Byte = Annotated[int, Meta(ge=0, le=255)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Color = tuple[Byte, Byte, Byte]
Flag = typing.Literal[0, 1] | bool


class Struct(msgspec.Struct, frozen=True):
    """Base of schemas that ignore unknown fields."""


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of schemas that refuse unknown fields."""


# === COCO's panoptic format, and cityscapesscripts' ===


class Photo(Struct):
    """An entry of `images`. Its file_name may have folders; `paths.inside` makes a path from it."""

    id: ImageId
    file_name: Text


class Image(Photo):
    width: Side
    height: Side


class Segment(Struct):
    id: SegmentId
    category_id: Category
    iscrowd: Flag = 0
    score: Annotated[float, Meta(ge=0)] = 1.0  # axial's may exceed 1, like values of the center heat map


class Annotation(Struct):
    image_id: ImageId
    file_name: Text
    segments_info: list[Segment]
    semantic: Text | None = None  # in results: file name of the PNG with the photo's semantic classes


class CategoryRow(Struct):
    """A category. Missing fields are None."""

    id: Category
    name: str | int | float | None = None
    isthing: Flag | None = None
    color: Any = None
    supercategory: Any = None


class Panoptic(Struct):
    """panoptic_SPLIT.json."""

    images: list[Image]
    annotations: list[Annotation]
    categories: list[CategoryRow]


class ImageInfo(Struct):
    """image_info_SPLIT.json of a split without labels."""

    images: list[Photo]


class Results(Struct):
    """A JSON of panoptic results."""

    annotations: list[Annotation]
    categories: list[CategoryRow] | None = None


class PredictedSegment(Segment, kw_only=True):
    name: Text = msgspec.field(name="class")
    thing: bool


class Predicted(Struct):
    """PHOTO.json, as axial-predict writes it for a segmentation."""

    segments: list[PredictedSegment]


# === COCO's detection format ===

Box = tuple[float, float, float, float]  # x, y, width, height in pixels


class Instance(Struct):
    """An annotated object. Its segmentation is a list of polygons, or run lengths."""

    id: Count
    image_id: ImageId
    category_id: Category
    bbox: Box | None = None
    area: Annotated[float, Meta(ge=0)] | None = None
    iscrowd: Flag = 0
    segmentation: list[Any] | dict[str, Any] | None = None


class Instances(Struct):
    """instances_SPLIT.json."""

    images: list[Image]
    annotations: list[Instance]
    categories: Annotated[list[CategoryRow], Meta(min_length=1)]


class RunLengths(Struct):
    """A mask as compressed run lengths of pycocotools."""

    size: tuple[Side, Side]
    counts: str


class AnyRunLengths(RunLengths):
    """A mask of COCO's annotations, whose run lengths may be uncompressed."""

    counts: str | list[Annotated[int, Meta(ge=0, lt=2**32)]]


class Detection(Struct):
    """An entry in a list of detection results."""

    image_id: ImageId
    category_id: Category
    bbox: Box
    score: float
    segmentation: RunLengths | None = None


# === axial's own files ===


class AveragePrecision(Struct):
    """Average precision in a file of scores, from 0 to 1."""

    ap: float | None = None
    ap50: float | None = None


STATUS = "status.json"  # in the folder of a run


class RunStatus(Struct):
    """status.json: progress and speed of a run. axial-train writes it; axial-tpu and the run's page read it."""

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
