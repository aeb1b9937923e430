"""Evaluator of detection: COCO's average precision and recall of boxes and masks, at each photo's own size."""

import functools
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as masks

from axial.data.converters.boxes import as_json, encoded
from axial.data.streams import decode_photo
from axial.data.tfrecord import WITH_OBJECTS, photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.show import percent, plain
from axial.io.write import write_json
from axial.metrics.coco_ap import FIGURES, CocoAP
from axial.tasks.base import Description, Evaluator, summary_line
from axial.tasks.detection.input_pipeline import has_masks, record_masks, record_objects
from axial.tasks.metrics import Metrics, PredictionWriter
from axial.tasks.segmentation.drawing import FILL, segment_colors

SHOWN = 0.5  # score threshold of objects in pictures and summaries


def predicted_objects(prediction, spec, image_id, size):
    """The predicted objects in COCO's results format, as a list of dicts, the best score first.

    Args:
        prediction: dict of 'box' [K, 4] of (x, y, width, height) in pixels of the photo, 'class' [K] of class indices
            of the spec, 'score' [K], 'count' [], and, if the network has masks, 'mask' [K, side, side] of probabilities
            on the boxes.
        spec: `DatasetSpec`.
        image_id: the photo's id in the data set.
        size: (height, width) of the photo.
    """
    count = int(prediction["count"])
    boxes, scores, classes = (np.asarray(prediction[name])[:count] for name in ("box", "score", "class"))
    objects = [
        {
            "image_id": int(image_id),
            "category_id": int(spec.category_ids[index]),
            "bbox": [round(float(v), 4) for v in box],
            "score": float(score),
        }
        for box, score, index in zip(boxes, scores, classes)
    ]
    if "mask" in prediction:
        for one, mask in zip(objects, np.asarray(prediction["mask"])):
            one["segmentation"] = as_json(encoded(paste_mask(mask, one["bbox"], size)))
    return objects


def paste_mask(mask, box, size):
    """Resizes a mask to its box and pastes it into the photo: uint8 [h, w], 1 where the probability is at least 1/2.

    Args:
        mask: float [side, side] of probabilities, which are interpolated bilinearly.
        box: (x, y, width, height) in pixels.
        size: (height, width) of the photo.
    """
    x, y, width, height = box
    rows = _stretch(size[0], y, height, mask.shape[0])
    columns = _stretch(size[1], x, width, mask.shape[1])
    return (rows @ mask.astype(np.float64) @ columns.T >= 0.5).astype(np.uint8)


def _stretch(pixels, first, length, side):
    """Returns float [pixels, side]: along one axis, the weight of each mask cell in each pixel of the photo.

    Linear interpolation gives the weights. Pixels outside the box (from `first`, `length` long) have weight 0.
    """
    centers = np.arange(pixels) + 0.5
    positions = np.clip((centers - first) / max(length, 1e-6) * side - 0.5, 0, side - 1)
    weights = np.maximum(1 - np.abs(positions[:, None] - np.arange(side)), 0)
    return weights * ((centers >= first) & (centers < first + length))[:, None]


def true_objects(example, spec, masked=False):
    """The true objects of an evaluation example in COCO's annotation format, with the class index as 'category_id'.

    With `masked`, an object that has a mask has a 'segmentation'.
    """
    columns = (example[f"object/{name}"].numpy().tolist() for name in ("class", "crowd", "box", "area"))
    names = ("category_id", "iscrowd", "bbox", "area")
    objects = [dict(zip(names, row)) for row in zip(*columns)]
    if masked:
        for one, mask, has_mask in zip(objects, *(x.numpy() for x in record_masks(example, spec))):
            if has_mask:
                one["segmentation"] = as_json(encoded(mask))
    return objects


def with_mask(one, size):
    """A true object for mask AP. An object without a mask becomes a crowd that fills its box.

    A crowd is never counted as missed, and predictions on it are not false positives. pycocotools needs a mask for
    every object.

    Args:
        one: a true object.
        size: (height, width) of the photo.
    """
    if "segmentation" in one:
        return one
    return {**one, "iscrowd": 1, "segmentation": masks.frPyObjects(np.array([one["bbox"]], np.float64), *size)[0]}


