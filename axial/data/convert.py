"""Turns a list of annotated photos into the shards of a split.

The records have a random order, the same in every run. The photos are converted in parallel. A run that was killed can
be resumed. Every run writes the same bytes. A shard is converted again if the size or the time of one of its photos or
label files has changed since.

A broken photo or label file does not stop the conversion. All of them are named at its end. Without `skip_broken` their
shards are missing then, and the next run converts these alone. With it their items have no record, and the manifest
lists them. Such a shard of a run that was killed is converted again.

Each data set provides a list of items; everything else is here. An item is a dict:

    photo       path of the photo
    name        of the photo in its split, where that has folders; by default the file name
    id          the data set's number of the photo, an integer
    class       class index of the photo, for classification; or
    labels      function without arguments that reads its `Labels`; None for a photo without labels
    label_files paths of the files that `labels` reads; optional
    boxes       function of the photo's size (width, height) that returns the fields 'box/' of the record; optional
    stored      True if the labels are of the photo as it is stored, not turned upright; see `files.photo_fields`
    read        if the photo is not a file of its own: function that reads its bytes and `Labels`, or None for these

The items of sentence pairs are those of `text.pair_items`.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
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
from axial.io.schemas import Count, Strict
from axial.io.write import file_digest, make_folder, name_broken, output_file, write_json

PHOTOS_A_SHARD = 512  # about 100 MB of COCO's photos
PERMUTATION = 5  # seed of the order of the records; see `tfrecord.item_numbers`
AHEAD = 64  # items in progress at a time


class WrittenShard(Strict):
    """What a worker says of a shard. One without a file has no digest.

    Broken items are (place in the shard, what is wrong), remarks (text, photo). After an `error` the job ends.
    """

    path: str
    size: Count = 0
    digest: str = ""
    seconds: dict[str, float] = {}
    error: str = ""
    broken: list[tuple[Count, str]] = []
    remarks: list[tuple[str, str]] = []


def encode_item(item):
    """The fields of one item's record (see `tfrecord`), the seconds of each stage, and remarks on the photo.

    Raises:
        InputError: a photo or label image that is missing, damaged or of another size; labels that the spec does not
            have. The message names the file.
    """
    seconds, last = collections.Counter(), time.perf_counter()

    def lap(stage):
        nonlocal last
        now = time.perf_counter()
        seconds[stage] += now - last
        last = now

    path, found = item["photo"], None
    if "read" in item:
        photo, found = item["read"]()
    else:
        photo = read_file(path)
        lap("read the photo")
    if item.get("labels"):
        found = item["labels"]()
        lap("read the labels")
    fields, remarks = photo_fields(path, photo, found.size if found else None, item.get("stored", False))
    size = fields["image/width"], fields["image/height"]
    fields |= {"image/file_name": item.get("name", os.path.basename(path)), "image/id": item["id"]}
    lap("decode the photo")
    if "class" in item:
        fields["image/class"] = item["class"]
    else:
        found = found or labels.blank(size)
        ids, classes, crowd = zip(*found.segments) if found.segments else ((), (), ())
        fields |= {"panoptic/encoded": found.png, "segment/id": ids, "segment/class": classes, "segment/crowd": crowd}
        fields |= item["boxes"](size) if "boxes" in item else {}
    lap("read the labels")
    return fields, seconds, remarks


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A split that is converted, and how.

    Attributes:
        items: sequence of items.
        source: bytes that identify the input, so that two inputs are never mixed.
        spec: `DatasetSpec` or `TextSpec`.
        split: name of the split.
        output_dir: folder, made if it is missing.
        workers: number of threads; one for each core by default.
        skip_broken: whether to leave out items that cannot be read.
        shards: number of files; one for each 512 items by default.
        encode: `encode_item`, or a function like it.
        unit: what an item is, for the bar.
        progress: whether to show a bar.
        permutation: seed of the order of the records; `convert_split` sets it.
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
        """The path of a file of the split."""
        return output_file(self.output_dir, name, "--split")

    @property
    def manifest(self):
        return self.path(f"{self.split}.json")

    @property
    def plan(self):
        """The path of what is there of a manifest while the split is converted."""
        return self.path(f".{self.split}.plan")

    def permuted(self):
        """The items in the order of their records; see `tfrecord.item_numbers`."""
        return [self.items[number] for number in tfrecord.item_numbers(len(self.items), self.permutation)]

    def bounds(self):
        """dict from the paths of the shards to the first record and the one after the last."""
        total = len(self.items)
        shards = min(self.shards or -(-total // PHOTOS_A_SHARD), total)
        names = [self.path(tfrecord.shard_name(self.split, i, shards)) for i in range(shards)]
        return dict(zip(names, itertools.pairwise(total * i // shards for i in range(shards + 1))))

    def shards_there(self):
        """Paths of all shards of the split that are there, of any number of shards."""
        return gfile.glob(self.manifest.removesuffix(".json"), "-?????-of-?????.tfrecord")


def convert_split(conversion, write=None):
    """Writes items as a split of TFRecords. Shards that a killed run has finished are kept and used.

    Args:
        conversion: `Conversion`.
        write: function that writes shards: of the conversion, of a dict from their paths to the first record and the
            one after the last, and of the bar. It returns a `WrittenShard` for each. By default this process
            writes them; `beam.shard_writer` is the other one.

    Returns:
        The manifest, and a dict: 'photos' is how many photos this call converted, 'seconds' is its time, and 'stages'
        has the seconds of each stage, summed over all threads.

    Raises:
        InputError: no items; the folder holds a split of this name that was made from other input or with other
            `shards`; an item that cannot be read, or with `skip_broken` none that can be.
    """
    if not conversion.items:
        raise InputError(f"--split={conversion.split}: no {conversion.unit} is in this split")
    make_folder(conversion.output_dir)
    listed = conversion.path(f"{conversion.split}.broken.txt")
    _remove(listed)
    earlier = _earlier(conversion)
    finished = bool(earlier and earlier.shards)
    if earlier:  # a split of an older version keeps its order
        conversion = dataclasses.replace(conversion, permutation=earlier.permutation)
    if isinstance(conversion.spec, DatasetSpec):  # and its levels
        levels = earlier.spec.levels if finished else PERCENTILES
        conversion = dataclasses.replace(conversion, spec=dataclasses.replace(conversion.spec, levels=levels))
    bounds, plan, total = conversion.bounds(), _plan(conversion), len(conversion.items)
    order = tfrecord.item_numbers(total, conversion.permutation).tolist()
    kept = _kept(conversion, earlier, plan, order)
    if not finished:
        for path in set(conversion.shards_there()) - set(kept):
            tf.io.gfile.remove(path)
        write_json(conversion.plan, plan)
    todo = {path: part for path, part in bounds.items() if path not in kept}
    converted, start, written = sum(last - first for first, last in todo.values()), time.perf_counter(), []
    with show.progress(
        None, conversion.split, total=total, unit=conversion.unit, disable=not conversion.progress
    ) as bar:
        bar.update(total - converted)
        if todo:
            written = (write or _write_here)(conversion, todo, bar)
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
    stages = sum((collections.Counter(row.seconds) for row in written), collections.Counter())
    return manifest, {"photos": converted, "seconds": time.perf_counter() - start, "stages": stages}


def _digest(row):
    """Bytes and SHA-256 of a `WrittenShard`."""
    return (row.size, row.digest) if row.digest else file_digest(row.path)


def convert_sample(name, splits, listing, spec):
    """Folder of photos that ship with axial as TFRecords, in the user's cache. They are converted at first use.

    Args:
        name: of the folder.
        splits: names.
        listing: function of a split that returns its items and the bytes of their source.
        spec: `DatasetSpec`.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(cache, "axial", name)
    with locked(path):
        for split in splits:
            convert_split(Conversion(*listing(split), spec, split, path, progress=False))
    return path


