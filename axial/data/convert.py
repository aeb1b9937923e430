"""Turns a list of annotated photos into the shards of a split.

The records have a random order, which is the same in every run. Threads convert the photos in parallel. A killed run
can be resumed, and every run writes the same bytes. A shard is converted again if one of its photos or label files has
changed its size or modification time.

A broken photo or label file does not stop the conversion; the end of the run names all of them. Without `skip_broken`,
shards with such files are not written, and the next run converts only these shards. With `skip_broken`, their items
have no record, and the manifest lists them. If such a run was killed, its shards with broken items are converted again.

Each data set provides a list of items; this module does everything else. An item is a dict:

    photo       path of the photo
    name        name of the photo in its split, with subfolders; by default the file name
    id          integer id of the photo in the data set
    class       class index of the photo, for classification; or
    labels      function without arguments that reads the photo's `Labels`; None for a photo without labels
    label_files paths of the files that `labels` reads; optional
    boxes       function of the photo's size (width, height) that returns the 'box/' fields of the record; optional
    stored      True if the labels match the stored pixels, before the EXIF turn; see `files.photo_fields`
    read        function that returns the photo's bytes and `Labels` (or None), if the photo has no file of its own

`text.pair_items` makes the items of sentence pairs.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import operator
import os
import time
import typing

import msgspec
import tensorflow as tf

from axial.data import labels, tfrecord
from axial.data.files import photo_fields
from axial.data.levels import PERCENTILES
from axial.data.specs import DatasetSpec, TextSpec
from axial.errors import InputError
from axial.io import gfile, show
from axial.io.lock import locked
from axial.io.read import LARGEST_TEXT, convert, first_line, read_file, read_json
from axial.io.write import file_digest, make_folder, name_broken, output_file, write_json

PHOTOS_A_SHARD = 512  # about 100 MB for COCO
PERMUTATION = 5  # seed of the record order; see `tfrecord.item_numbers`
AHEAD = 64  # items in progress at a time


class WrittenShard(typing.NamedTuple):
    """A written shard. `digest` is the file's SHA-256; '' without a file, or if it is computed later.

    `broken` lists (index of the item in the shard, error message). `remarks` lists (text, path of the photo, counts);
    see `_tell_remarks`.
    """

    path: str
    size: int = 0
    digest: str = ""
    broken: list = []
    remarks: list = []


def encode_item(item):
    """Returns the fields of an item's record (see `tfrecord`), and remarks on the photo.

    Raises:
        InputError: a photo or label image is missing, damaged or has another size; the spec lacks a label. The message
            names the file.
    """
    path, label = item["photo"], None
    if "read" in item:
        photo, label = item["read"]()
    else:
        photo = read_file(path)
    if item.get("labels"):
        label = item["labels"]()
    fields, remarks = photo_fields(path, photo, label.size if label else None, item.get("stored", False))
    size = fields["image/width"], fields["image/height"]
    fields |= {"image/file_name": item.get("name", os.path.basename(path)), "image/id": item["id"]}
    if "class" in item:
        fields["image/class"] = item["class"]
    else:
        label = label or labels.blank(size)
        ids, classes, crowd = zip(*label.segments) if label.segments else ((), (), ())
        fields |= {"panoptic/encoded": label.png, "segment/id": ids, "segment/class": classes, "segment/crowd": crowd}
        fields |= item["boxes"](size) if "boxes" in item else {}
    return fields, [*((text, []) for text in remarks), *(label.remarks if label else ())]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A split to convert, and how to convert it.

    Attributes:
        items: sequence of items.
        source: bytes that identify the input, so that two inputs are never mixed.
        spec: `DatasetSpec` or `TextSpec`.
        split: name of the split.
        output_dir: folder, created if it is missing.
        workers: number of threads; by default one for each core.
        skip_broken: whether to leave out items that cannot be read.
        shards: number of files; by default one for every 512 items.
        encode: function with the argument and the results of `encode_item`.
        unit: noun for an item, shown in the progress bar.
        progress: whether to show a progress bar.
        permutation: seed of the record order; `convert_split` sets it.
    """

    items: list
    source: bytes
    spec: DatasetSpec | TextSpec
    split: str
    output_dir: str
    workers: int | None = None
    skip_broken: bool = False
    shards: int | None = None
    encode: typing.Callable = encode_item
    unit: str = "photo"
    progress: bool = True
    permutation: int | None = PERMUTATION

    def path(self, name):
        """Path of a file in the output folder."""
        return output_file(self.output_dir, name, "--split")

    @property
    def manifest(self):
        return self.path(f"{self.split}.json")

    @property
    def plan(self):
        """Path of the unfinished manifest, which exists only while the split is converted."""
        return self.path(f".{self.split}.plan")

    def permuted(self):
        """Items in the order of their records; see `tfrecord.item_numbers`."""
        return [self.items[number] for number in tfrecord.item_numbers(len(self.items), self.permutation)]

    def bounds(self):
        """dict from each shard's path to (first record, last record + 1)."""
        total = len(self.items)
        shards = min(self.shards or -(-total // PHOTOS_A_SHARD), total)
        names = [self.path(tfrecord.shard_name(self.split, i, shards)) for i in range(shards)]
        return dict(zip(names, itertools.pairwise(total * i // shards for i in range(shards + 1))))

    def shards_there(self):
        """Paths of all existing shards of the split, also from runs with another number of shards."""
        return gfile.glob(self.manifest.removesuffix(".json"), "-?????-of-?????.tfrecord")


def convert_split(conversion):
    """Writes items as a split of TFRecords. It reuses the shards that a killed run has finished.

    Args:
        conversion: `Conversion`.

    Returns:
        The manifest, and a dict: 'photos' is the number of photos that this call converted, 'seconds' its duration.

    Raises:
        InputError: there are no items; the folder holds a split of this name from other input or with another number of
            `shards`; an item cannot be read (with `skip_broken`: no item can be read).
    """
    if not conversion.items:
        raise InputError(f"--split={conversion.split}: no {conversion.unit} is in this split")
    make_folder(conversion.output_dir)
    listed = conversion.path(f"{conversion.split}.broken.txt")
    _remove(listed)
    earlier = _earlier(conversion)
    finished = bool(earlier and earlier.shards)
    if earlier:  # keeps the record order of older versions
        conversion = dataclasses.replace(conversion, permutation=earlier.permutation)
    if isinstance(conversion.spec, DatasetSpec):  # keeps the levels of a finished split
        levels = earlier.spec.levels if finished else PERCENTILES
        conversion = dataclasses.replace(conversion, spec=dataclasses.replace(conversion.spec, levels=levels))
    bounds, plan, total = conversion.bounds(), _plan(conversion), len(conversion.items)
    order = tfrecord.item_numbers(total, conversion.permutation).tolist()
    kept = _kept(conversion, earlier, plan, order)
    if not finished:
        for path in set(conversion.shards_there()) - set(kept):
            tf.io.gfile.remove(path)
        write_json(conversion.plan, plan)
    todo = {path: limits for path, limits in bounds.items() if path not in kept}
    converted, start, written = sum(last - first for first, last in todo.values()), time.perf_counter(), []
    quiet = not conversion.progress
    with show.progress(None, conversion.split, total=total, unit=conversion.unit, disable=quiet) as bar:
        bar.update(total - converted)
        if todo:
            written = _write_shards(conversion, todo, bar)
    _tell_remarks([remark for row in written for remark in row.remarks])
    rows = {**kept, **{row.path: row for row in written}}
    left_out = sorted((order[bounds[path][0] + n], text) for path, row in rows.items() for n, text in row.broken)
    _tell_broken(conversion, listed, [text for _, text in left_out])
    if converted or not finished:
        whole = [(rows[path], last - first - len(rows[path].broken)) for path, (first, last) in bounds.items()]
        shards = [[os.path.basename(row.path), records, *_digest(row)] for row, records in whole if records]
        manifest = {**plan, "shards": [row[:3] for row in shards], "hashes": [row[3] for row in shards]}
        if left_out:
            manifest |= {"examples": total - len(left_out), "left_out": [list(row) for row in left_out]}
        write_json(conversion.manifest, manifest)
    else:
        manifest = msgspec.to_builtins(earlier)
    _remove(conversion.plan)
    return manifest, {"photos": converted, "seconds": time.perf_counter() - start}


def _digest(row):
    """(bytes, SHA-256) of a `WrittenShard`."""
    return (row.size, row.digest) if row.digest else file_digest(row.path)


def convert_sample(name, splits, listing, spec):
    """Path of a sample data set as TFRecords, in the user's cache. The first call converts axial's sample photos.

    Args:
        name: name of the folder.
        splits: names of the splits.
        listing: function of a split that returns its items and the bytes of their source.
        spec: `DatasetSpec`.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(cache, "axial", name)
    with locked(path):
        for split in splits:
            convert_split(Conversion(*listing(split), spec, split, path, progress=False))
    return path


def as_stored(items, source):
    """Marks the items of a split: their labels match the stored pixels, before the EXIF turn."""
    return [{**item, "stored": True} for item in items], source + b" labels of stored pixels"


# === Resuming an earlier run ===


def _earlier(conversion):
    """Returns a finished run's `tfrecord.Manifest`, the `tfrecord.Plan` of a run that has written shards, or None."""
    for path, schema in ((conversion.manifest, tfrecord.Manifest), (conversion.plan, tfrecord.Plan)):
        if tf.io.gfile.exists(path):
            return read_json(path, schema, LARGEST_TEXT)[1] if conversion.shards_there() else None
    return None


def _plan(conversion):
    """dict of a `tfrecord.Plan`. Its 'source' depends on the input, the number of shards and the record order."""
    items, bounds, permutation = conversion.permuted(), conversion.bounds(), conversion.permutation
    order = "" if permutation is None else f" permuted by {permutation}"
    return {
        "format": 1,
        "spec": conversion.spec.to_json(),
        "split": conversion.split,
        "examples": len(items),
        "source": hashlib.sha256(conversion.source + f"{len(bounds)}{order}".encode()).hexdigest(),
        "stamps": [_stamp(items[first:last]) for first, last in bounds.values()],
        "labels": next((name for name in ("text", "class") if name in items[0]), "panoptic"),
        "permutation": permutation,
    }


def _stamp(items):
    """Hash of the sizes and modification times of the items' local files."""
    digest = hashlib.sha256()
    for item in items:
        files = [item["photo"], *item.get("label_files", ())] if "photo" in item and "read" not in item else []
        for path in files:
            with contextlib.suppress(OSError):  # `encode_item` names a missing file
                status = os.stat(path)
                digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _kept(conversion, earlier, plan, order):
    """dict from the path of each reusable shard of an earlier run to its `WrittenShard`, without size and digest.

    Args:
        conversion: `Conversion`.
        earlier: result of `_earlier`.
        plan: dict of this run's plan.
        order: list of item numbers in record order.

    Raises:
        InputError: the earlier run had other input or another number of shards.
    """
    if not earlier:
        return {}
    path = conversion.manifest if earlier.shards else conversion.plan
    now, reasons = convert(f"{path}: ", plan, tfrecord.Plan), dict(earlier.left_out)
    input_of = operator.attrgetter("spec", "split", "source", "labels")
    if input_of(earlier) != input_of(now) or earlier.examples + len(reasons) != now.examples:
        raise InputError(f"{path}: made from other input or other --shards; delete it, or choose another --output_dir")
    sizes, kept = {name: size for name, _, size in earlier.shards}, {}
    for i, (path, (first, last)) in enumerate(conversion.bounds().items()):
        broken = [(position, reasons[n]) for position, n in enumerate(order[first:last]) if n in reasons]
        unchanged = not earlier.stamps or earlier.stamps[i] == now.stamps[i]  # older versions wrote none
        if not unchanged or (broken and not conversion.skip_broken):
            continue
        if len(broken) == last - first:  # the shard has no file
            kept[path] = WrittenShard(path, broken=broken)
        elif tf.io.gfile.exists(path):
            size = tf.io.gfile.stat(path).length
            whole = size == sizes.get(os.path.basename(path)) if sizes else _records(path) == last - first
            kept |= {path: WrittenShard(path, broken=broken)} if whole else {}
    return kept


def _records(path):
    """Number of records in a shard; -1 if it is damaged. A killed run with --skip_broken may have left out records."""
    try:
        return sum(1 for _ in tf.data.TFRecordDataset(path))
    except tf.errors.DataLossError:
        return -1


def _remove(path):
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


# === Messages about items ===


def _tell_broken(conversion, path, messages):
    """Names the items that cannot be converted. Raises InputError unless they may be left out and others remain."""
    if not messages:
        return
    if len(messages) == 1 and not conversion.skip_broken:
        raise InputError(messages[0])
    total = len(conversion.items)
    line = name_broken(path, messages, f"{len(messages)} of {total} {conversion.unit}s")
    if not conversion.skip_broken:
        raise InputError(f"{line}; mend them and repeat the command, or leave them out with --skip_broken")
    if len(messages) == total:
        raise InputError(f"{line}; none is left")
    show.say(f"{line}; they are left out", error=True)


def _tell_remarks(remarks):
    """Prints remarks (text, photo, counts): each text once, with its first photo and the number of other photos.

    Counts are summed over the photos, and the text has a replacement field for each sum.
    """
    photos = collections.defaultdict(list)
    for text, path, counts in sorted(remarks):
        photos[text].append((path, counts))
    for text, rows in photos.items():
        (first, counts), others = rows[0], len(rows) - 1
        more = f"; so for {show.counted(others, 'other photo')}" if others else ""
        if counts:
            text = text.format(*map(sum, zip(*(counts for _, counts in rows))))
            more = f" (all in all, in {len(rows)} photos)" if others else ""
        show.say(f"{first}: {text}{more}", error=True)


# === Shards ===


def _write_shards(conversion, todo, bar):
    """The `WrittenShard`s of shards, written one after the other.

    Args:
        conversion: `Conversion`.
        todo: dict from the shards' paths to (first record, last record + 1).
        bar: progress bar to update.
    """
    items = conversion.permuted()
    with concurrent.futures.ThreadPoolExecutor(conversion.workers or os.cpu_count()) as pool:
        return [_write_items(conversion, path, items[slice(*ends)], pool=pool, bar=bar) for path, ends in todo.items()]


class _Incomplete(Exception):
    """A shard lacks items that it must have."""


def _write_items(conversion, path, items, *, pool, bar):
    """Writes items as one shard, which appears only when it is complete. Returns its `WrittenShard`.

    Args:
        conversion: `Conversion` with `encode` and `skip_broken`. With `skip_broken`, the shard is written without its
            broken items, unless all are broken.
        path: path of the shard.
        items: items of the shard.
        pool: thread pool that encodes them.
        bar: progress bar to update.
    """
    broken, remarks = [], []

    def records():
        for position, (record, notes) in enumerate(_in_order(pool, conversion.encode, items)):
            if record is None:
                broken.append((position, notes))
            else:
                yield record
                remarks.extend((text, str(items[position]["photo"]), list(counts)) for text, counts in notes)
            bar.update()
        if broken and not (conversion.skip_broken and len(broken) < len(items)):
            raise _Incomplete

    size, digest = 0, ""
    with contextlib.suppress(_Incomplete):
        tfrecord.write_shard(path, records())
        size, digest = file_digest(path)
    return WrittenShard(path, size, digest, broken=broken, remarks=remarks)


def _in_order(pool, encode, items):
    """Yields `_encoded` of each item, in order. A few items are in progress at a time."""
    items, waiting = iter(items), collections.deque()
    try:
        while True:
            new = itertools.islice(items, AHEAD - len(waiting))
            waiting.extend(pool.submit(_encoded, encode, item) for item in new)
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _encoded(encode, item):
    """(record, remarks) of an item, or (None, error message)."""
    try:
        fields, remarks = encode(item)
        return tfrecord.encode_example(fields), remarks
    except Exception as error:  # an exception of any library means that the image is broken
        odd = f"it or its labels cannot be converted ({type(error).__name__}: {first_line(error)})"
        return None, str(error) if isinstance(error, InputError) else f"{item.get('photo', 'a pair')}: {odd}"