class DetectionMetrics(Metrics):
    """COCO's AP and AR of boxes and of masks. Merged shards give exactly the scores of the whole split.

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) to score every n-th photo of the split, from the i-th on.
    """

    parts = ("box", "mask")

    def __init__(self, spec, shard=(0, 1)):
        super().__init__(spec, shard)
        self.box, self.mask = CocoAP("bbox", spec.num_classes), CocoAP("segm", spec.num_classes)

    def update(self, example, prediction):
        """Adds one photo. Returns its `predicted_objects`."""
        size = tuple(int(side) for side in example["size"])
        objects = predicted_objects(prediction, self.spec, example["image/id"], size)
        return self.add(example, objects, masked="mask" in prediction)

    def add(self, example, objects, masked=False):
        """Adds the predicted objects of one photo, and returns these objects. `masked` is whether they have masks."""
        size, index = tuple(int(side) for side in example["size"]), self.spec.class_of_category
        masked = masked and bool(has_masks(example))
        true = true_objects(example, self.spec, masked)
        predicted = [
            {**one, "category_id": index[one["category_id"]], "iscrowd": 0, "area": math.prod(one["bbox"][2:])}
            for one in objects
        ]
        # The next line needs the photo's number, because AP ranks equal scores in the order of the data set.
        image = int(example.get("number", self.next_number()))
        photo_ap = CocoAP("bbox", self.spec.num_classes)
        photo_ap.add(true, predicted, size=size, image=image)
        self.box.merge(photo_ap)
        if masked:
            predicted = [{**one, "area": float(masks.area(one["segmentation"]))} for one in predicted]
            self.mask.add([with_mask(one, size) for one in true], predicted, size=size, image=image)
        quality = photo_ap.figures()["ap"]
        self.add_photo(photo_name(example), None if math.isnan(quality) else quality)
        return objects

    def result(self):
        """dict of `CocoAP.figures` for 'box' and, if there are masks, 'mask'.

        'per_class' maps the name of each class in the ground truth to its box AP.
        """
        names = self.spec.class_names
        figures = {"box": self.box.figures()} | ({"mask": self.mask.figures()} if self.mask.images else {})
        return {**figures, "per_class": {names[c]: value for c, value in self.box.per_class().items()}}


# === Prediction writer ===


class DetectedPhoto(schemas.Strict):
    """The objects of one photo, as the state file of an evaluation stores them."""

    image_id: schemas.Count
    objects: list[schemas.Detection]


class DetectionPredictionWriter(PredictionWriter):
    """Writes detection_SPLIT.json in COCO's results format: a list of the objects of all photos."""

    kind, schema = "detection", DetectedPhoto

    def check(self, where, annotations):
        things = {self.spec.category_ids[index] for index in self.spec.thing_classes}
        for one in (one for photo in annotations for one in photo.objects):
            if one.category_id not in things:
                raise InputError(f"{where}: category_id {one.category_id}: not a thing of the spec {self.spec.name!r}")
            if min(one.bbox[2:]) < 0:
                raise InputError(f"{where}: bbox: expected (x, y, width, height) with sides of at least 0")

    def add(self, example, objects):
        """Adds one photo."""
        self.annotations.append({"image_id": int(example["image/id"]), "objects": objects})

    def decoded(self, index):
        """The objects that `add` was given for photo number `index`."""
        return self.annotations[index]["objects"]

    def close(self):
        """Writes the JSON."""
        photos = sorted(self.annotations, key=lambda photo: photo["image_id"])
        write_json(self.path, [one for photo in photos for one in photo["objects"]])


# === Pictures and descriptions ===


