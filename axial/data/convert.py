"""Turns a list of annotated photos into the shards of a split.

The records have a random order, the same in every run. The photos are converted in parallel. A run that was killed can
be resumed. Every run writes the same bytes. A shard is converted again if the size or the time of one of its photos or
label files has changed since.

A broken photo or label file does not stop the conversion. All of them are named at its end. Without `skip_broken` their
shards are missing then, and the next run converts these alone. With it their items have no record, and the manifest
lists them. Such a shard of a run that was killed is converted again: a hidden file beside it says so.

Each data set provides a list of items; everything else is here. An item is a dict:

    photo       path of the photo
    name        of the photo in its split, where that has folders; by default the file name
    id          the data set's number of the photo, an integer
    class       class index of the photo, for classification; or
    objects     function of the photo's size (width, height) that returns the fields 'box/' of a record that has boxes
                alone; or
    labels      function without arguments that reads its `Labels`; None for a photo without labels
    label_files paths of the files that `labels` reads; optional
    boxes       function like `objects`, of a record that has labels too; optional
    stored      True if the labels are of the photo as it is stored, not turned upright; see `files.photo_fields`
    read        if the photo is not a file of its own: function that reads its bytes and `Labels`, or None for these

The items of sentence pairs are those of `text.pair_items`.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import time

import msgspec
import tensorflow as tf

from axial.data import labels, tfrecord
from axial.data.files import names_in, photo_fields
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.io import gfile, schemas, show
from axial.io.images import PERCENTILES
from axial.io.lock import locked
from axial.io.read import LARGEST_TEXT, convert, first_line, read_file, read_json
from axial.io.write import cache_dir, file_digest, make_folder, name_broken, output_file, write_json

PHOTOS_A_SHARD = 512  # about 100 MB of COCO's photos
REMARK = "remark: "  # before one on a photo, among the names of stages
PERMUTATION = 5  # seed of the order of the records; see `tfrecord.item_numbers`


def convert_split(
    items,
    encode,
    spec,
    split,
    *,
    output_dir,
    source,
    shards=None,
    workers=None,
    unit="photo",
    progress=True,
    write=None,
    skip_broken=False,
):
    """Writes items as a split of TFRecords. Shards that a killed run has finished are kept and used.

    Args:
        items: sequence of items.
        encode: `encode_item`, or a function like it.
        spec: `DatasetSpec`.
        split: name of the split.
        output_dir: folder, made if it is missing.
        source: bytes that identify the input, so that two inputs are never mixed.
        shards: number of files; one for each 512 items by default.
        workers: number of threads; one for each core by default.
        unit: what an item is, for the bar.
        progress: whether to show a bar.
        write: function that writes shards: of a dict from their paths to the first record and the one after the last,
            of `source`, of the records' `permutation`, of `skip_broken` and of the bar. It returns the seconds of each
            stage, a dict from paths to sizes and digests of those shards that it knows, and a dict from paths to the
            broken items of `write_items`. By default this process writes them; `beam.shard_writer` is the other one.
        skip_broken: whether to leave out items that cannot be read.

    Returns:
        The manifest, and a dict: 'photos' is how many photos this call converted, 'seconds' is its time, and 'stages'
        has the seconds of each stage, summed over all threads.

    Raises:
        InputError: the folder holds a split of this name that was made from other input or with other `shards`; an item
            that cannot be read, or with `skip_broken` none that can be.
    """
    make_folder(output_dir)
    manifest_path, plan_path, list_path = (
        output_file(output_dir, name, "--split") for name in (f"{split}.json", f".{split}.plan", f"{split}.broken.txt")
    )
    _remove(list_path)
    earlier = _earlier(manifest_path, plan_path)
    permutation = earlier.permutation if earlier else PERMUTATION  # a split of an older version keeps its order
    if isinstance(spec, DatasetSpec):  # and its levels
        levels = earlier.spec.levels if isinstance(earlier, schemas.Manifest) else PERCENTILES
        spec = dataclasses.replace(spec, levels=levels)
    order = tfrecord.item_numbers(len(items), permutation)
    items = [items[number] for number in order]
    shards = min(shards or -(-len(items) // PHOTOS_A_SHARD), len(items))
    bounds = [len(items) * i // shards for i in range(shards + 1)]
    names = [output_file(output_dir, tfrecord.shard_name(split, i, shards), "--split") for i in range(shards)]
    parts = dict(zip(names, itertools.pairwise(bounds)))
    plan = {
        "format": 1,
        "spec": spec.to_json(),
        "split": split,
        "examples": len(items),
        "source": _identity(source, shards, permutation),
        "stamps": [_stamp(items[first:last]) for first, last in parts.values()],
        "labels": next((name for name in ("text", "class", "objects") if name in items[0]), "panoptic"),
        "permutation": permutation,
    }
    reasons = dict(earlier.left_out) if isinstance(earlier, schemas.Manifest) else {}
    broken = {
        path: [(place, reasons[n]) for place, n in enumerate(order[first:last].tolist()) if n in reasons]
        for path, (first, last) in parts.items()
    }
    again = set() if isinstance(earlier, schemas.Manifest) else _marks(parts)
    # Without the flag every item has a record.
    wanted = {path: last - first - len(broken[path]) for path, (first, last) in parts.items()}
    wanted = {p: n for p, n in wanted.items() if (skip_broken or not broken[p]) and _mark(p) not in again}
    manifest, kept = _kept(earlier, list(parts), plan, wanted=wanted, manifest_path=manifest_path, plan_path=plan_path)
    todo = {path: part for path, part in parts.items() if path not in kept}
    converted = sum(last - first for first, last in todo.values())
    stages, digests, start = {}, {}, time.perf_counter()
    with show.progress(None, split, total=len(items), unit=unit, disable=not progress, mininterval=0.5) as bar:
        bar.update(len(items) - converted)
        if todo:
            write = write or functools.partial(_write_here, items, encode, workers)
            stages, digests, found = write(
                todo, source=source, permutation=permutation, skip_broken=skip_broken, bar=bar
            )
            broken.update({path: found.get(path, []) for path in todo})
    stages = _tell_remarks(stages)
    left_out = sorted(
        (int(order[parts[path][0] + place]), message) for path, rows in broken.items() for place, message in rows
    )
    _tell(left_out, len(items), unit, path=list_path, skip_broken=skip_broken)
    if converted or not manifest:
        records = {path: last - first - len(broken[path]) for path, (first, last) in parts.items()}
        found = {path: digests.get(path) or file_digest(path) for path in parts if records[path]}
        sizes = [[os.path.basename(path), records[path], size] for path, (size, _) in found.items()]
        manifest = {**plan, "shards": sizes, "hashes": [digest for _, digest in found.values()]}
        if left_out:
            manifest |= {"examples": len(items) - len(left_out), "left_out": [list(row) for row in left_out]}
        write_json(manifest_path, manifest)
    else:
        manifest = msgspec.to_builtins(manifest)
    for path in (plan_path, *_marks(parts)):
        _remove(path)
    seconds = time.perf_counter() - start
    return manifest, {"photos": converted, "seconds": seconds, "stages": stages}


def convert_sample(name, splits, listing, spec):
    """Folder of photos that ship with axial as TFRecords, in the user's cache. They are converted at first use.

    Args:
        name: of the folder.
        splits: names.
        listing: function of a split that returns its items and the bytes of their source.
        spec: `DatasetSpec`.
    """
    path = os.path.join(cache_dir(), name)
    with locked(path):
        for split in splits:
            items, source = listing(split)
            convert_split(items, encode_item, spec, split, output_dir=path, source=source, progress=False)
    return path


def of_stored_pixels(listing):
    """What a function that lists items returns, for labels that are of the photos as they are stored."""
    items, source = listing()
    return [{**item, "stored": True} for item in items], source + b" labels of stored pixels"


def permuted(items, permutation):
    """The items in the order of their records; see `tfrecord.item_numbers`."""
    return [items[number] for number in tfrecord.item_numbers(len(items), permutation)]


def _tell(left_out, total, unit, *, path, skip_broken):
    """Names the items that cannot be converted. Raises InputError unless they may be left out and others are whole."""
    messages = [message for _, message in left_out]
    if not messages:
        return
    if len(messages) == 1 and not skip_broken:
        raise InputError(messages[0])
    line = name_broken(path, messages, f"{len(messages)} of {total} {unit}s")
    if not skip_broken:
        raise InputError(f"{line}; mend them and repeat the command, or leave them out with --skip_broken")
    if len(messages) == total:
        raise InputError(f"{line}; none is left")
    show.say(f"{line}; they are left out", error=True)


def _tell_remarks(stages):
    """The seconds of the stages. Says the remarks of `encode_item` that are among them, of a kind once."""
    photos = collections.defaultdict(list)
    for name in sorted(name for name in stages if name.startswith(REMARK)):
        text, _, path = name.removeprefix(REMARK).partition("\n")
        photos[text].append(path)
    for text, paths in photos.items():
        more = f"; so for {show.counted(len(paths) - 1, 'other photo')}" if len(paths) > 1 else ""
        show.say(f"{paths[0]}: {text}{more}", error=True)
    return {name: seconds for name, seconds in stages.items() if not name.startswith(REMARK)}


def _remove(path):
    if tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


def _mark(path):
    """Path of the hidden file that says that a shard lacks items, until there is a manifest."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.broken")


