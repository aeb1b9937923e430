"""Segmentations on disk: in COCO's panoptic format, and for the benchmark servers of COCO and Cityscapes.

COCO's format has a PNG of segment ids for each photo, and one JSON. This format lacks the scores of segments, which AP
needs, and the classes of pixels before the grouping, which mIoU needs. So axial adds a 'score' to each segment, and
'semantic' to each annotation: the name of a PNG of category ids beside the JSON. COCO's evaluator ignores both keys.
"""

import os
import zipfile

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data.converters.coco import check_annotations
from axial.data.files import missing_files
from axial.data.labels import colors_of, decode_rgb, numbered, open_label, read_ids
from axial.data.specs import CITYSCAPES, check_categories
from axial.data.streams import photo_names
from axial.data.tfrecord import photo_name
from axial.errors import InputError
from axial.io import schemas
from axial.io.images import open_image
from axial.io.paths import inside, output_names
from axial.io.read import check_unique, read_file, read_json
from axial.io.show import say
from axial.io.write import make_folder, output_file, output_folder, write_image, write_json, write_text, write_whole
from axial.metrics.panoptic_quality import Segments
from axial.tasks.metrics import PredictionWriter

_RECORD = "a record's image/file_name"


class CocoPredictionWriter(PredictionWriter):
    """Writes predictions in COCO's panoptic format. The JSON is written last.

    Args:
        folder: output folder, for 'panoptic_SPLIT.json', 'panoptic_SPLIT/' and 'semantic_SPLIT/'.
        spec: `DatasetSpec`.
        split: name of the split.
        data_dir: folder of the converted split. A PNG has the stem of its photo, or another name if two photos of the
            split have the same stem. Without a `data_dir`, each PNG has the stem of its photo.
    """

    kind, schema = "panoptic", schemas.Annotation

    def __init__(self, folder, spec, split, data_dir=None):
        super().__init__(folder, spec, split, data_dir)
        self._names = None  # names of all photos' PNGs; set when the first photo is added
        self.pictures, self.semantic = f"panoptic_{split}", f"semantic_{split}"
        make_folder(output_folder(folder, self.pictures, "--split"))

    def _name(self, example):
        """File name of a photo's PNGs."""
        if self._names is None:
            names = photo_names(self.data_dir, self.split) if self.data_dir else {}
            self._names = dict(zip(names, output_names(list(map(_stem, names.values())), list(names.values()))))
        return self._names.get(int(example["image/id"]), _stem(photo_name(example))) + ".png"

    def add(self, example, decoded):
        """Writes the PNGs of one photo. Raises InputError if the photo's name leads out of the folder.

        Args:
            example: an evaluation example.
            decoded: (predicted `Segments`, class indices int [h, w]).
        """
        (segments, classes, scores, _), semantic = decoded
        name, categories = self._name(example), category_map(semantic, self.spec)
        pictures = {self.pictures: colors_of(segments), self.semantic: categories}
        for folder, pixels in pictures.items():
            if pixels is not None:
                path = output_file(output_folder(self.folder, folder, "--split"), name, _RECORD)
                write_image(path, Image.fromarray(pixels))
        area = np.bincount(segments.ravel(), minlength=len(classes) + 1)
        rows = [
            {"id": i, "category_id": int(self.spec.category_ids[c]), "area": int(area[i]), "iscrowd": 0, "score": score}
            for i, (c, score) in enumerate(zip(classes, map(float, scores)), 1)
        ]
        semantic = None if categories is None else f"{self.semantic}/{name}"
        annotation = {"image_id": int(example["image/id"]), "file_name": name, "semantic": semantic}
        self.annotations.append({**annotation, "segments_info": rows})

    def decoded(self, index):
        """A tuple of the `Segments` of photo number `index`, read from its PNG, and None for its class indices."""
        annotation = self.annotations[index]
        folder = output_folder(self.folder, self.pictures, "--split")
        path = inside(folder, annotation["file_name"], "a state's annotations: file_name")
        classes = np.array([self.spec.class_of_category[s["category_id"]] for s in annotation["segments_info"]], int)
        scores = np.array([s.get("score", 1.0) for s in annotation["segments_info"]])  # older states have none
        return Segments(decode_rgb(open_image(path, read_file(path))), classes, scores), None

    def close(self):
        """Writes the JSON."""
        categories = zip(self.spec.category_ids, self.spec.class_names, self.spec.things)
        categories = [{"id": i, "name": name, "isthing": int(thing)} for i, name, thing in categories]
        annotations = sorted(self.annotations, key=lambda annotation: annotation["image_id"])
        write_json(self.path, {"annotations": annotations, "categories": categories})


