"""Scores detections at each photo's own size: COCO's average precision and recall of boxes, and of masks."""

import functools
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as masks

from axial.data.converters.instances import as_json
from axial.data.streams import decode_photo
from axial.data.tfrecord import WITH_OBJECTS, photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.show import percent, plain
from axial.io.write import write_json
from axial.metrics.coco_ap import FIGURES, CocoAP
from axial.tasks.base import Description, Evaluator, summary_line
from axial.tasks.detection.input_pipeline import has_masks, record_masks, record_objects
from axial.tasks.metrics import ConfusionMetrics, PredictionWriter
from axial.tasks.segmentation.drawing import segment_colors

SHOWN = 0.5  # least score of a box that is drawn


def predicted_objects(prediction, spec, image_id, size):
    """The objects of a prediction as COCO's results have them, the best first.

    Args:
        prediction: dict of 'box' [K, 4] of (x, y, width, height) in pixels of the photo, 'class' [K], class indices of
            the spec, 'score' [K], 'count' [], and, if there are masks, 'mask' [K, side, side] of probabilities on the
            boxes.
        spec: `DatasetSpec`.
        image_id: the data set's number of the photo.
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
            one["segmentation"] = encode_mask(paste_mask(mask, one["bbox"], size))
    return objects


def paste_mask(mask, box, size):
    """Pixels of a photo inside a mask that is stretched over a box, uint8 [h, w].

    Args:
        mask: float [side, side] of probabilities. Between its numbers they are interpolated linearly.
        box: (x, y, width, height) in pixels.
        size: (height, width) of the photo.
    """
    x, y, width, height = box
    rows = _stretch(size[0], y, height, mask.shape[0])
    columns = _stretch(size[1], x, width, mask.shape[1])
    return (rows @ mask.astype(np.float64) @ columns.T >= 0.5).astype(np.uint8)


def _stretch(pixels, first, length, side):
    """float [pixels, side]: how much of each of `side` numbers a pixel's centre takes; nothing outside the interval."""
    centers = np.arange(pixels) + 0.5
    positions = np.clip((centers - first) / max(length, 1e-6) * side - 0.5, 0, side - 1)
    weights = np.maximum(1 - np.abs(positions[:, None] - np.arange(side)), 0)
    return weights * ((centers >= first) & (centers < first + length))[:, None]


def encode_mask(pixels):
    """COCO's run lengths of a mask, uint8 [h, w], for JSON."""
    return as_json(masks.encode(np.asfortranarray(pixels)))


def true_objects(example, spec, masked=False):
    """The true objects of an evaluation example as COCO's annotations, whose 'category_id' is the class index.

    If they are `masked`, those that have a mask have a 'segmentation'.
    """
    columns = (example[f"object/{name}"].numpy().tolist() for name in ("class", "crowd", "box", "area"))
    names = ("category_id", "iscrowd", "bbox", "area")
    objects = [dict(zip(names, row)) for row in zip(*columns)]
    if masked:
        for one, mask, has_mask in zip(objects, *(x.numpy() for x in record_masks(example, spec))):
            if has_mask:
                one["segmentation"] = encode_mask(mask)
    return objects


def in_masks(one, size):
    """A true object of a photo of (height, width) as AP of masks takes it.

    One without a mask is like a crowd on its box: it is not missed, and a prediction on it is not wrong. pycocotools
    takes no object without a mask.
    """
    if "segmentation" in one:
        return one
    return {**one, "iscrowd": 1, "segmentation": masks.frPyObjects(np.array([one["bbox"]], np.float64), *size)[0]}


class DetectionMetrics(ConfusionMetrics):
    """COCO's figures of boxes and of masks, over photos. Parts of a split add up to the same bits as the whole.

    Args:
        spec: `DatasetSpec`.
        shard: (i, n) if it scores every n-th photo of the split, from the i-th on.
    """

    parts = ("box", "mask")

    def __init__(self, spec, shard=(0, 1)):
        super().__init__(spec, shard)
        self.box, self.mask = CocoAP("bbox", spec.num_classes), CocoAP("segm", spec.num_classes)
        self.kinds += 1  # the class of the box on an object; `num_classes` if it was missed

    def update(self, example, prediction):
        """Adds one photo. Returns its objects; see `predicted_objects`."""
        size = tuple(int(side) for side in example["size"])
        objects = predicted_objects(prediction, self.spec, example["image/id"], size)
        return self.add(example, objects, masked="mask" in prediction)

    def add(self, example, objects, masked=False):
        """Adds the objects of one photo, which may be `masked`, and returns them."""
        size, index = tuple(int(side) for side in example["size"]), self.spec.class_of_category
        masked = masked and bool(has_masks(example))
        true = true_objects(example, self.spec, masked)
        predicted = [
            {**one, "category_id": index[one["category_id"]], "iscrowd": 0, "area": math.prod(one["bbox"][2:])}
            for one in objects
        ]
        # Predictions of equal score rank in the data set's order.
        image = int(example.get("number", self.next_number()))
        photo_ap = CocoAP("bbox", self.spec.num_classes)
        photo_ap.add(true, predicted, size=size, image=image)
        self.box.merge(photo_ap)
        self.pairs.update(confusions(true, predicted, self.spec.num_classes))
        if masked:
            predicted = [{**one, "area": float(masks.area(one["segmentation"]))} for one in predicted]
            self.mask.add([in_masks(one, size) for one in true], predicted, size=size, image=image)
        quality = photo_ap.figures()["ap"]
        self.add_photo(photo_name(example), None if math.isnan(quality) else quality)
        return objects

    def result(self):
        """dict of `CocoAP.figures` for 'box' and, if there are masks, 'mask'.

        'per_class' has for the name of a class that was seen its AP of boxes. 'confusions' are [truth, prediction or
        'missed', objects], the most frequent first.
        """
        names = [*self.spec.class_names, "missed"]
        figures = {"box": self.box.figures()} | ({"mask": self.mask.figures()} if self.mask.images else {})
        return {
            **figures,
            "per_class": {names[c]: value for c, value in self.box.per_class().items()},
            "confusions": self.mistakes(names),
        }