def _marks(parts):
    """Paths of those hidden files of some shards that are there, by one request."""
    there = set(names_in(os.path.dirname(next(iter(parts)))))
    return {file for file in map(_mark, parts) if os.path.basename(file) in there}


def _identity(source, shards, permutation):
    """The manifest's 'source': it differs if the input, the number of shards or the order of the records differ."""
    order = "" if permutation is None else f" permuted by {permutation}"
    return hashlib.sha256(source + f"{shards}{order}".encode()).hexdigest()


def _stamp(items):
    """A hash of the sizes and times of the items' files, of those that are local."""
    digest = hashlib.sha256()
    own = [item for item in items if "photo" in item and "read" not in item]
    files = [path for item in own for path in (item["photo"], *item.get("label_files", ()))]
    for path in files:
        with contextlib.suppress(OSError):  # `encode_item` names a missing file
            status = os.stat(path)
            digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _earlier(manifest_path, plan_path):
    """The `schemas.Manifest` of a finished run, the `schemas.Plan` of one that has written shards, or None."""
    if tf.io.gfile.exists(manifest_path):
        return read_json(manifest_path, schemas.Manifest, LARGEST_TEXT)[1]
    if _shards_of(manifest_path) and tf.io.gfile.exists(plan_path):
        return read_json(plan_path, schemas.Plan, LARGEST_TEXT)[1]
    return None


