"""Writes and reads COCO's panoptic result format: a PNG of segment ids for each photo, and one JSON.

The format has neither the score of a segment, which AP ranks by, nor the classes of the pixels before the grouping,
which mIoU is of. Here a segment has a 'score' too, and an annotation 'semantic', the name of a PNG of category ids,
beside the JSON. The official evaluator reads neither.
"""

import os

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data.converters.coco import check_annotations
from axial.data.files import missing_files
from axial.data.labels import colors_of, decode_rgb, numbered, open_label, read_ids
from axial.data.specs import check_categories
from axial.data.streams import photo_names
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.images import open_image
from axial.io.paths import inside, output_names
from axial.io.read import convert, read_file, read_json
from axial.io.show import say
from axial.io.write import make_folder, output_file, output_folder, write_image, write_json
from axial.tasks.scores import Results


class CocoResults(Results):
    """Writes results. The JSON is written last.

    Args:
        folder: where 'panoptic_SPLIT.json', 'panoptic_SPLIT/' and 'semantic_SPLIT/' go.
        spec: `DatasetSpec`.
        split: name of the split.
        data_dir: of the converted split. A PNG has the stem of its photo, or another name where two photos of the split
            share the stem. Without it, a PNG has the stem.
    """

    def __init__(self, folder, spec, split, data_dir=None):
        self.folder, self.spec, self.split, self.data_dir = folder, spec, split, data_dir
        self._names = None  # of all photos, once one is added
        self.annotations = []
        self.path = self.path_of(folder, split)
        self.pictures = output_folder(folder, f"panoptic_{split}", "--split")
        make_folder(self.pictures)
        self.semantic = f"semantic_{split}"

    @classmethod
    def path_of(cls, folder, split):
        """Path of the JSON of a split's results."""
        return output_file(folder, f"panoptic_{split}.json", "--split")

    def restore(self, path, annotations):
        """Goes on from the annotations in the state `path`. Raises InputError."""
        convert(f"{path}: annotations", annotations, list[schemas.WrittenAnnotation])
        self.annotations = annotations

    def _name(self, example):
        """The name of a photo's PNGs."""
        if self._names is None:
            names = photo_names(self.data_dir, self.split) if self.data_dir else {}
            self._names = dict(zip(names, output_names(list(map(_stem, names.values())), list(names.values()))))
        return self._names.get(int(example["image/id"]), _stem(photo_name(example))) + ".png"

    def add(self, example, seen):
        """Writes the PNGs of one photo. Raises InputError if the photo's name leaves the folder.

        Args:
            example: `evaluation_example`.
            seen: `segment_table` and int [h, w] of class indices.
        """
        segments, classes, scores, semantic = seen
        name, what = self._name(example), "a record's image/file_name"
        path = output_file(self.pictures, name, what)
        write_image(path, Image.fromarray(colors_of(segments)))
        categories = category_map(semantic, self.spec)
        if categories is not None:
            path = output_file(self.folder, f"{self.semantic}/{name}", what)
            write_image(path, Image.fromarray(categories))
        area = np.bincount(segments.ravel(), minlength=len(classes) + 1)
        self.annotations.append(
            {
                "image_id": int(example["image/id"]),
                "file_name": name,
                "semantic": f"{self.semantic}/{name}" if categories is not None else None,
                "segments_info": [
                    {
                        "id": i + 1,
                        "category_id": int(self.spec.category_ids[c]),
                        "area": int(area[i + 1]),
                        "iscrowd": 0,
                        "score": float(scores[i]),
                    }
                    for i, c in enumerate(classes)
                ],
            }
        )

    def seen(self, index):
        """The `segment_table` of photo number `index`, read back."""
        annotation = self.annotations[index]
        path = inside(self.pictures, annotation["file_name"], "a state's annotations: file_name")
        classes = np.array([self.spec.class_of_category[s["category_id"]] for s in annotation["segments_info"]], int)
        scores = np.array([s.get("score", 1.0) for s in annotation["segments_info"]])  # older states have none
        return decode_rgb(open_image(path, read_file(path))), classes, scores

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
    'frankfurt_000000_000294'. A segment may have a 'score'; the default is 1. What lacks for the scores of the run that
    wrote the results is said on the standard output.

    Args:
        path: the JSON.
        folder: folder of its PNGs.
        data_dir, split: the converted photos that the results are of.
        spec: `DatasetSpec`.

    Raises:
        InputError: another kind of JSON; a category that the spec does not have or calls otherwise; an image of the
            split that the JSON or the folder lacks.
    """

    reads_list = False

    def __init__(self, path, folder, data_dir, split, *, spec):
        self.path, self.folder, self.spec = path, folder, spec
        self._beside = os.path.dirname(path) or "."
        content = read_json(path, schemas.Results)[1]
        annotations = content.annotations
        check_categories(path, content.categories or (), spec)
        check_annotations(path, annotations, spec, spec.class_of_category)
        self._of_image = {a.image_id: a for a in annotations}
        if not (folder and tf.io.gfile.isdir(folder)):
            raise InputError(f"--results_dir={folder or ''}: expected the folder of the PNGs that {path} names")
        wanted = photo_names(data_dir, split)
        missing = [f"{number} ({name})" for number, name in wanted.items() if self._annotation(number, name) is None]
        if missing:
            raise InputError(
                f"{path}: no prediction of {len(missing)} of the split's {len(wanted)} images, first image {missing[0]}"
            )
        missing = missing_files(folder, {a.file_name for a in annotations}, f"{path}: annotations: file_name")
        if missing:
            raise InputError(f"{folder}: lacks {len(missing)} of the PNGs that {path} names, first {missing[0]}")
        self._tell_of_scores(annotations)

    def _tell_of_scores(self, annotations):
        """Says what is not in the files, and how that changes the scores."""
        maps = {a.semantic for a in annotations if a.semantic}
        self._maps = maps.difference(missing_files(self._beside, maps, f"{self.path}: annotations: semantic"))
        without = sum(a.semantic not in self._maps for a in annotations)
        if without:
            say(
                f"{self.path}: {without} of {len(annotations)} images have no map of classes; their mIoU is of the "
                "segments, and a pixel without a segment misses its class"
            )
        classes = self.spec.class_of_category
        segments = [segment for a in annotations for segment in a.segments_info]
        if {s.score for s in segments if self.spec.things[classes[s.category_id]]} == {1.0}:
            say(f"{self.path}: no segment has a score; AP takes all of an image as equally sure")

    def _annotation(self, number, name):
        """The annotation of an image, by its number or by the name of its photo; None if there is none."""
        stem = _stem(name)
        keys = (number, stem, stem.removesuffix("_leftImg8bit"))
        return next((self._of_image[key] for key in keys if key in self._of_image), None)

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
            infos, ids = annotation.segments_info, decode_rgb(image.convert("RGB"))
            listed = [info.id for info in infos]
            odd = sorted(set(listed) ^ (set(np.unique(ids).tolist()) - {0}))
            if odd:
                where = "JSON" if odd[0] in listed else "PNG"
                raise InputError(
                    f"{path}: its segments are not those of {self.path}: id {odd[0]} is only in the {where}"
                )
            segments = numbered(ids, listed)
            kinds = np.array([classes[info.category_id] for info in infos], int)
            scores = np.array([info.score for info in infos])
            if annotation.semantic in self._maps:
                semantic = self._semantic(annotation.semantic, segments.shape)
            else:
                semantic = np.concatenate([[self.spec.ignore], kinds])[segments]
            yield example, {"table": (segments, kinds, scores), "semantic": semantic}

    def _semantic(self, name, size):
        """int [h, w] of class indices from a PNG of category ids beside the JSON."""
        path = inside(self._beside, name, f"{self.path}: annotations: semantic")
        ids = read_ids(path)
        if ids.shape != size:
            raise InputError(f"{path}: {ids.shape[1]}x{ids.shape[0]} pixels, the photo has {size[1]}x{size[0]}")
        present, places = np.unique(ids, return_inverse=True)
        known = {**self.spec.class_of_category, _no_category(self.spec): self.spec.ignore}
        classes = [known.get(category) for category in present.tolist()]
        if None in classes:
            odd = present[classes.index(None)]
            raise InputError(f"{path}: category {odd}, which the spec {self.spec.name!r} does not have")
        return np.array(classes)[places].reshape(size)


def category_map(semantic, spec):
    """uint8 or uint16 [h, w] of category ids from int [h, w] of class indices; see `_no_category`.

    None if a category id is not of 16 bits, as a PNG with one channel holds no more.
    """
    categories = np.array([*spec.category_ids, _no_category(spec)])
    if categories.min() < 0 or categories.max() >= 2**16:
        return None
    return categories.astype(np.min_scalar_type(categories.max()))[np.minimum(semantic, spec.num_classes)]


def _no_category(spec):
    """What a map of categories has for a pixel without a class: the least number that no category has."""
    return min(set(range(spec.num_classes + 1)) - set(spec.category_ids))


def _stem(name):
    return os.path.splitext(name)[0]
