"""Writes and reads COCO's panoptic result format: a PNG of segment ids for each photo, and one JSON."""

import os

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data.coco import check_annotations
from axial.data.files import names_below, other_kind
from axial.data.labels import colors_of, decode_rgb, numbered, open_label
from axial.data.specs import check_categories
from axial.data.submission import photo_names
from axial.data.tfrecord import photo_name
from axial.errors import InputError, nearest
from axial.io import schemas
from axial.io.paths import inside
from axial.io.read import convert, open_image, read_file, read_json
from axial.io.write import make_folder, output_file, output_folder, write_image, write_json


class CocoResults:
    """Writes results. The JSON is written last.

    Args:
        folder: where 'panoptic_SPLIT.json' and 'panoptic_SPLIT/' go.
        spec: `DatasetSpec`.
        split: name of the split.
    """

    def __init__(self, folder, spec, split):
        self.folder, self.spec, self.split = folder, spec, split
        self.annotations = []
        self.path = self.path_of(folder, split)
        self.pictures = output_folder(folder, f"panoptic_{split}", "--split")
        make_folder(self.pictures)

    @staticmethod
    def path_of(folder, split):
        """Path of the JSON of a split's results."""
        return output_file(folder, f"panoptic_{split}.json", "--split")

    def restore(self, path, annotations):
        """Goes on from the annotations in the state `path`. Raises InputError."""
        convert(f"{path}: annotations", annotations, list[schemas.Annotation])
        self.annotations = annotations

    def add(self, example, table):
        """Writes the PNG of one photo. Raises InputError if the photo's name leaves the folder."""
        segments, classes, _ = table
        name = os.path.splitext(photo_name(example))[0] + ".png"
        path = output_file(self.pictures, name, "a record's image/file_name")
        write_image(path, Image.fromarray(colors_of(segments)), format="PNG")
        area = np.bincount(segments.ravel(), minlength=len(classes) + 1)
        self.annotations.append(
            {
                "image_id": int(example["image/id"]),
                "file_name": name,
                "segments_info": [
                    {
                        "id": i + 1,
                        "category_id": int(self.spec.category_ids[c]),
                        "area": int(area[i + 1]),
                        "iscrowd": 0,
                    }
                    for i, c in enumerate(classes)
                ],
            }
        )

    def seen(self, index):
        """The `segment_table` of photo number `index`, read back. Scores are 1: the format does not keep them."""
        annotation = self.annotations[index]
        path = inside(self.pictures, annotation["file_name"], "a state's annotations: file_name")
        classes = np.array([self.spec.class_of_category[s["category_id"]] for s in annotation["segments_info"]], int)
        return decode_rgb(open_image(path, read_file(path))), classes, np.ones(len(classes))

    def close(self):
        """Writes the JSON."""
        categories = zip(self.spec.category_ids, self.spec.class_names, self.spec.things)
        write_json(
            self.path,
            {
                "annotations": sorted(self.annotations, key=lambda annotation: annotation["image_id"]),
                "categories": [{"id": i, "name": name, "isthing": int(thing)} for i, name, thing in categories],
            },
        )


class ResultPredictions:
    """Reads results that another program wrote, as predictions of a split's photos.

    The JSON is in COCO's panoptic format, or in that of cityscapesscripts, whose image ids are names such as
    'frankfurt_000000_000294'. A segment may have a 'score'; the default is 1.

    Args:
        path: the JSON.
        folder: folder of its PNGs.
        data_dir, split: the converted photos that the results are of.
        spec: `DatasetSpec`.

    Raises:
        InputError: another kind of JSON; a category that the spec does not have or calls otherwise; an image of the
            split that the JSON or the folder lacks.
    """

    def __init__(self, path, folder, data_dir, split, *, spec):
        self.path, self.folder, self.spec = path, folder, spec
        content = read_json(path, schemas.Results)[1]
        annotations = content.annotations
        check_categories(path, content.categories or (), spec)
        check_annotations(path, annotations, spec, spec.class_of_category)
        self._of_image = {a.image_id: a for a in annotations}
        if not folder:
            raise InputError("--results_dir is needed: the folder of the PNGs")
        if not tf.io.gfile.isdir(folder):
            raise InputError(f"{folder}: no such folder; --results_dir takes the folder of the PNGs")
        wanted = photo_names(data_dir, split)
        missing = [number for number, name in wanted.items() if self._annotation(number, name) is None]
        if missing:
            hint = other_kind(missing[0], self._of_image)
            raise InputError(f"{path}: missing of the split's {len(wanted)} images: {_several(missing)}{hint}")
        names = {a.file_name for a in annotations}
        for name in names:
            inside(folder, name, f"{path}: annotations: file_name")
        have = names_below(folder, names)
        missing = sorted(names - have)
        if missing:
            raise InputError(f"{folder}: missing: {_several(missing)}{nearest(missing[0], have)}")

    def _annotation(self, number, name):
        """The annotation of an image, by its number or by the name of its photo; None if there is none."""
        stem = os.path.splitext(name)[0]
        for key in (number, stem, stem.removesuffix("_leftImg8bit")):
            if key in self._of_image:
                return self._of_image[key]
        return None

    def __call__(self, examples):
        """Yields (example, dict of 'table' and 'semantic'), as `PanopticScores` takes them."""
        classes = self.spec.class_of_category
        for example in examples:
            annotation = self._annotation(int(example["image/id"]), photo_name(example))
            path = inside(self.folder, annotation.file_name, f"{self.path}: annotations: file_name")
            image = open_label(path, read_file(path))
            height, width = example["size"].numpy()
            if image.size != (width, height):
                raise InputError(f"{path}: {image.size[0]}x{image.size[1]} pixels, the photo has {width}x{height}")
            image = image.convert("RGB")
            infos = annotation.segments_info
            listed = [info.id for info in infos]
            ids = decode_rgb(image)
            painted = np.unique(ids)
            odd = sorted(set(listed) ^ (set(painted.tolist()) - {0}))
            if odd:
                where = "PNG" if odd[0] in painted else "JSON"
                raise InputError(
                    f"{path}: its segments are not those of {self.path}: id {odd[0]} is only in the {where}"
                )
            segments = numbered(ids, listed)
            kinds = np.array([classes[info.category_id] for info in infos], int)
            scores = np.array([info.score for info in infos])
            semantic = np.concatenate([[self.spec.ignore], kinds])[segments]
            yield example, {"table": (segments, kinds, scores), "semantic": semantic}


def _several(names):
    """'a, b, c and 5 more', of a list of names."""
    text = ", ".join(str(name) for name in names[:3])
    return text + (f" and {len(names) - 3} more" if len(names) > 3 else "")