class StoredPredictions:
    """Reads predictions from files, which another program may have written.

    The JSON is in COCO's panoptic format, or in cityscapesscripts' format, where image ids are names such as
    'frankfurt_000000_000294'. A segment may have a 'score'; the default is 1. If scores or maps of classes are missing,
    a line on the standard output says so.

    Args:
        path: path of the JSON.
        folder: folder of the PNGs that the JSON names.
        data_dir, split: the converted split whose photos were predicted.
        spec: `DatasetSpec`.

    Raises:
        InputError: the JSON has another format; a category is not in the spec, or has another name there; an image of
            the split is missing in the JSON or in the folder.
    """

    def __init__(self, path, folder, data_dir, split, *, spec):
        self.path, self.folder, self.spec = path, folder, spec
        self._beside = os.path.dirname(path) or "."
        content = read_json(path, schemas.Results)[1]
        annotations = content.annotations
        check_categories(path, content.categories or (), spec)
        check_annotations(path, annotations, spec, spec.class_of_category)
        self._by_image = {a.image_id: a for a in annotations}
        if not (folder and tf.io.gfile.isdir(folder)):
            raise InputError(f"--results_dir={folder or ''}: expected the folder of the PNGs that {path} names")
        names, files = photo_names(data_dir, split), {a.file_name for a in annotations}
        predicted = {number: name for number, name in names.items() if self._annotation(number, name)}
        check_complete(path, _descriptions(names), _descriptions(predicted))
        check_complete(folder, files, files - set(missing_files(folder, files, f"{path}: annotations: file_name")))
        maps = {a.semantic for a in annotations if a.semantic}
        self._maps = maps.difference(missing_files(self._beside, maps, f"{path}: annotations: semantic"))
        if without := sum(a.semantic not in self._maps for a in annotations):
            have = f"{without} of {len(annotations)} images have no map of classes"
            say(f"{path}: {have}; their mIoU is of the segments, so pixels without a segment count as wrong")
        segments = [segment for a in annotations for segment in a.segments_info]
        if {s.score for s in segments if spec.things[spec.class_of_category[s.category_id]]} == {1.0}:
            say(f"{path}: no segment has a score; AP ranks all segments of an image as equal")

    def _annotation(self, number, name):
        """The annotation of an image, by its id or by the name of its photo; None if it is missing."""
        stem = _stem(name)
        keys = (number, stem, stem.removesuffix("_leftImg8bit"))
        return next((self._by_image[key] for key in keys if key in self._by_image), None)

    def __call__(self, examples):
        """Yields (example, prediction for `PanopticMetrics.update`, a dict of 'table' and 'semantic')."""
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
            if odd := sorted(set(listed) ^ (set(np.unique(ids).tolist()) - {0})):
                where = "JSON" if odd[0] in listed else "PNG"
                raise InputError(f"{path}: its segments differ from {self.path}: id {odd[0]} is only in the {where}")
            kinds = np.array([classes[info.category_id] for info in infos], int)
            segments = Segments(numbered(ids, listed), kinds, np.array([info.score for info in infos]))
            if annotation.semantic in self._maps:
                semantic = self._semantic(annotation.semantic, segments.ids.shape)
            else:
                semantic = np.concatenate([[self.spec.ignore], kinds])[segments.ids]
            yield example, {"table": segments, "semantic": semantic}

    def _semantic(self, name, size):
        """Class indices, int [h, w], from a PNG of category ids beside the JSON."""
        path = inside(self._beside, name, f"{self.path}: annotations: semantic")
        ids = read_ids(path)
        if ids.shape != size:
            raise InputError(f"{path}: {ids.shape[1]}x{ids.shape[0]} pixels, the photo has {size[1]}x{size[0]}")
        present, inverse = np.unique(ids, return_inverse=True)
        class_of_category = {**self.spec.class_of_category, _no_category(self.spec): self.spec.ignore}
        classes = [class_of_category.get(category) for category in present.tolist()]
        if None in classes:
            odd = present[classes.index(None)]
            raise InputError(f"{path}: category {odd}, which the spec {self.spec.name!r} does not have")
        return np.array(classes)[inverse].reshape(size)