def confusions(true, predicted, missed):
    """Yields for each true object that is no crowd (its class, that of the box that overlaps it most, or `missed`).

    Boxes count from a score of `SHOWN` and an IoU of 0.5 on. The arguments are those of `CocoAP.add`.
    """
    true = [one for one in true if not one["iscrowd"]]
    predicted = [one for one in predicted if one["score"] >= SHOWN]
    if not (true and predicted):
        yield from ((one["category_id"], missed) for one in true)
        return
    boxes = (np.array([one["bbox"] for one in objects], np.float64) for objects in (predicted, true))
    overlap = masks.iou(*boxes, [0] * len(true))  # [predicted, true]
    for one, column in zip(true, overlap.T):
        best = int(column.argmax())
        yield one["category_id"], predicted[best]["category_id"] if column[best] >= 0.5 else missed


# === Results on disk ===


class DetectedPhoto(schemas.Strict):
    """A photo in the state of a detector's evaluation."""

    image_id: schemas.Count
    objects: list[schemas.Detection]


class DetectionPredictionWriter(PredictionWriter):
    """Writes COCO's detection results of a split, detection_SPLIT.json: a list of objects of all photos."""

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
        """What `add` was given for photo number `index`."""
        return self.annotations[index]["objects"]

    def close(self):
        """Writes the JSON."""
        photos = sorted(self.annotations, key=lambda photo: photo["image_id"])
        write_json(self.path, [one for photo in photos for one in photo["objects"]])


# === Pictures and short forms ===


def draw_objects(photo, objects, classes, spec):
    """A photo, uint8 [h, w, 3], with boxes, named, and painted with masks.

    Args:
        photo: uint8 [h, w, 3].
        objects: list of dicts of a 'bbox', (x, y, width, height) in pixels, and of predictions a 'score', which is
            written after the name, and maybe a 'segmentation'. The first is drawn last.
        classes: class index of each object.
        spec: `DatasetSpec`.
    """
    colors, pixels = segment_colors(classes, spec), photo.astype(np.float64)
    for one, color in zip(objects, colors):
        if "segmentation" in one:
            inside = masks.decode(one["segmentation"])[..., None] > 0
            pixels = np.where(inside, 0.5 * pixels + 0.5 * color, pixels)
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


def _drawn(photo, objects, spec):
    """A photo with the boxes, classes and scores of objects whose score is at least `SHOWN`."""
    shown = [one for one in objects if one["score"] >= SHOWN]
    return draw_objects(photo, shown, [spec.class_of_category[one["category_id"]] for one in shown], spec)


def _listed(number, name, one):
    """One of `predicted_objects` as a JSON has it. An object that is drawn and has a mask has a 'label'."""
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
    """See `Description`. Where masks overlap, a pixel is of the object with the better score."""
    labels = np.zeros(size, int)
    for one in reversed(listed):
        if "label" in one:
            labels[masks.decode(one["segmentation"]) > 0] = one["label"]
    return labels


class DetectionEvaluator(Evaluator):
    """The evaluation of detectors."""

    name, labels = "detection", WITH_OBJECTS
    metrics = DetectionMetrics
    quality = "AP"
    writer = DetectionPredictionWriter
    pictures = ("photo", "truth", "prediction")
    one_file = False
    confused = "objects"

    def truth(self, record, spec):
        objects = record_objects(record, spec)
        return super().truth(record, spec) | {f"object/{name}": x for name, x in objects.items()}

    def draw(self, example, objects, spec):
        """Photo, truth and prediction, each uint8 [h, w, 3], of an example and its `predicted_objects`."""
        photo = decode_photo(example).numpy()
        true = true_objects(example, spec)
        truth = draw_objects(photo, true, [one["category_id"] for one in true], spec)
        return photo, truth, _drawn(photo, objects, spec)

    def describe(self, image, prediction, spec):
        """The `Description` of a photo, uint8 [h, w, 3]."""
        objects = predicted_objects(prediction, spec, 0, image.shape[:2])
        names = [spec.class_names[spec.class_of_category[one["category_id"]]] for one in objects]
        likely = [f"{name} {one['score']:.0%}" for name, one in zip(names, objects) if one["score"] >= SHOWN]
        listed = [_listed(i, name, one) for i, (name, one) in enumerate(zip(names, objects), 1)]
        return Description(
            content={"objects": listed},
            summary=summary_line(len(likely), "object", likely),
            draw=functools.partial(_drawn, image, objects, spec),
            segments=listed,
            label_image=functools.partial(_label_image, listed, image.shape[:2]) if "mask" in prediction else None,
        )

    def columns(self, result):
        """Flat dict of all figures; those of masks begin with 'mask_'."""
        flat = {name: result["box"][name] for name in FIGURES}
        return flat | {f"mask_{name}": value for name, value in result.get("mask", {}).items()}

    def headline(self, result):
        """The main scores: AP of boxes, and of masks."""
        flat = self.columns(result)
        return {name: flat[name] for name in ("ap", "ap50", "ap75", "mask_ap") if name in flat}

    def classes(self, result):
        """See `Evaluator.classes`."""
        rows = [[name, percent(value)] for name, value in result["per_class"].items()]
        return ["class", "AP"], rows, [[name, percent(value)] for name, value in self.columns(result).items()]


DETECTION = DetectionEvaluator()
