"""The prediction of one photo or text, and the files that store it."""

import functools
import json
import os
from typing import Any

import numpy as np
from PIL import Image

from axial.data.labels import colors_of
from axial.data.objects import Objects, diameters, grey_level
from axial.data.specs import Spec
from axial.errors import InputError
from axial.io.write import write_image, write_text
from axial.serving import measure
from axial.serving.predictor import Predictor
from axial.tasks.base import Evaluator

# A `Result` warns if the median diameter of its objects is outside the training's 5th to 95th percentile by more than
# the factor FAR_DIAMETER, or if the photo's median grey level is outside these percentiles by more than FAR_LEVEL.
FAR_DIAMETER, FAR_LEVEL = 1.2, 64
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF"}
LONGEST_JPEG = 65500  # pixels along a side, libjpeg's limit
LABEL_IMAGES = {"png": ".labels.png", "tiff": ".labels.tif"}  # format -> ending of a label image's name


class Result:
    """The prediction of one photo or text.

    Args:
        image: uint8 [h, w, 3], or the text.
        prediction: dict that a predictor returns for `image`.
        evaluator: `Evaluator` of the predictor.
        spec: `DatasetSpec` or `TextSpec` of the predictor.
        photo: name of the photo for the JSON; None for no name.
        objects: `Objects` of the training photos, for comparison; None for no comparison.
        stored: [h, w, C], the values of the photo as its file stores them; by default `image`.

    Attributes:
        panoptic: int32 [h, w], the 'id' of each pixel's segment, 0 for void; None if the task is not a segmentation.
        segments: list of dicts of the segments or objects, as in the JSON; None if the task has no segments or objects.
        summary: text that describes the prediction briefly.
        warnings: list of warnings, without the photo's name: the prediction lacks objects, or the objects or the photo
            differ from the training's objects or photos.

    Raises:
        InputError: there are more segments than a panoptic PNG has ids.
    """

    def __init__(
        self,
        image: np.ndarray | str,
        prediction: dict,
        *,
        evaluator: Evaluator,
        spec: Spec,
        photo: str | None = None,
        objects: Objects | None = None,
        stored: np.ndarray | None = None,
    ):
        self.image, self.prediction, self.evaluator, self.spec, self.photo = image, prediction, evaluator, spec, photo
        self.stored = image if stored is None else stored
        self._description = description = evaluator.describe(image, prediction, spec)
        self.panoptic, self.segments, self.summary = description.panoptic, description.segments, description.summary
        self._about: dict = {"photo": photo} if photo is not None else {}
        if evaluator.takes == "photo":
            self._about |= {"height": image.shape[0], "width": image.shape[1]}  # type: ignore[union-attr]
        if "zoom" in prediction:
            self._about["zoom"] = prediction["zoom"]
        note = _note(image, self.segments, objects, prediction.get("zoom")) if objects else ""
        self.warnings = [line for line in (description.warning, note) if line]
        if self.warnings:
            self._about["warnings"] = self.warnings

    @classmethod
    def of(
        cls, predictor: Predictor, image: np.ndarray | str, photo: str | None = None, stored: np.ndarray | None = None
    ) -> "Result":
        """The `Result` of calling a predictor with a photo or a text."""
        evaluator, spec, objects, prediction = predictor.evaluator, predictor.spec, predictor.objects, predictor(image)
        return cls(image, prediction, evaluator=evaluator, spec=spec, objects=objects, photo=photo, stored=stored)

    def __repr__(self) -> str:
        return f"Result(photo={self.photo!r}, summary={self.summary!r})"

    def json(self) -> dict:
        """dict of the content of PHOTO.json, without the names of other files."""
        return {**self._about, **self._description.content}

    def overlay(self, fill: float | None = None) -> np.ndarray:
        """uint8 [h, w, 3]: the photo with the prediction drawn on it, or below it for a classification.

        Args:
            fill: strength of the colours inside segments or masks: 0 draws only outlines, 1 hides the photo. The
                default is `FILL` of axial.tasks.segmentation.drawing. Not for a classification or a translation.
        """
        return self._description.draw(*([] if fill is None else [fill]))

    @functools.cached_property
    def labels(self) -> np.ndarray | None:
        """uint16 [h, w]: 0 for the background, i for the instance whose 'label' is i in the JSON.

        In a segmentation, the instances are the segments of things. In a detection, the instances are the masks of the
        drawn objects; where masks overlap, a pixel belongs to the object with the better score.

        None if the network predicts no instances, or no masks of instances.

        Raises:
            InputError: there are more instances than 16 bits can number.
        """
        if self._description.label_image is None:
            return None
        labels = self._description.label_image()
        most = np.iinfo(np.uint16).max
        if labels.max(initial=0) > most:
            raise InputError(f"{labels.max()} instances in one photo; a label image of 16 bits has numbers for {most}")
        return labels.astype(np.uint16)

    def masks(self) -> np.ndarray:
        """bool [N, h, w]: the pixels of each object, in the order of `table`. Raises InputError; see `table`."""
        return measure.masks(self)

    def table(self, pixel_size: str | None = None) -> list[dict]:
        """List of a dict for each object, with its class, score, shape and intensities; see docs/measure.md.

        Args:
            pixel_size: side of a pixel and its unit, like '0.65um', for areas and lengths in that unit too.

        Raises:
            InputError: `pixel_size` is not valid, or the network predicts no instances or no masks of them.
        """
        table = measure.columns(self, pixel_size)
        return [dict(zip(table, row)) for row in zip(*table.values())]

    def detections(self) -> Any:
        """`supervision.Detections` of the objects, in the order of `table`. Its `class_id` are indices of the spec.

        Raises:
            InputError: the package supervision is missing; see also `table`.
        """
        return measure.detections(self)

    def geojson(self) -> dict:
        """The objects as a GeoJSON FeatureCollection, in the order of `table`; see `measure.geojson`.

        Raises:
            InputError: see `table`.
        """
        return measure.geojson(self)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the `overlay` as a picture, whole or not at all. The suffix of the path chooses the format.

        Raises:
            InputError: the suffix is not in `FORMATS`, or the picture is too large for JPEG.
        """
        path = os.fspath(path)
        format = FORMATS.get(os.path.splitext(path)[1].lower())
        if format is None:
            raise InputError(f"{path}: a picture's name ends in {', '.join(FORMATS)}")
        pixels = self.overlay()
        if format == "JPEG" and max(pixels.shape) > LONGEST_JPEG:
            raise InputError(f"{path}: JPEG holds at most {LONGEST_JPEG} pixels along a side; save it as PNG")
        write_image(path, Image.fromarray(pixels), format)

    def paths(self, stem: str | os.PathLike, label_image: str | None = None, geojson: bool = False) -> dict[str, str]:
        """dict from each file's key in the JSON to the file's path. The last key is 'json', for the JSON. See `write`.

        Raises:
            InputError: the prediction has no label image, or too many instances for one.
        """
        if label_image not in (None, *LABEL_IMAGES):
            raise InputError(f"label_image={label_image!r}: expected {' or '.join(LABEL_IMAGES)}")
        if (label_image or geojson) and self.labels is None:
            asked = f"label_image={label_image}" if label_image else "geojson"
            raise InputError(f"{asked}: {measure.NO_PIXELS}")
        endings = {key: ending for key, (ending, _) in self._pictures(label_image).items()}
        endings |= {"geojson_file_name": ".geojson"} if geojson else {}
        return {key: f"{os.fspath(stem)}{ending}" for key, ending in (*endings.items(), ("json", ".json"))}

    def _pictures(self, label_image, fill=None):
        """dict from each picture's key in the JSON to (ending of its file name, function that returns its pixels)."""
        categories = self._description.categories
        pictures = {
            "file_name": (".panoptic.png", self.panoptic is not None and (lambda: colors_of(self.panoptic))),
            "semantic_file_name": (".semantic.png", categories is not None and (lambda: categories)),
            "label_file_name": (LABEL_IMAGES.get(label_image), label_image is not None and (lambda: self.labels)),
            "overlay_file_name": (".overlay.png", self.segments is not None and (lambda: self.overlay(fill))),
        }
        return {key: (ending, pixels) for key, (ending, pixels) in pictures.items() if pixels}

    def write(
        self, stem: str | os.PathLike, label_image: str | None = None, geojson: bool = False, fill: float | None = None
    ) -> list[str]:
        """Writes the files that axial-predict writes, each whole or not at all. The JSON comes last.

        - STEM.panoptic.png, for a segmentation: the ids of its segments in COCO's encoding, R + 256 G + 65536 B.
        - STEM.semantic.png, for a segmentation: the category id of each pixel, before pixels are grouped into segments.
          This file is not written if a category id needs more than 16 bits.
        - STEM.labels.png or STEM.labels.tif, on request: `labels`.
        - STEM.overlay.png, for a segmentation or a detection: `overlay`.
        - STEM.geojson, on request: `geojson`.
        - STEM.json: `json` and the names of the other files.

        Args:
            stem: path without suffix.
            label_image: 'png' or 'tiff', the format of the label image; None for no label image.
            geojson: whether to write STEM.geojson.
            fill: see `overlay`.

        Returns:
            list of the paths.

        Raises:
            InputError: see `paths`. Then no file is written.
        """
        paths = self.paths(stem, label_image, geojson)
        for key, (ending, pixels) in self._pictures(label_image, fill).items():
            write_image(paths[key], Image.fromarray(pixels()), FORMATS[ending[-4:]])
        if geojson:
            write_text(paths["geojson_file_name"], json.dumps(self.geojson()) + "\n")
        names = {key: os.path.basename(path) for key, path in paths.items() if key != "json"}
        # json.dumps escapes names that are not Unicode.
        content = json.dumps({**self._about, **names, **self._description.content}, indent=1)
        write_text(paths["json"], content + "\n")
        return list(paths.values())


def _note(image, segments, objects, zoom):
    """A warning if objects or photo differ from the training's, else ''. `zoom` is the photo's scale factor or None."""
    widths = diameters([segment["area"] for segment in segments if segment["thing"]]) * (zoom or 1)
    low, median, high = objects.diameter
    dark, grey, bright = objects.level
    level, notes = grey_level(image), []
    if not len(widths):
        notes.append("no object is found")
    elif not low / FAR_DIAMETER <= np.median(widths) <= high * FAR_DIAMETER:
        scaled = f" at the zoom {zoom:g}" if zoom else ""
        notes.append(
            f"its objects are {np.median(widths):.0f} pixels wide at the median{scaled}, the training's {median:.0f} "
            f"({low:.0f} to {high:.0f})"
        )
    if not dark - FAR_LEVEL <= level <= bright + FAR_LEVEL:
        notes.append(
            f"its median grey level is {level:.0f}, the median of the training's photos {grey:.0f} ({dark:.0f} to "
            f"{bright:.0f})"
        )
    advice = ": try --diameter=auto" if notes and not zoom else ""
    return "; ".join(notes) + advice