def category_map(semantic, spec):
    """Maps class indices, int [h, w], to category ids, uint8 or uint16 [h, w]; see `_no_category`.

    Returns None if a category id exceeds 16 bits, as a PNG with one channel cannot hold it.
    """
    categories = np.array([*spec.category_ids, _no_category(spec)])
    if categories.min() < 0 or categories.max() >= 2**16:
        return None
    return categories.astype(np.min_scalar_type(categories.max()))[np.minimum(semantic, spec.num_classes)]


def _no_category(spec):
    """The category id of pixels without a class: the smallest number that is not a category id."""
    return min(set(range(spec.num_classes + 1)) - set(spec.category_ids))


def _stem(name):
    return os.path.splitext(name)[0]


# === Submissions ===


class CityscapesPredictionWriter:
    """Writes files for Cityscapes' server: three folders, one for each of its benchmarks.

        panoptic/cityscapes_panoptic_SPLIT.json, panoptic/cityscapes_panoptic_SPLIT/NAME_panoptic.png
        instance/NAME.txt      a line 'masks/NAME_3.png LABEL_ID CONFIDENCE' for each thing
        instance/masks/*.png   255 inside the thing, 0 outside
        semantic/NAME_labelIds.png

    NAME is CITY_SEQUENCE_FRAME. Classes are written as Cityscapes' ids, not as train ids.

    Args:
        folder: output folder.
        spec: `DatasetSpec` whose category_ids are Cityscapes' ids.
        split: name of the split, for the names of the panoptic files.

    Raises:
        InputError: `folder` already has results of the split, or the spec has classes of another data set.
    """

    def __init__(self, folder, spec, split):
        if not set(spec.category_ids) <= set(CITYSCAPES.category_ids):
            remedy = "for COCO's server, use --results_dir and then axial-convert zip"
            classes = f"Cityscapes' server takes cityscapes' classes, these are {spec.name}'s"
            raise InputError(f"{folder}: {classes}; {remedy}")
        self.folder, self.spec = folder, spec
        self.title = f"cityscapes_panoptic_{split}"
        self.json = output_file(folder, f"panoptic/{self.title}.json", "--split")
        if tf.io.gfile.exists(self.json):
            raise InputError(f"{self.json}: exists; results are never overwritten, choose another folder")
        self.annotations = {}  # by file name
        for subfolder in (f"panoptic/{self.title}", "instance/masks", "semantic"):
            make_folder(output_folder(folder, subfolder, "--split"))

    def add(self, file_name, table, semantic):
        """Writes the files of one photo.

        Args:
            file_name: name of the photo, CITY_SEQUENCE_FRAME_leftImg8bit.png.
            table: predicted `Segments`.
            semantic: class indices, int [h, w]. spec.ignore is written as 0, which means unlabeled.

        Raises:
            InputError: the server does not accept files of that name, or another photo has the same name.
        """
        name = os.path.splitext(file_name)[0].removesuffix("_leftImg8bit")
        if "/" in name:
            raise InputError(f"{_RECORD} {file_name!r}: Cityscapes' server takes names without folders")
        if any(name == annotation["image_id"] for annotation in self.annotations.values()):
            raise InputError(f"{_RECORD} {file_name!r}: another photo has the same files, {name}; rename one of them")
        ids, segments = np.array(self.spec.category_ids), table.ids
        label = np.where(semantic == self.spec.ignore, 0, ids[np.minimum(semantic, len(ids) - 1)])
        pictures = {f"panoptic/{self.title}/{name}_panoptic.png": colors_of(segments)}
        pictures[f"semantic/{name}_labelIds.png"] = label.astype(np.uint8)
        rows, lines = [], []
        for i, (index, score) in enumerate(zip(table.classes, table.scores)):
            category = self.spec.category_ids[index]
            rows.append({"id": i + 1, "category_id": int(category)})
            if self.spec.things[index]:
                mask = f"masks/{name}_{i}.png"
                pictures[f"instance/{mask}"] = np.where(segments == i + 1, 255, 0).astype(np.uint8)
                lines.append(f"{mask} {category} {float(score):.6f}\n")
        for path, pixels in pictures.items():
            write_image(output_file(self.folder, path, _RECORD), Image.fromarray(pixels))
        write_text(output_file(self.folder, f"instance/{name}.txt", _RECORD), "".join(lines))
        self.annotations[file_name] = {"image_id": name, "file_name": f"{name}_panoptic.png", "segments_info": rows}

    def close(self, file_names):
        """Writes the panoptic JSON. Raises InputError if one of the `file_names` was not added."""
        check_complete(self.folder, file_names, self.annotations)
        write_json(self.json, {"annotations": sorted(self.annotations.values(), key=lambda one: one["image_id"])})


