"""Cityscapes' layout (https://www.cityscapes-dataset.com) as items for `convert_split`.

    input_dir/leftImg8bit/SPLIT/CITY/CITY_SEQUENCE_FRAME_leftImg8bit.png
    input_dir/gtFine/SPLIT/CITY/CITY_SEQUENCE_FRAME_gtFine_instanceIds.png     or gtCoarse
    input_dir/gtFine/SPLIT/CITY/CITY_SEQUENCE_FRAME_gtFine_labelIds.png

A pixel of instanceIds is class id x 1000 + instance number for a thing, and the class id alone for stuff. It is the
class id alone for a crowd too: things that are not told apart, such as a group of cars. The segment ids of a record are
these numbers, as in the panoptic images of cityscapesscripts. Ids that the label table ignores become 0. The panoptic
images can be read in place of instanceIds:

    input_dir/gtFine/cityscapes_panoptic_SPLIT.json, input_dir/gtFine/cityscapes_panoptic_SPLIT/*.png
"""

import functools
import os

from axial.data.converters.coco import panoptic_content, read_panoptic_labels
from axial.data.files import PHOTOS, check_paired, folders_in, list_folder, split_folder, tell_left_out
from axial.data.labels import labels_of, read_ids, segment
from axial.data.specs import CITYSCAPES
from axial.errors import InputError, nearest
from axial.io.paths import inside

LABELS = ("gtFine", "gtCoarse", "panoptic")
NO_CITIES = "files, which are no folders of cities"
# The cities of the official release. A split that has some of them must have all, unless `partial` is set.
CITIES = {
    "train": """aachen bochum bremen cologne darmstadt dusseldorf erfurt hamburg hanover jena krefeld
        monchengladbach strasbourg stuttgart tubingen ulm weimar zurich""".split(),
    "val": "frankfurt lindau munster".split(),
    "test": "berlin bielefeld bonn leverkusen mainz munich".split(),
    "train_extra": """augsburg bad-honnef bamberg bayreuth dortmund dresden duisburg erlangen freiburg
        heidelberg heilbronn karlsruhe konigswinter konstanz mannheim muhlheim-ruhr nuremberg
        oberhausen saarbrucken schweinfurt troisdorf wuppertal wurzburg""".split(),
}


def cityscapes_items(input_dir, split, spec=CITYSCAPES, labels="gtFine", *, partial=False):
    """Items of a split in the order of their names, and bytes that identify this input.

    The test split is read without labels: the labels in its folder are void.

    Args:
        input_dir: folder that holds leftImg8bit and the label folders.
        split: 'train', 'val' or 'test'; with gtCoarse also 'train_extra'.
        spec: `DatasetSpec` of Cityscapes' ids. If it has no things, labelIds are read in place of instanceIds.
        labels: one of `LABELS`.
        partial: whether cities of the official release may be missing.

    Raises:
        InputError: a folder or split that is missing; a city that is missing among the photos, among the labels or from
            the official split; a photo without labels, or labels without a photo.
    """
    if labels not in LABELS:
        raise InputError(f"no labels are called {labels!r}{nearest(labels, LABELS)}: {', '.join(LABELS)}")
    photos = split_folder(os.path.join(input_dir, "leftImg8bit"), split)
    cities = folders_in(photos, NO_CITIES)
    missing = sorted(set(CITIES.get(split, ())) - set(cities))
    if missing and set(cities) & set(CITIES[split]) and not partial:
        raise InputError(
            f"{photos}: the official split has {', '.join(missing)} too; unpack the whole release, or convert what is "
            "there with --partial"
        )
    truth = None
    if split != "test" and labels != "panoptic":
        truth = split_folder(os.path.join(input_dir, labels), split)
        for odd in sorted(set(cities) ^ set(folders_in(truth, NO_CITIES))):
            has, lacks = (photos, truth) if odd in cities else (truth, photos)
            raise InputError(f"{os.path.join(lacks, odd)}: the city is missing, though {has} has it")
    kind = "instanceIds" if any(spec.things) else "labelIds"
    items = []
    for city in cities:
        items += _city_items(photos, truth, city, suffix=f"_{labels}_{kind}.png", spec=spec)
    if not items:
        raise InputError(f"{photos}: no photo in a folder of its city")
    for number, item in enumerate(items):
        item["id"] = number
    if labels == "panoptic":
        _read_panoptic(items, inside(input_dir, f"gtFine/cityscapes_panoptic_{split}.json", "--split"), spec)
    names = [os.path.relpath(item["photo"], input_dir) for item in items]
    return items, "\n".join([labels, kind, *names]).encode()


def _city_items(photos, truth, city, *, suffix, spec):
    """Items of one city, without their ids. `truth` is None for a split without labels."""
    folder = os.path.join(photos, city)
    names = list_folder(folder)
    stems = {name: os.path.splitext(name)[0] for name in names if name.lower().endswith(PHOTOS)}
    frames = {
        stem.removesuffix("_leftImg8bit"): os.path.join(folder, name)
        for name, stem in stems.items()
        if stem.endswith("_leftImg8bit")
    }
    rest = sorted(set(names) - set(map(os.path.basename, frames.values())))
    tell_left_out(folder, f"what does not end in _leftImg8bit and {', '.join(PHOTOS)}", rest)
    labels = {}
    if truth:
        of_city = os.path.join(truth, city)
        found = [name for name in list_folder(of_city) if name.endswith(suffix)]
        labels = {name.removesuffix(suffix): os.path.join(of_city, name) for name in found}
        check_paired(frames, labels, folder, lambda frame: os.path.join(of_city, frame + suffix))
    return [
        {
            "photo": photo,
            "labels": functools.partial(read_instance_labels, labels[frame], spec) if truth else None,
            "label_files": [labels[frame]] if truth else [],
        }
        for frame, photo in sorted(frames.items())
    ]


def _read_panoptic(items, path, spec):
    """Sets the items' labels from a panoptic JSON and its folder. Raises InputError if the JSON lacks an item."""
    _, content = panoptic_content(path, spec)
    sizes = {image.id: (image.width, image.height) for image in content.images}
    annotations = {annotation.image_id: annotation for annotation in content.annotations}
    for item in items:
        frame = os.path.splitext(os.path.basename(item["photo"]))[0].removesuffix("_leftImg8bit")
        if frame not in annotations or frame not in sizes:
            raise InputError(f"{path}: nothing of {item['photo']}")
        png = inside(path.removesuffix(".json"), annotations[frame].file_name, f"{path}: annotations: file_name")
        segments = annotations[frame].segments_info
        item["labels"] = functools.partial(read_panoptic_labels, png, sizes[frame], segments, spec)
        item["label_files"] = [path, png]


def read_instance_labels(path, spec=CITYSCAPES):
    """`Labels` of an instanceIds image, or of a labelIds image if the spec has no things."""
    instances = any(spec.things)
    plate = 65535 if instances else 255  # the licence plate's id is -1, which wraps

    def describe(key):
        category, instance = (key // 1000, key % 1000 + 1) if key >= 1000 else (key, 0)
        if key == plate and spec.class_index(category) is None:
            category, instance = -1, 0
        index = spec.class_index(category)
        thing = index is not None and index != spec.ignore and spec.things[index]
        return segment(spec, path, category, instance, identity=key if thing else category, pixel=key)

    return labels_of(read_ids(path, deep=instances), describe)
