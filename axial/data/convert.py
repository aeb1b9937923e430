"""Turns a list of annotated photos into the shards of a split: parallel, resumable, exact.

A data set brings a list of items and a function from an item to a record; everything else is here.
"""

import collections
import concurrent.futures
import hashlib
import io
import json
import os
import time

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps
from tqdm import tqdm

from axial.data import tfrecord
from axial.errors import InputError

PHOTOS_A_SHARD = 512  # of COCO's size, about 100 MB


def convert_split(
    items, encode, spec, split, output_dir, source, shards=None, workers=None, progress=True
):
    """Writes items as a split of TFRecords; what a killed run has finished is kept and used.

    Args:
        items: sequence of whatever `encode` takes, in the order of the records.
        encode: function of an item that returns its record as a dict (`tfrecord`) and a dict of
            seconds spent by stage; raises InputError naming the file at fault.
        spec: `DatasetSpec`.
        split: name of the split.
        output_dir: folder, made if it is missing.
        source: bytes that differ when the input does, so that two inputs are never mixed.
        shards: number of files; one for each 512 items by default.
        workers: number of threads, by default one for each core.
        progress: whether to show a bar.

    Returns:
        The manifest, and a dict with 'photos' converted by this call, 'seconds', and 'stages',
        seconds by stage over all threads.

    Raises:
        InputError: the folder holds a split of this name made from something else.
    """
    shards = min(shards or -(-len(items) // PHOTOS_A_SHARD), len(items))
    plan = {
        "format": 1,
        "spec": spec.to_json(),
        "split": split,
        "examples": len(items),
        "source": hashlib.sha256(source + str(shards).encode()).hexdigest(),
    }
    tf.io.gfile.makedirs(output_dir)
    manifest_path = os.path.join(output_dir, f"{split}.json")
    plan_path = os.path.join(output_dir, f".{split}.plan")
    for path in (manifest_path, plan_path):
        if tf.io.gfile.exists(path):
            with tf.io.gfile.GFile(path) as file:
                found = json.load(file)
            if {key: found.get(key) for key in plan} != json.loads(json.dumps(plan)):
                raise InputError(
                    f"{path}: this folder holds {split!r} made from other input or with other "
                    "--shards; choose another --output_dir or delete its files"
                )
    stages = collections.Counter()
    start, before = time.perf_counter(), 0
    if not tf.io.gfile.exists(manifest_path):
        tfrecord.write_json(plan_path, plan)
    bounds = [len(items) * i // shards for i in range(shards + 1)]
    paths = [os.path.join(output_dir, tfrecord.shard_name(split, i, shards)) for i in range(shards)]
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool, tqdm(
        total=len(items), unit="photo", desc=split, disable=not progress, mininterval=0.5
    ) as bar:
        for path, first, last in zip(paths, bounds, bounds[1:]):
            if tf.io.gfile.exists(path):
                before += last - first
                bar.update(last - first)
                continue
            records = _encoded(pool, encode, items[first:last], stages, bar)
            tfrecord.write_shard(path, records)
    size = lambda path: tf.io.gfile.stat(path).length
    files = [
        [os.path.basename(path), last - first, size(path)]
        for path, first, last in zip(paths, bounds, bounds[1:])
    ]
    manifest = {**plan, "shards": files}
    tfrecord.write_json(manifest_path, manifest)
    if tf.io.gfile.exists(plan_path):
        tf.io.gfile.remove(plan_path)
    seconds = time.perf_counter() - start
    return manifest, {"photos": len(items) - before, "seconds": seconds, "stages": dict(stages)}


def _encoded(pool, encode, items, stages, bar):
    """Records of the items in their order, a bounded number of them ahead of the writer."""
    waiting = collections.deque()
    items = iter(items)
    try:
        while True:
            for item in items:
                waiting.append(pool.submit(encode, item))
                if len(waiting) >= 64:
                    break
            if not waiting:
                return
            fields, seconds = waiting.popleft().result()
            stages.update(seconds)
            bar.update()
            start = time.perf_counter()
            yield tfrecord.encode_example(fields)
            stages["write"] += time.perf_counter() - start  # the consumer has written it
    finally:
        for future in waiting:
            future.cancel()


# === Reading photos and label maps ===


def read_file(path):
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    except (tf.errors.OpError, OSError):
        raise InputError(f"{path}: missing or unreadable") from None


def photo_bytes(path, data, size):
    """A photo of `size` (width, height) as JPEG or PNG that TensorFlow decodes to the same pixels.

    Most files pass untouched, once they have been decoded as a check. CMYK, 16-bit, palette and
    transparent ones are encoded anew as RGB, and so are those which only turning by their EXIF tag
    brings to `size`.

    Raises:
        InputError: not a whole photo, or one of another size.
    """
    image = open_image(path, data)
    turned = image
    if image.size != size:
        turned = ImageOps.exif_transpose(image)
    if turned.size != size:
        raise InputError(f"{path}: {image.size[0]}x{image.size[1]} pixels, its labels say {size[0]}x{size[1]}")
    if turned is image and image.format in ("JPEG", "PNG") and image.mode in ("RGB", "L"):
        return data
    encoded = io.BytesIO()
    lossy = dict(format="JPEG", quality=95, subsampling=0)
    to_rgb(turned).save(encoded, **(lossy if image.format == "JPEG" else dict(format="PNG")))
    return encoded.getvalue()


def open_image(path, data):
    """The whole file decoded by Pillow; InputError if it is cut short or no image."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        return image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{path}: not a whole image ({error})") from None


def to_rgb(image):
    """Grey, 16-bit, palette, CMYK and transparent images as 8-bit RGB; transparency is dropped."""
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits a pixel
        levels = np.asarray(image).astype(np.float64)
        levels = np.clip(levels / 256 if levels.max() > 255 else levels, 0, 255)
        image = Image.fromarray(levels.astype(np.uint8))
    return image.convert("RGB")