def _shards_of(manifest_path):
    """Paths of all shards of a split that are there."""
    return gfile.glob(manifest_path.removesuffix(".json"), "-?????-of-?????.tfrecord")


def _kept(found, paths, plan, *, wanted, manifest_path, plan_path):
    """The manifest of an earlier run, if that was finished, and the shards that can be kept.

    Without a manifest, this removes the shards that cannot be kept and writes the plan.

    Args:
        found: of `_earlier`.
        paths: of the shards.
        plan: dict of this run's plan.
        wanted: dict from the paths of shards that may be kept to their records. Without one there is no file.
        manifest_path, plan_path: of the split's files.

    Raises:
        InputError: the earlier run had other input.
    """
    finished = isinstance(found, schemas.Manifest)
    if found:
        path = manifest_path if finished else plan_path
        expected = convert(f"{path}: ", plan, schemas.Plan)
        same = ("spec", "split", "source", "labels")
        examples = found.examples + (len(found.left_out) if finished else 0)
        if examples != expected.examples or any(getattr(found, field) != getattr(expected, field) for field in same):
            raise InputError(
                f"{path}: this folder holds {plan['split']!r} made from other input or with other "
                "--shards; choose another --output_dir or delete its files"
            )
    stamps = dict(zip(paths, found.stamps)) if found else {}
    sizes = {name: size for name, _, size in found.shards} if finished else {}
    kept = [
        path
        for path, stamp in zip(paths, plan["stamps"])
        if found
        and path in wanted
        and stamps.get(path, stamp) == stamp
        and (not wanted[path] or tf.io.gfile.exists(path))
        and (not finished or not wanted[path] or sizes.get(os.path.basename(path)) == tf.io.gfile.stat(path).length)
    ]
    if not finished:
        for path in set(_shards_of(manifest_path)) - set(kept):
            tf.io.gfile.remove(path)
        write_json(plan_path, plan)
    return (found if finished else None), kept


