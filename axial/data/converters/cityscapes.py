"""Lists items of Cityscapes' layout (https://www.cityscapes-dataset.com) for `convert_split`.

    input_dir/leftImg8bit/SPLIT/CITY/CITY_SEQUENCE_FRAME_leftImg8bit.png
    input_dir/gtFine/SPLIT/CITY/CITY_SEQUENCE_FRAME_gtFine_instanceIds.png     or gtCoarse
    input_dir/gtFine/SPLIT/CITY/CITY_SEQUENCE_FRAME_gtFine_labelIds.png

A pixel of instanceIds is class id x 1000 + instance number for a thing, and the class id for stuff. It is also the
class id for a crowd: things that are not told apart, such as a group of cars. A record's segment ids are these numbers,
as in cityscapesscripts' panoptic images. Ids that the label table ignores become 0.
"""

import functools
import os

from axial.data.files import PHOTOS, check_paired, folders_in, labelled_items, list_folder, split_folder, tell_left_out
from axial.data.labels import labels_of, read_ids, segment
from axial.data.specs import CITYSCAPES
from axial.errors import InputError

NO_CITIES = "files, not folders of cities"
# Cities of the official release. A split with some of them must have all, unless `partial` is set.
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
    """Items of a split in order of their names, and bytes that identify this input.

    The test split is read without labels, because its label files have only void pixels.

    Args:
        input_dir: folder with leftImg8bit and the label folders.
        split: 'train', 'val' or 'test'; with gtCoarse also 'train_extra'.
        spec: `DatasetSpec` of Cityscapes' ids. If it has no things, labelIds are read instead of instanceIds.
        labels: 'gtFine' or 'gtCoarse'.
        partial: whether cities of the official release may be missing.

    Raises:
        InputError: a folder or split is missing; the official split lacks a city; a photo has no labels, or labels have
            no photo.
    """
    folder = split_folder(os.path.join(input_dir, "leftImg8bit"), split)
    kind = "instanceIds" if any(spec.things) else "labelIds"
    photos = _frames(folder, "_leftImg8bit", PHOTOS)
    official, cities = set(CITIES.get(split, ())), {os.path.dirname(frame) for frame in photos}
    if cities & official and not partial and (missing := sorted(official - cities)):
        raise InputError(f"{folder}: the official split has {', '.join(missing)} too; unpack them, or use --partial")
    files = {}
    if split != "test":
        label_folder, ending = split_folder(os.path.join(input_dir, labels), split), f"_{labels}_{kind}"
        label_paths = _frames(label_folder, ending, (".png",))
        check_paired(photos, label_paths, folder, label_folder, ending=f"{ending}.png")
        files = {frame: [path] for frame, path in label_paths.items()}
    items = labelled_items(photos, files, functools.partial(read_instance_labels, spec))
    names = [os.path.relpath(path, input_dir) for path in photos.values()]
    return items, "\n".join([labels, kind, *names]).encode()


def _frames(folder, ending, suffixes):
    """dict from CITY/CITY_SEQUENCE_FRAME to the file's path, for all files in city folders that end in `ending`."""
    paths = {}
    for city in folders_in(folder, NO_CITIES):
        path, rest = os.path.join(folder, city), []
        for name in list_folder(path):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in suffixes and stem.endswith(ending):
                paths[f"{city}/{stem.removesuffix(ending)}"] = os.path.join(path, name)
            else:
                rest.append(name)
        if suffixes == PHOTOS:  # label folders have several kinds of files
            tell_left_out(path, f"names that do not end in {ending} and {', '.join(PHOTOS)}", rest)
    return {frame: paths[frame] for frame in sorted(paths, key=lambda frame: frame.split("/"))}


def read_instance_labels(spec, _, path):
    """`Labels` of an instanceIds image, or of a labelIds image if the spec has no things."""
    instances = any(spec.things)
    plate = 65535 if instances else 255  # unsigned pixels hold the licence plate's id, -1, as this value

    def describe(key):
        category, instance = (key // 1000, key % 1000 + 1) if key >= 1000 else (key, 0)
        if key == plate and spec.class_index(category) is None:
            category, instance = -1, 0
        index = spec.class_index(category)
        thing = index is not None and index != spec.ignore and spec.things[index]
        return segment(spec, path, category, instance, identity=key if thing else category, pixel=key)

    return labels_of(read_ids(path, deep=instances), describe)
