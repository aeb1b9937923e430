"""Writes predictions in the formats of the benchmark servers of Cityscapes and COCO."""

import os
import tempfile
import zipfile

import numpy as np
import tensorflow as tf
from PIL import Image

from axial.data.files import missing_files
from axial.data.labels import colors_of
from axial.data.specs import CITYSCAPES
from axial.data.streams import photo_names
from axial.errors import InputError
from axial.io import schemas
from axial.io.images import open_image
from axial.io.paths import inside
from axial.io.read import check_unique, read_file, read_json
from axial.io.write import make_folder, output_file, output_folder, write_image, write_json, write_text, write_whole

_RECORD = "a record's image/file_name"


class CityscapesResults:
    """Writes files for Cityscapes' server: three folders, each a submission of its own.

        panoptic/cityscapes_panoptic_SPLIT.json, panoptic/cityscapes_panoptic_SPLIT/NAME_panoptic.png
        instance/NAME.txt      a line 'masks/NAME_3.png LABEL_ID CONFIDENCE' for each thing
        instance/masks/*.png   255 inside the thing, 0 outside
        semantic/NAME_labelIds.png

    NAME is CITY_SEQUENCE_FRAME. Classes are written as Cityscapes' ids, not as train ids.

    Args:
        folder: folder to write to.
        spec: `DatasetSpec` whose category_ids are Cityscapes' ids.
        split: name of the split, for the names of the panoptic files.

    Raises:
        InputError: `folder` has results of that split already; classes of another data set.
    """

    def __init__(self, folder, spec, split):
        if not set(spec.category_ids) <= set(CITYSCAPES.category_ids):
            raise InputError(
                f"{folder}: Cityscapes' server takes cityscapes' classes, these are {spec.name}'s; "
                "for COCO's, --results_dir and axial-convert zip"
            )
        self.folder, self.spec = folder, spec
        self.title = f"cityscapes_panoptic_{split}"
        self.json = output_file(folder, f"panoptic/{self.title}.json", "--split")
        if tf.io.gfile.exists(self.json):
            raise InputError(f"{self.json}: exists; results are never overwritten, choose another folder")
        self.annotations, self.done = [], set()
        for part in (f"panoptic/{self.title}", "instance/masks", "semantic"):
            make_folder(output_folder(folder, part, "--split"))

    def add(self, file_name, segments, *, classes, scores, semantic):
        """Writes the files of one photo.

        Args:
            file_name: of the photo, CITY_SEQUENCE_FRAME_leftImg8bit.png.
            segments: int [h, w]; 0 for void, i + 1 for segment i.
            classes, scores: class index and confidence of each segment.
            semantic: int [h, w] of class indices. spec.ignore is written as 0, which means unlabeled.

        Raises:
            InputError: the server takes no file of that name, or another photo has had it.
        """
        name = os.path.splitext(file_name)[0].removesuffix("_leftImg8bit")
        if "/" in name:
            raise InputError(f"{_RECORD} {file_name!r}: Cityscapes' server takes names without folders")
        if any(name == annotation["image_id"] for annotation in self.annotations):
            raise InputError(f"{_RECORD} {file_name!r}: another photo has the same files, {name}; rename one of them")
        ids, segments = np.array(self.spec.category_ids), np.asarray(segments)
        semantic = np.asarray(semantic)
        label = np.where(semantic == self.spec.ignore, 0, ids[np.minimum(semantic, len(ids) - 1)])
        pictures = {
            f"panoptic/{self.title}/{name}_panoptic.png": colors_of(segments),
            f"semantic/{name}_labelIds.png": label.astype(np.uint8),
        }
        rows, lines = [], []
        for i, (index, score) in enumerate(zip(classes, scores)):
            category = self.spec.category_ids[index]
            rows.append({"id": i + 1, "category_id": int(category)})
            if self.spec.things[index]:
                mask = f"masks/{name}_{i}.png"
                pictures[f"instance/{mask}"] = np.where(segments == i + 1, 255, 0).astype(np.uint8)
                lines.append(f"{mask} {category} {float(score):.6f}\n")
        for place, pixels in pictures.items():
            write_image(output_file(self.folder, place, _RECORD), Image.fromarray(pixels))
        write_text(output_file(self.folder, f"instance/{name}.txt", _RECORD), "".join(lines))
        about = {"image_id": name, "file_name": f"{name}_panoptic.png", "segments_info": rows}
        self.annotations.append(about)
        self.done.add(file_name)

    def close(self, file_names):
        """Writes the panoptic JSON. Raises InputError if one of the `file_names` was not added."""
        check_complete(self.folder, file_names, self.done)
        write_json(self.json, {"annotations": sorted(self.annotations, key=lambda one: one["image_id"])})


def zip_coco_results(results_dir, split, data_dir, output_dir, algorithm="axial"):
    """Makes the zip that COCO's server takes from panoptic results in COCO's format.

    Args:
        results_dir: folder with panoptic_SPLIT.json and panoptic_SPLIT/*.png.
        split: 'test-dev2017' or another.
        data_dir: folder of the converted data set. Its records say which photos the split has.
        output_dir: folder for panoptic_SPLIT_ALGORITHM_results.zip.
        algorithm: name of the method, a part of the zip's name.

    Returns:
        Path of the zip.

    Raises:
        InputError: the zip exists; a photo without a result; a PNG that the JSON names is missing.
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
    names, found = photo_names(data_dir, split), {a.image_id for a in annotations}
    wanted = {number: f"{name} (image {number})" for number, name in names.items()}
    check_complete(source, wanted.values(), {wanted[number] for number in wanted.keys() & found})
    folder, what = inside(results_dir, f"panoptic_{split}", "--split"), f"{source}: annotations: file_name"
    files = [a.file_name for a in annotations]
    check_complete(folder, files, set(files) - set(missing_files(folder, files, what)))
    with tempfile.NamedTemporaryFile(suffix=".zip") as local:
        with zipfile.ZipFile(local, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(f"{title}.json", data)
            for annotation in annotations:
                name = inside(folder, annotation.file_name, what)
                png = read_file(name)
                open_image(name, png)
                archive.writestr(f"{title}/{annotation.file_name}", png)
        local.flush()
        write_whole(path, lambda temporary: tf.io.gfile.copy(local.name, temporary, True))
    return path


def check_complete(where, wanted, found):
    """Raises InputError, which names the first missing one, unless every wanted name was found."""
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise InputError(f"{where}: {len(missing)} of {len(set(wanted))} photos are missing, first {missing[0]}")