def _write_here(items, encode, workers, todo, *, source, permutation, skip_broken, bar):
    """Writes shards of permuted items one after the other; see `convert_split`. `source` is not needed here."""
    stages, broken = collections.Counter(), {}
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for path, (first, last) in todo.items():
            seconds, broken[path] = write_items(path, items[first:last], encode, pool, skip_broken=skip_broken, bar=bar)
            stages.update(seconds)
    return dict(stages), {}, broken


class _Incomplete(Exception):
    """A shard lacks items that it must have."""


def write_items(path, items, encode, pool, *, skip_broken=False, bar=None):
    """Writes items as one shard, which appears when it is whole.

    Args:
        path: of the shard.
        items, encode: see `convert_split`.
        pool: of the threads that encode.
        skip_broken: whether the shard appears without its broken items. Without any item it never does.
        bar: that is updated; None for none.

    Returns:
        Counter of the seconds of each stage, summed over all threads, and a list of (place, message) of the items that
        are broken.
    """
    stages, broken = collections.Counter(), []
    _remove(_mark(path))

    def records():
        yield from _encoded(pool, encode, items, stages=stages, broken=broken, bar=bar)
        if broken and not (skip_broken and len(broken) < len(items)):
            raise _Incomplete
        if broken:  # before the shard has its name
            write_json(_mark(path), broken)

    with contextlib.suppress(_Incomplete):
        tfrecord.write_shard(path, records())
    return stages, broken


def _encoded(pool, encode, items, *, stages, broken, bar):
    """Yields the records of the items in their order. At most 64 items are in progress at a time.

    An item that cannot be encoded has no record, but its place and the message in the list `broken`.
    """
    items, waiting = iter(items), collections.deque()
    try:
        for place in itertools.count():
            waiting.extend((item, pool.submit(encode, item)) for item in itertools.islice(items, 64 - len(waiting)))
            if not waiting:
                return
            item, future = waiting.popleft()
            try:
                fields, seconds = future.result()
            except Exception as error:  # whatever a library raises for an image is of this image
                odd = f"it or its labels cannot be converted ({type(error).__name__}: {first_line(error)})"
                told = str(error) if isinstance(error, InputError) else f"{item.get('photo', 'a pair')}: {odd}"
                broken.append((place, told))
                continue
            finally:
                if bar is not None:
                    bar.update()
            stages.update(seconds)
            start = time.perf_counter()
            yield tfrecord.encode_example(fields)
            stages["write"] += time.perf_counter() - start  # the consumer has written the record by now
    finally:
        for _, future in waiting:
            future.cancel()


def encode_item(item):
    """The fields of one item's record (see `tfrecord`), and the seconds of each stage. Of no second are the remarks.

    Raises:
        InputError: a photo or label image that is missing, damaged or of another size; labels that the spec does not
            have. The message names the file.
    """
    seconds, last = {}, time.perf_counter()

    def lap(stage):
        nonlocal last
        now = time.perf_counter()
        seconds[stage], last = seconds.get(stage, 0.0) + now - last, now

    path = item["photo"]
    if "read" in item:
        photo, found = item["read"]()
    else:
        photo, found = read_file(path), None
        lap("read the photo")
    if item.get("labels"):
        found = item["labels"]()
        lap("read the labels")
    size, remarks = found.size if found else None, []
    fields = photo_fields(path, photo, size, item.get("stored", False), remarks=remarks)
    seconds |= {f"{REMARK}{text}\n{path}": 0.0 for text in remarks}
    size = fields["image/width"], fields["image/height"]
    fields |= {"image/file_name": item.get("name", os.path.basename(path)), "image/id": item["id"]}
    lap("decode the photo")
    if "class" in item:
        fields["image/class"] = item["class"]
    elif "objects" in item:
        fields |= item["objects"](size)
        lap("read the boxes")
    else:
        fields |= _segments(found or labels.blank(size)) | (item["boxes"](size) if "boxes" in item else {})
        lap("read the labels")
    return fields, seconds


def _segments(found):
    """The fields of a record that hold its `Labels`."""
    ids, classes, crowd = zip(*found.segments) if found.segments else ((), (), ())
    return {"panoptic/encoded": found.png, "segment/id": ids, "segment/class": classes, "segment/crowd": crowd}