def of_stored_pixels(listing):
    """What a function that lists items returns, for labels that are of the photos as they are stored."""
    items, source = listing()
    return [{**item, "stored": True} for item in items], source + b" labels of stored pixels"


# === What is kept of an earlier run ===


def _earlier(conversion):
    """The `tfrecord.Manifest` of a finished run, the `tfrecord.Plan` of one that has written shards, or None."""
    for path, schema in ((conversion.manifest, tfrecord.Manifest), (conversion.plan, tfrecord.Plan)):
        if tf.io.gfile.exists(path):
            return read_json(path, schema, LARGEST_TEXT)[1] if conversion.shards_there() else None
    return None


def _plan(conversion):
    """dict of a `tfrecord.Plan`. Its 'source' differs if the input, the number of shards or their order differ."""
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
    """A hash of the sizes and times of the items' files, of those that are local."""
    digest = hashlib.sha256()
    for item in items:
        files = [item["photo"], *item.get("label_files", ())] if "photo" in item and "read" not in item else []
        for path in files:
            with contextlib.suppress(OSError):  # `encode_item` names a missing file
                status = os.stat(path)
                digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _kept(conversion, earlier, plan, order):
    """dict from the shards of an earlier run that are used again to a `WrittenShard`, without its bytes.

    Args:
        conversion: `Conversion`.
        earlier: of `_earlier`.
        plan: dict of this run's plan.
        order: list of the items' numbers, in the order of their records.

    Raises:
        InputError: the earlier run had other input.
    """
    if not earlier:
        return {}
    path = conversion.manifest if earlier.shards else conversion.plan
    now, reasons = convert(f"{path}: ", plan, tfrecord.Plan), dict(earlier.left_out)
    same = (earlier.spec, earlier.split, earlier.source, earlier.labels) == (
        now.spec,
        now.split,
        now.source,
        now.labels,
    )
    if not same or earlier.examples + len(reasons) != now.examples:
        raise InputError(
            f"{path}: this folder holds {conversion.split!r} made from other input or with other "
            "--shards; choose another --output_dir or delete its files"
        )
    sizes, kept = {name: size for name, _, size in earlier.shards}, {}
    for i, (path, (first, last)) in enumerate(conversion.bounds().items()):
        broken = [(place, reasons[n]) for place, n in enumerate(order[first:last]) if n in reasons]
        unchanged = not earlier.stamps or earlier.stamps[i] == now.stamps[i]  # an older version wrote none
        if not unchanged or (broken and not conversion.skip_broken):
            continue
        if len(broken) == last - first:  # there is no file
            kept[path] = WrittenShard(path, broken=broken)
        elif tf.io.gfile.exists(path):
            size = tf.io.gfile.stat(path).length
            whole = size == sizes.get(os.path.basename(path)) if sizes else _records(path) == last - first
            kept |= {path: WrittenShard(path, broken=broken)} if whole else {}
    return kept


