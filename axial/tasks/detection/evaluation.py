"""Scores detections at each photo's own size: COCO's average precision and recall of boxes, and of masks."""

import functools
import math

import msgspec
import numpy as np
from pycocotools import mask as masks

from axial.data.converters.instances import as_json, check_runs
from axial.data.streams import decode_photo, photo_names
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.read import convert, read_json
from axial.io.show import counted, percent
from axial.io.write import write_json
from axial.metrics.coco_ap import FIGURES, CocoAP
from axial.tasks.base import Description, Evaluation
from axial.tasks.detection.drawing import draw_boxes
from axial.tasks.detection.feed import evaluation_photos, has_masks, record_masks
from axial.tasks.scores import JsonResults, PairScores

SHOWN = 0.5  # least score of a box that is drawn
MOST_NAMED = 6  # objects in one line


def found_objects(prediction, spec, image_id, size):
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
    places = np.clip((centers - first) / max(length, 1e-6) * side - 0.5, 0, side - 1)
    weights = np.maximum(1 - np.abs(places[:, None] - np.arange(side)), 0)
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
        for one, mask, known in zip(objects, *(x.numpy() for x in record_masks(example, spec))):
            if known:
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


class DetectionScores(PairScores):
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
        """Adds one photo. Returns its objects; see `found_objects`.

        Args:
            example: `evaluation_example`.
            prediction: dict for `found_objects`, or of 'objects', what that returns, and 'masked', whether they have
                masks.
        """
        size = tuple(int(side) for side in example["size"])
        objects = prediction.get("objects")
        if objects is None:
            objects = found_objects(prediction, self.spec, example["image/id"], size)
        masked = ("mask" in prediction or prediction.get("masked", False)) and bool(has_masks(example))
        true = true_objects(example, self.spec, masked)
        index = self.spec.class_of_category
        found = [
            {**one, "category_id": index[one["category_id"]], "iscrowd": 0, "area": math.prod(one["bbox"][2:])}
            for one in objects
        ]
        number = self.next_number()
        image = int(example.get("number", number))  # predictions of equal score rank in the data set's order
        own = CocoAP("bbox", self.spec.num_classes)
        own.add(true, found, size=size, image=image)
        self.box.merge(own)
        self.pairs.update(confusions(true, found, self.spec.num_classes))
        if masked:
            found = [{**one, "area": float(masks.area(one["segmentation"]))} for one in found]
            self.mask.add([in_masks(one, size) for one in true], found, size=size, image=image)
        quality = own.figures()["ap"]
        name = photo_name(example)
        self.photos.append([number, name, None if math.isnan(quality) else quality])
        return objects

    def result(self):
        """dict of `CocoAP.figures` for 'box' and, if there are masks, 'mask'.

        'per_class' has for the name of a class that was seen its AP of boxes. 'confusions' are [truth, prediction or
        'missed', objects], the most frequent first.
        """
        names = [*self.spec.class_names, "missed"]
        figures = {"box": self.box.figures()} | ({"mask": self.mask.figures()} if self.mask.images else {})
        wrong = sorted((-n, *pair) for pair, n in self.pairs.items() if pair[0] != pair[1])
        return {
            **figures,
            "per_class": {names[c]: value for c, value in self.box.per_class().items()},
            "confusions": [[names[truth], names[guess], -n] for n, truth, guess in wrong],
        }


def confusions(true, found, missed):
    """Yields for each true object that is no crowd (its class, that of the box that overlaps it most, or `missed`).

    Boxes count from a score of `SHOWN` and an IoU of 0.5 on. The arguments are those of `CocoAP.add`.
    """
    true = [one for one in true if not one["iscrowd"]]
    found = [one for one in found if one["score"] >= SHOWN]
    if not (true and found):
        yield from ((one["category_id"], missed) for one in true)
        return
    boxes = (np.array([one["bbox"] for one in part], np.float64) for part in (found, true))
    overlap = masks.iou(*boxes, [0] * len(true))  # [found, true]
    for one, column in zip(true, overlap.T):
        best = int(column.argmax())
        yield one["category_id"], found[best]["category_id"] if column[best] >= 0.5 else missed


# === Results on disk ===


class DetectedPhoto(schemas.Strict):
    """A photo in the state of a detector's evaluation."""

    image_id: schemas.Count
    objects: list[schemas.Detection]


class DetectionResults(JsonResults):
    """Writes COCO's detection results of a split, detection_SPLIT.json: a list of objects of all photos."""

    kind = "detection"

    def check(self, where, annotations):
        """Raises InputError unless the annotations of a state are such results."""
        for photo in convert(where, annotations, list[DetectedPhoto]):
            check_objects(where, photo.objects, self.spec)

    def add(self, example, objects):
        """Adds one photo."""
        self.annotations.append({"image_id": int(example["image/id"]), "objects": objects})

    def seen(self, index):
        """What `add` was given for photo number `index`."""
        return self.annotations[index]["objects"]

    def close(self):
        """Writes the JSON."""
        photos = sorted(self.annotations, key=lambda photo: photo["image_id"])
        write_json(self.path, [one for photo in photos for one in photo["objects"]])


