"""Lists items of the 2018 Data Science Bowl (https://bbbc.broadinstitute.org/BBBC038) for `convert_split`.

    input_dir/SPLIT/ID/images/ID.png    the photo: grey or in colour, of 8 or 16 bits, with or without transparency
    input_dir/SPLIT/ID/masks/*.png      for each nucleus a mask: 0 outside, one other value inside

The release has stage1_train and stage1_test. Instead of such a folder, a list may name the photos of a split:

    input_dir/SPLIT.txt                 stage1_train/ID on each line

A nucleus keeps the holes and all pieces of its mask. Where masks of a photo overlap, the later mask gets the pixels. A
split without masks is unlabelled.

`SAMPLE_DIR` has 130 photos in the layout of `axial.data.converters.folder`; ATTRIBUTION.md lists them.
"""

import functools
import os

import numpy as np
import tensorflow as tf

from axial.data.convert import convert_sample
from axial.data.converters.folder import folder_items
from axial.data.files import PHOTOS, by_name, folders_in, labelled_items, list_folder, split_folder
from axial.data.labels import labels_of, read_ids, same_size, segment
from axial.data.specs import NUCLEI
from axial.errors import InputError
from axial.io.images import open_image, upright
from axial.io.paths import inside
from axial.io.read import check_unique, read_file, read_text

SAMPLE_DIR = os.path.join(os.path.dirname(os.path.dirname(__file__)), "nuclei_sample")
BACKGROUND, NUCLEUS = NUCLEI.category_ids


def nuclei_items(input_dir, split, spec=NUCLEI):
    """Items of a split in the order of its list, or of its folders' names, and bytes that identify this input.

    Raises:
        InputError: there is no such split; a folder has no photo or several; only some photos have masks; a folder of
            masks is empty.
    """
    folders = _folders(input_dir, split)
    photos = {folder: _photo(os.path.join(folder, "images")) for folder in folders}
    masks = {}
    for folder in folders:
        path = os.path.join(folder, "masks")
        if tf.io.gfile.isdir(path):
            masks[folder] = list(by_name(path, PHOTOS).values())
            if not masks[folder]:
                raise InputError(f"{path}: no masks; expected one for each nucleus")
    bare = [folder for folder in folders if folder not in masks]
    if masks and bare:
        raise InputError(f"{os.path.join(bare[0], 'masks')}: no such folder, though {min(masks)} has masks")
    items = labelled_items(photos, masks, functools.partial(read_masks, spec))
    for folder, item in zip(folders, items):
        item["name"] = os.path.basename(folder) + os.path.splitext(item["photo"])[1]
    names = [os.path.basename(path) for item in items for path in (item["photo"], *item["label_files"])]
    return items, "\n".join([*map(os.path.basename, folders), *names]).encode()


def _folders(input_dir, split):
    """Paths of the folders of a split's photos. Raises InputError; see `nuclei_items`."""
    if f"{split}.txt" in list_folder(input_dir):
        path = os.path.join(input_dir, f"{split}.txt")
        lines = enumerate(read_text(path).splitlines(), 1)
        folders = [inside(input_dir, line.strip(), f"{path}: line {number}") for number, line in lines if line.strip()]
        check_unique(path, "the photo", map(os.path.basename, folders))
        return folders
    path = split_folder(input_dir, split)
    return [os.path.join(path, name) for name in folders_in(path, "files, not folders")]


def _photo(folder):
    """Path of the only photo in a folder."""
    photos = list(by_name(folder, PHOTOS).values())
    if len(photos) != 1:
        raise InputError(f"{folder}: {len(photos) or 'no'} photos, one is expected")
    return photos[0]


def read_masks(spec, photo, *masks):
    """`Labels` from the path of a photo and the paths of its nuclei's masks. Nuclei are numbered from 1.

    Raises:
        InputError: the photo has several pages; a mask is empty, has another size than its photo, or several values.
    """
    image = open_image(photo, read_file(photo))
    if image.format == "TIFF" and image.is_animated:  # its pages are a stack or separate channels: no page is the photo
        raise InputError(f"{photo}: a TIFF of several pages, one is expected")
    keys = np.zeros(upright(image).size[::-1], np.int32)
    for number, path in enumerate(masks, 1):
        values = read_ids(path)
        same_size(path, values, photo, keys)
        nucleus = values[values > 0]
        if not nucleus.size:
            raise InputError(f"{path}: an empty mask; a mask has the pixels of one nucleus")
        if np.ptp(nucleus):
            raise InputError(f"{path}: {nucleus.min()} and {nucleus.max()}, a mask has 0 and one other value")
        keys[values > 0] = number
    return labels_of(keys, lambda key: segment(spec, photo, NUCLEUS if key else BACKGROUND, key))


def nuclei_data_dir():
    """Folder in the user's cache with the 130 sample photos as TFRecords. The first call converts them."""
    listing = functools.partial(folder_items, SAMPLE_DIR, spec=NUCLEI)
    return convert_sample("nuclei_sample", ("train", "test"), listing, NUCLEI)