def _records(path):
    """How many records a shard has, -1 if it is damaged. A killed run with --skip_broken may have left some out."""
    try:
        return sum(1 for _ in tf.data.TFRecordDataset(path))
    except tf.errors.DataLossError:
        return -1


def _remove(path):
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


# === What is said of items ===


def _tell_broken(conversion, path, messages):
    """Names the items that cannot be converted. Raises InputError unless they may be left out and others are whole."""
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
    """Says remarks (text, photo), of a text once."""
    photos = collections.defaultdict(list)
    for text, path in sorted(remarks):
        photos[text].append(path)
    for text, (first, *others) in photos.items():
        more = f"; so for {show.counted(len(others), 'other photo')}" if others else ""
        show.say(f"{first}: {text}{more}", error=True)


# === Shards ===


def _write_here(conversion, todo, bar):
    """Writes shards one after the other; see `convert_split`."""
    items = conversion.permuted()
    with concurrent.futures.ThreadPoolExecutor(conversion.workers or os.cpu_count()) as pool:
        return [write_items(conversion, path, items[slice(*part)], pool, bar=bar) for path, part in todo.items()]


class _Incomplete(Exception):
    """A shard lacks items that it must have."""


def write_items(conversion, path, items, pool, *, bar=None):
    """Writes items as one shard, which appears when it is whole. Returns its `WrittenShard`.

    Args:
        conversion: `Conversion`, of its `encode` and `skip_broken`. With the latter the shard appears without its
            broken items. Without any item it never does.
        path: of the shard.
        items: of the shard.
        pool: of the threads that encode.
        bar: that is updated; None for none.
    """
    stages, broken, remarks = collections.Counter(), [], []

    def records():
        for place, (record, seconds, said) in enumerate(_in_order(pool, conversion.encode, items)):
            if record is None:
                broken.append((place, said))
            else:
                start = time.perf_counter()
                yield record
                stages["write"] += time.perf_counter() - start  # the consumer has written the record by now
                stages.update(seconds)
                remarks.extend((text, str(items[place]["photo"])) for text in said)
            if bar is not None:
                bar.update()
        if broken and not (conversion.skip_broken and len(broken) < len(items)):
            raise _Incomplete

    size, digest = 0, ""
    with contextlib.suppress(_Incomplete):
        tfrecord.write_shard(path, records())
        size, digest = file_digest(path)
    return WrittenShard(path, size, digest, dict(stages), broken=broken, remarks=remarks)


def _in_order(pool, encode, items):
    """Yields what `_encoded` makes of each item, in their order. A few items are in progress at a time."""
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
    """(the record, seconds of each stage, remarks) of an item, or (None, {}, what is wrong with it)."""
    try:
        fields, seconds, remarks = encode(item)
        return tfrecord.encode_example(fields), seconds, remarks
    except Exception as error:  # whatever a library raises for an image is of this image
        odd = f"it or its labels cannot be converted ({type(error).__name__}: {first_line(error)})"
        return None, {}, str(error) if isinstance(error, InputError) else f"{item.get('photo', 'a pair')}: {odd}"