def zip_coco_results(results_dir, split, data_dir, output_dir, algorithm="axial"):
    """Makes the zip file for COCO's server from predictions in COCO's panoptic format.

    Args:
        results_dir: folder with panoptic_SPLIT.json and panoptic_SPLIT/*.png.
        split: name of the split, such as 'test-dev2017'.
        data_dir: folder of the converted data set. The split's records list the photos.
        output_dir: folder for panoptic_SPLIT_ALGORITHM_results.zip.
        algorithm: name of the method, for the name of the zip.

    Returns:
        Path of the zip.

    Raises:
        InputError: the zip exists; a photo has no prediction; a PNG that the JSON names is missing.
    """
    title = f"panoptic_{split}_{algorithm}_results"
    path = output_file(output_dir, f"{title}.zip", "--split")
    if tf.io.gfile.exists(path):
        raise InputError(f"{path}: exists; results are never overwritten")
    source = inside(results_dir, f"panoptic_{split}.json", "--split")
    if not tf.io.gfile.exists(source):
        raise InputError(f"{source}: no such file; axial-evaluate --results_dir writes it")
    data, content = read_json(source, schemas.Results)
    annotations = content.annotations
    check_unique(source, "annotations: image_id", (a.image_id for a in annotations))
    names, image_ids = photo_names(data_dir, split), {a.image_id for a in annotations}
    check_complete(source, _descriptions(names), _descriptions({n: names[n] for n in names.keys() & image_ids}))
    folder, what = inside(results_dir, f"panoptic_{split}", "--split"), f"{source}: annotations: file_name"
    files = [a.file_name for a in annotations]
    check_complete(folder, files, set(files) - set(missing_files(folder, files, what)))

    def write(temporary):
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(f"{title}.json", data)
            for file in files:
                name = inside(folder, file, what)
                png = read_file(name)
                open_image(name, png)
                archive.writestr(f"{title}/{file}", png)

    write_whole(path, write)
    return path


def _descriptions(names):
    """Set of texts that describe photos for messages, from a dict of `photo_names`."""
    return {f"{name} (image {number})" for number, name in names.items()}


def check_complete(where, expected, present):
    """Raises InputError, which names the first missing photo, unless all expected names are present."""
    missing = sorted(set(expected) - set(present))
    if missing:
        raise InputError(f"{where}: {len(missing)} of {len(set(expected))} photos are missing, first {missing[0]}")
