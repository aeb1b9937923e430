"""Lists items of ImageNet, or of any folder of class folders, for `convert_split`.

    input_dir/SPLIT/CLASS/PHOTO         the classes are the sorted names of the folders with photos
    or
    input_dir/SPLIT/PHOTO               and a list of lines 'PHOTO CLASS'; CLASS is a folder's name or a class index

The list is input_dir/SPLIT.txt or Kaggle's input_dir/LOC_SPLIT_solution.csv. If input_dir/LOC_synset_mapping.txt
exists, its lines 'FOLDER name' give readable class names.
"""

import collections
import os
import re

import tensorflow as tf

from axial.data.files import PHOTOS, list_folder, split_folder, tell_left_out
from axial.data.specs import DatasetSpec
from axial.errors import InputError, nearest
from axial.io.paths import inside
from axial.io.read import read_text

NAMES = "LOC_synset_mapping.txt"
LARGEST_IGNORE = 2**15 - 1


def classes_spec(name, folders, names=None):
    """The `DatasetSpec` of a classification data set.

    Args:
        name: name of the data set.
        folders: names of the class folders, in order.
        names: dict from folders to readable names.
    """
    readable = [(names or {}).get(folder, folder) for folder in folders]
    count = collections.Counter(readable)
    unique = tuple(n if count[n] == 1 else f"{n} ({folder})" for n, folder in zip(readable, folders))
    classes = len(folders)
    return DatasetSpec(name, unique, tuple(range(classes)), (False,) * classes, label_divisor=1, ignore=LARGEST_IGNORE)


def _classes(input_dir):
    """Two sets of names: folders with photos in some split, which are the classes, and folders without photos.

    Raises:
        InputError: no split of `input_dir` has folders of photos.
    """
    splits = [os.path.join(input_dir, split) for split in list_folder(input_dir)]
    folders = [os.path.join(split, name) for split in filter(tf.io.gfile.isdir, splits) for name in list_folder(split)]
    folders = [folder for folder in folders if tf.io.gfile.isdir(folder)]
    classes = {os.path.basename(folder) for folder in folders if _photos(folder)}
    if not classes:
        raise InputError(f"{input_dir}: no split here has folders of classes with photos, as in train/n01440764/")
    return classes, {*map(os.path.basename, folders)} - classes


def imagenet_spec(input_dir):
    """The `DatasetSpec` of the class folders in `input_dir`; see the module. Raises InputError."""
    path, names = os.path.join(input_dir, NAMES), {}
    if tf.io.gfile.exists(path):
        names = dict(line.split(" ", 1) for line in read_text(path).splitlines() if " " in line)
    return classes_spec(os.path.basename(os.path.normpath(input_dir)), sorted(_classes(input_dir)[0]), names)


def imagenet_items(input_dir, split):
    """Items of a split in order of classes and names, and bytes that identify this input.

    Raises:
        InputError: there is no such split; there are no photos; the list lacks a photo, or a photo is missing.
    """
    folder = split_folder(input_dir, split)
    classes, empty = _classes(input_dir)
    tell_left_out(input_dir, "folders without photos, which are not classes", sorted(empty))
    index, names = {name: i for i, name in enumerate(sorted(classes))}, list_folder(folder)
    flat, labelled = _photos(folder), []
    others = [name for name in names if name not in {*flat, *index, *empty}]
    for name in (name for name in names if name in index):
        photos = _photos(os.path.join(folder, name))
        labelled += [(index[name], os.path.join(folder, name, photo)) for photo in photos]
        others += [f"{name}/{other}" for other in list_folder(os.path.join(folder, name)) if other not in set(photos)]
    tell_left_out(folder, f"names that do not end in {', '.join(PHOTOS)}", others)
    listed = _listed(input_dir, split, index) if flat else {}
    for photo in flat:
        label = listed.get(photo, listed.get(os.path.splitext(photo)[0]))
        if label is None:
            raise InputError(f"{os.path.join(folder, photo)}: not in the list of {split!r}{nearest(photo, listed)}")
        labelled.append((label, os.path.join(folder, photo)))
    items = [{"photo": path, "id": number, "class": label} for number, (label, path) in enumerate(sorted(labelled))]
    names = (f"{item['class']} {os.path.basename(item['photo'])}" for item in items)
    return items, "\n".join(names).encode()


def _photos(folder):
    """Names of the photos in a folder."""
    return [name for name in list_folder(folder) if name.lower().endswith(PHOTOS)]


def _listed(input_dir, split, index):
    """dict from the photos in a split's list to class indices. Raises InputError."""
    paths = [inside(input_dir, name, "--split") for name in (f"{split}.txt", f"LOC_{split}_solution.csv")]
    path = next((path for path in paths if tf.io.gfile.exists(path)), None)
    if path is None:
        raise InputError(f"{os.path.join(input_dir, split)}: photos without folders of classes need {paths[0]}")
    labels = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = re.split(r"[,\s]+", line.strip())
        if words in ([""], ["ImageId", "PredictionString"]):
            continue
        if len(words) < 2:
            raise InputError(f"{path}:{number}: expected 'PHOTO CLASS', got {line!r}")
        label = index.get(words[1], int(words[1]) if words[1].isdigit() else -1)
        if not 0 <= label < len(index):
            raise InputError(f"{path}:{number}: no class {words[1]!r}{nearest(words[1], index)}")
        labels[words[0]] = label
    return labels