def draw_objects(photo, objects, classes, spec, fill=FILL):
    """Draws objects on a photo: boxes, class names and, if there are any, masks. Returns uint8 [h, w, 3].

    Args:
        photo: uint8 [h, w, 3].
        objects: list of dicts with 'bbox', (x, y, width, height) in pixels, and optionally 'score', which is printed
            after the class name, and 'segmentation', a mask. The first object is drawn last, on top of the others.
        classes: class index of each object.
        spec: `DatasetSpec`.
        fill: strength of the colours of masks, from 0 to 1.
    """
    colors, pixels = segment_colors(classes, spec), photo.astype(np.float64)
    for one, color in zip(objects, colors):
        if "segmentation" in one:
            inside = masks.decode(one["segmentation"])[..., None] > 0
            pixels = np.where(inside, (1 - fill) * pixels + fill * color, pixels)
    image = Image.fromarray(pixels.astype(np.uint8))
    side = max(photo.shape[:2])
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(max(10, round(side / 40)))
    for one, index, color in reversed([*zip(objects, classes, map(tuple, colors.tolist()))]):
        x, y, width, height = one["bbox"]
        draw.rectangle((x, y, x + width, y + height), outline=color, width=max(2, side // 300))
        text = plain(spec.class_names[index]) + (f" {one['score']:.0%}" if "score" in one else "")
        draw.rectangle(draw.textbbox((x, y), text, font=font), fill=color)
        draw.text((x, y), text, fill="black", font=font)
    return np.asarray(image)


def _draw_predicted(photo, objects, spec, fill=FILL):
    """A photo with the predicted objects whose score is at least `SHOWN`."""
    shown = [one for one in objects if one["score"] >= SHOWN]
    classes = [spec.class_of_category[one["category_id"]] for one in shown]
    return draw_objects(photo, shown, classes, spec, fill=fill)


def _object_json(number, name, one):
    """One of the `predicted_objects` as a dict for JSON. An object that is drawn and has a mask has a 'label'."""
    masked = "segmentation" in one
    _, _, width, height = one["bbox"]
    return {
        "id": number,
        "class": name,
        "category_id": one["category_id"],
        "thing": True,
        **({"label": number} if masked and one["score"] >= SHOWN else {}),
        "score": round(one["score"], 4),
        "area": int(masks.area(one["segmentation"])) if masked else round(width * height, 4),
        "box": one["bbox"],
        **({"mask": one["segmentation"], "segmentation": one["segmentation"]} if masked else {}),
    }


def _label_image(listed, size):
    """The `label_image` of a `Description`. Where masks overlap, the object with the highest score gets the pixel."""
    labels = np.zeros(size, int)
    for one in reversed(listed):
        if "label" in one:
            labels[masks.decode(one["segmentation"]) > 0] = one["label"]
    return labels


class DetectionEvaluator(Evaluator):
    """Evaluator of object detection."""

    name, labels = "detection", WITH_OBJECTS
    metrics = DetectionMetrics
    quality = "AP"
    writer = DetectionPredictionWriter
    pictures = ("photo", "truth", "prediction")
    one_file = False

    def truth(self, record, spec):
        objects = record_objects(record, spec)
        return super().truth(record, spec) | {f"object/{name}": x for name, x in objects.items()}

    def draw(self, example, objects, spec):
        """Pictures of the photo, the ground truth and the prediction, each uint8 [h, w, 3]."""
        photo = decode_photo(example).numpy()
        true = true_objects(example, spec)
        truth = draw_objects(photo, true, [one["category_id"] for one in true], spec)
        return photo, truth, _draw_predicted(photo, objects, spec)

    def describe(self, image, prediction, spec):
        """The `Description` of the prediction for a photo, uint8 [h, w, 3]."""
        objects = predicted_objects(prediction, spec, 0, image.shape[:2])
        names = [spec.class_names[spec.class_of_category[one["category_id"]]] for one in objects]
        likely = [f"{name} {one['score']:.0%}" for name, one in zip(names, objects) if one["score"] >= SHOWN]
        listed = [_object_json(i, name, one) for i, (name, one) in enumerate(zip(names, objects), 1)]
        return Description(
            content={"objects": listed},
            summary=summary_line(len(likely), "object", likely),
            draw=functools.partial(_draw_predicted, image, objects, spec),
            segments=listed,
            label_image=functools.partial(_label_image, listed, image.shape[:2]) if "mask" in prediction else None,
        )

    def columns(self, result):
        """Flat dict of all scores. The names of mask scores begin with 'mask_'."""
        flat = {name: result["box"][name] for name in FIGURES}
        return flat | {f"mask_{name}": value for name, value in result.get("mask", {}).items()}

    def headline(self, result):
        """The main scores: box AP and mask AP."""
        flat = self.columns(result)
        return {name: flat[name] for name in ("ap", "ap50", "ap75", "mask_ap") if name in flat}

    def classes(self, result):
        """See `Evaluator.classes`."""
        rows = [[name, percent(value)] for name, value in result["per_class"].items()]
        return ["class", "AP"], rows, [[name, percent(value)] for name, value in self.columns(result).items()]


DETECTION = DetectionEvaluator()