def check_objects(path, objects, spec):
    """Raises InputError unless detections have categories of things of a spec, and sides of at least 0."""
    things = {spec.category_ids[index] for index in spec.thing_classes}
    for number, one in enumerate(objects):
        where = f"{path}: entry {number}"
        if one.category_id not in things:
            raise InputError(f"{where}: category_id {one.category_id}: not a thing of the spec {spec.name!r}")
        if one.bbox[2] < 0 or one.bbox[3] < 0:
            raise InputError(f"{where}: bbox: expected (x, y, width, height) with sides of at least 0")


class ResultDetections:
    """Reads COCO's detection results that another program wrote, as predictions of a split's photos.

    Photos without an entry have no objects.

    Args:
        path: the JSON, a list of objects. If all have a segmentation, masks are scored too.
        folder: not needed; None.
        data_dir, split: the converted photos that the results are of.
        spec: `DatasetSpec`.

    Raises:
        InputError: another kind of JSON; a category that is no thing of the spec; a negative side; an image that the
            split does not have.
    """

    reads_list = True

    def __init__(self, path, folder, data_dir, split, *, spec):
        del folder
        entries = read_json(path, list[schemas.Detection])[1]
        check_objects(path, entries, spec)
        self._of_image = {number: [] for number in photo_names(data_dir, split)}
        self._masked = bool(entries) and all(one.segmentation for one in entries)
        for one in entries:
            if one.image_id not in self._of_image:
                raise InputError(
                    f"{path}: image {one.image_id} is not in the split {split!r}; are they of another one?"
                )
            fields = {name: getattr(one, name) for name in ("image_id", "category_id", "score")}
            fields["bbox"] = list(one.bbox)
            if self._masked:
                fields["segmentation"] = msgspec.structs.asdict(one.segmentation)
            self._of_image[one.image_id].append(fields)
        self._path = path

    def __call__(self, examples):
        """Yields (example, dict of 'objects' and 'masked'), as `DetectionScores` takes them.

        Raises:
            InputError: a mask of another size than its photo, or of another number of pixels.
        """
        for example in examples:
            number, size = int(example["image/id"]), [int(side) for side in example["size"]]
            for one in self._of_image[number] if self._masked else ():
                runs = schemas.RunLengths(**one["segmentation"])
                check_runs(f"{self._path}: image {number}: segmentation", runs, size)
            yield example, {"objects": self._of_image[number], "masked": self._masked}


# === Pictures and short forms ===


def _drawn(photo, objects, spec):
    """A photo with the boxes, classes and scores of objects whose score is at least `SHOWN`."""
    shown = [one for one in objects if one["score"] >= SHOWN]
    classes = [spec.class_of_category[one["category_id"]] for one in shown]
    scores = [one["score"] for one in shown]
    pixels = [masks.decode(one["segmentation"]) for one in shown if "segmentation" in one]
    return draw_boxes(photo, [one["bbox"] for one in shown], classes, spec, scores=scores, masks=pixels)


def _listed(number, name, one):
    """One of `found_objects` as a JSON has it. An object that is drawn and has a mask has a 'label'."""
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


class DetectionEvaluation(Evaluation):
    """The evaluation of detectors."""

    name = "detection"
    scores = DetectionScores
    quality = "AP"
    results = DetectionResults
    reader = ResultDetections
    examples = staticmethod(evaluation_photos)
    pictures = ("photo", "truth", "prediction")
    one_file = False
    confused = "objects"

    def draw(self, example, objects, spec):
        """Photo, truth and prediction, each uint8 [h, w, 3], of an example and its `found_objects`."""
        photo = decode_photo(example).numpy()
        true = true_objects(example, spec)
        truth = draw_boxes(photo, [one["bbox"] for one in true], [one["category_id"] for one in true], spec)
        return photo, truth, _drawn(photo, objects, spec)

    def describe(self, image, prediction, spec):
        """The `Description` of a photo, uint8 [h, w, 3]."""
        objects = found_objects(prediction, spec, 0, image.shape[:2])
        names = [spec.class_names[spec.class_of_category[one["category_id"]]] for one in objects]
        likely = [f"{name} {one['score']:.0%}" for name, one in zip(names, objects) if one["score"] >= SHOWN]
        named = [*likely[:MOST_NAMED], *([f"{len(likely) - MOST_NAMED} more"] if len(likely) > MOST_NAMED else [])]
        listed = [_listed(i, name, one) for i, (name, one) in enumerate(zip(names, objects), 1)]
        return Description(
            content={"objects": listed},
            summary=f"{counted(len(likely), 'object')}{': ' * bool(likely)}{', '.join(named)}",
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
        """See `Evaluation.classes`."""
        rows = [[name, percent(value)] for name, value in result["per_class"].items()]
        return ["class", "AP"], rows, [[name, percent(value)] for name, value in self.columns(result).items()]


DETECTION = DetectionEvaluation()
