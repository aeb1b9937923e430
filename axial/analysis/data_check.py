"""Checks a converted data set before training and reports what is wrong with it."""

import collections
import dataclasses
import hashlib
import io
import itertools
import os

import numpy as np
import tensorflow as tf
from PIL import Image
from scipy.ndimage import label

from axial.data import tfrecord
from axial.data.decode import orientation
from axial.data.files import reason_of
from axial.data.labels import numbered
from axial.data.streams import decode_photo, record_fault
from axial.io import page as pages
from axial.io.check import shortened
from axial.io.show import Html, counted, html, print_table, progress
from axial.io.write import file_digest
from axial.tasks.segmentation.drawing import overlay

TINY = 16  # pixels
# Findings that make a record useless. All other findings may be intended.
ERRORS = ("unreadable", "unknown id", "segment without pixels", "no label")
VOID = (255, 65535)  # numbers that many programs write for "no object"


@dataclasses.dataclass
class SplitCheck:
    """What the check of one split found.

    Attributes:
        split: its name.
        spec: `DatasetSpec` or `TextSpec`.
        labels: what its records hold; see `tfrecord.SCHEMAS`.
        photos: number of records.
        findings: list of (kind, photo, detail).
        photos_of: int [classes], in how many photos each class occurs. Pairs of sentences have no classes.
        segments_of: int [classes], how many segments or objects it has there; zeros for labels of whole photos.
        pixels_of: int [classes], how many pixels it has; zeros but for 'panoptic' labels.
        unlabelled: share of pixels without a label; None but for 'panoptic' labels.
        hashes: dict from a digest of the encoded photo to its name.
        sample: random photos, with their segments painted if they have some, (name, uint8 [h, w, 3]).
        sizes: (height, width) of each photo without an error that has 'panoptic' labels.
        objects: for each of these photos the sides of its things in pixels, the roots of their areas.
        numbers: how many of these photos have 'things', a 'crowd', objects in pieces but no two of a class ('joined'),
            and an object whose number is one of `VOID` without one before it.
    """

    split: str
    spec: object
    labels: str
    photos: int = 0
    findings: list = dataclasses.field(default_factory=list)
    photos_of: np.ndarray = None
    segments_of: np.ndarray = None
    pixels_of: np.ndarray = None
    unlabelled: float | None = None
    hashes: dict = dataclasses.field(default_factory=dict)
    sample: list = dataclasses.field(default_factory=list)
    sizes: list = dataclasses.field(default_factory=list)
    objects: list = dataclasses.field(default_factory=list)
    numbers: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    @property
    def class_names(self):
        return () if self.labels == "text" else self.spec.class_names

    @property
    def unit(self):
        return "sentence pair" if self.labels == "text" else "photo"

    @property
    def title(self):
        what = counted(self.photos, self.unit)
        things = "" if self.labels != "panoptic" or any(self.spec.things) else ", no class is a thing"
        return (
            what if self.unlabelled is None else f"{what}, {100 * self.unlabelled:.1f} % of pixels unlabelled{things}"
        )

    def add(self, kind, photo, detail):
        self.findings.append((kind, photo, detail))

    def counts(self):
        """dict from kinds to their numbers, errors first."""
        counts = collections.Counter(kind for kind, *_ in self.findings)
        return dict(sorted(counts.items(), key=lambda item: (item[0] not in ERRORS, -item[1])))

    def errors(self):
        return sum(number for kind, number in self.counts().items() if kind in ERRORS)


def check_split(data_dir, split, sample=20, seed=0):
    """The `SplitCheck` of one split; reads every record, one at a time.

    Args:
        data_dir, split: of a converted data set.
        sample: how many random photos are drawn with their labels.
        seed: seed that selects these photos.

    Raises:
        InputError: there is no such split, or a shard is missing or cut short.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    report = SplitCheck(split, manifest["spec"], manifest["labels"])
    report.photos_of, report.segments_of, report.pixels_of = np.zeros([3, len(report.class_names)], np.int64)
    drawn = np.random.default_rng(seed).choice(manifest["examples"], min(sample, manifest["examples"]), replace=False)
    chosen, void, pixels = set(drawn.tolist()), 0, 0
    with progress(None, f"check {split}", total=manifest["examples"], unit="record", leave=False) as bar:
        for (name, *_), digest in itertools.zip_longest(manifest["shards"], manifest["hashes"]):
            path = tfrecord.shard_path(data_dir, name)
            if digest and file_digest(path)[1] != digest:
                report.add("unreadable", name, "its bytes are not those that were written; convert again")
            for place, serialized in enumerate(_records(path, report)):
                number, report.photos = report.photos, report.photos + 1
                bar.update()
                where = f"{name}: record {place}"
                found = _check_record(serialized, report, where, number in chosen)
                void, pixels = void + found[0], pixels + found[1]
    if report.photos != manifest["examples"] and not report.errors():
        report.add("unreadable", split, f"{counted(report.photos, 'record')} where {manifest['examples']} were written")
    for index in np.flatnonzero(report.photos_of == 0):
        report.add("class never occurs", "", report.class_names[index])
    if report.labels == "panoptic":
        report.unlabelled = void / max(pixels, 1)
    if report.labels in tfrecord.WITH_OBJECTS and not report.segments_of.any() and not report.errors():
        report.add("no label", split, "no photo has a label; the split is for predictions, not for training")
    elif report.labels == "panoptic":
        for detail in _misnumbered(report):
            report.add("numbering?", split, detail)
    return report


def _misnumbered(report):
    """Yields what looks as if the numbers in label images were not those that the spec and the layout mean."""
    spec, never, void, found = report.spec, report.photos_of == 0, report.unlabelled, report.numbers
    first, last, things = min(spec.category_ids), max(spec.category_ids), found["things"]
    in_a_row = last - first + 1 == spec.num_classes
    last_is_lost = in_a_row and never[spec.class_index(last)] and void > 0.01
    if spec.ignored_ids and (last_is_lost or (never.mean() >= 0.5 and void > 0.25)):
        yield (
            f"{100 * void:.1f} % of the pixels are {shortened(spec.ignored_ids)}, which the spec ignores, and none is "
            f"{spec.class_names[never.argmax()]}; are label images numbered otherwise than the spec, {first} to {last}?"
        )
    if in_a_row and first == 0 and never[spec.class_index(0)]:
        yield "the class of the number 0 never occurs; are the label images numbered from 1?"
    if 0 < things == found["crowd"]:
        yield "each photo of things has a crowd, which is their number 0; are objects numbered from 0?"
    if 0 < things == found["joined"]:
        yield "no photo has two objects of a class, but some are in pieces; do all objects have one number?"
    for number in VOID:
        if 0 < things <= 2 * found[number]:
            yield f"{number} is an object in {counted(found[number], 'photo')}; does it stand for no object?"


def _records(path, report):
    """Yields the serialised records of a shard. It reports the first one that cannot be read, and stops there."""
    try:
        yield from tf.data.TFRecordDataset(path)
    except tf.errors.DataLossError as error:
        report.add("unreadable", os.path.basename(path), reason_of(error))


def _check_record(serialized, report, where, draw):
    """Adds one record to the report. Returns (pixels without a label, all pixels), zeros if it has no such labels."""
    if fault := record_fault(serialized.numpy(), report.spec, report.labels):
        report.add("unreadable", where, fault.lstrip(": "))
        return 0, 0
    record = tfrecord.parse_example(serialized, report.labels)
    if "image/encoded" not in record:
        return 0, 0
    name = record["image/file_name"].numpy().decode()
    digest = hashlib.sha256(record["image/encoded"].numpy()).digest()
    if digest in report.hashes:
        report.add("photo twice", name, f"the same file as {report.hashes[digest]}")
    report.hashes[digest] = name
    photo = decode_photo(record).numpy() if draw else None
    if report.labels == "panoptic":
        return _check_segments(record, report, name, photo)
    if draw:
        report.sample.append((name, photo))
    if "image/class" in record:
        report.photos_of[record["image/class"]] += 1
    else:
        report.photos_of[np.unique(record["box/class"])] += 1
        np.add.at(report.segments_of, record["box/class"], 1)
    return 0, 0


def _check_segments(record, report, name, photo):
    """Adds the segments of a record to the report; see `_check_record`. `photo` is None, or drawn with them."""
    _check_turn(record, report, name)
    ids = tfrecord.segment_ids(record["panoptic/encoded"]).numpy()
    known, classes, crowd = (record[f"segment/{key}"].numpy() for key in ("id", "class", "crowd"))
    for identity in np.setdiff1d(ids, [0, *known]):
        report.add("unknown id", name, f"{np.count_nonzero(ids == identity)} pixels of id {identity} have no segment")
    if not known.size:
        report.add("no segment", name, "the whole photo is unlabelled")
    segments = numbered(ids, known)
    areas = np.bincount(segments.ravel(), minlength=len(known) + 1)[1:]
    for identity, index, area in zip(known, classes, areas):
        if area < TINY:
            kind = "tiny segment" if area else "segment without pixels"
            report.add(kind, name, f"{report.class_names[index]}, id {identity}: {area} pixels")
    report.photos_of[np.unique(classes)] += 1
    np.add.at(report.segments_of, classes, 1)
    np.add.at(report.pixels_of, classes, areas)
    things = np.array(report.spec.things)[classes] & (crowd == 0)
    _count_numbers(report, segments, known, classes=classes, things=things)
    report.sizes.append(ids.shape)
    report.objects.append(np.sqrt(areas[things & (areas > 0)]))
    if photo is not None:
        report.sample.append((name, overlay(photo, segments, classes, report.spec)))
    return int((segments == 0).sum()), ids.size


def _count_numbers(report, segments, known, *, classes, things):
    """Adds a photo to the `numbers` of the report. `things` says which segments are objects, which crowds are not."""
    numbers, divisor = report.numbers, report.spec.label_divisor
    of_things = np.array(report.spec.things)[classes]
    numbers["things"] += of_things.any()
    numbers["crowd"] += (of_things & ~things).any()
    alone = np.flatnonzero(things) + 1 if len(set(classes[things])) == things.sum() else ()
    numbers["joined"] += any(label(segments == i, np.ones([3, 3]))[1] > 1 for i in alone)
    own = set(known[things & (known // divisor == classes + 1)] % divisor)
    for number in VOID:
        numbers[number] += number in own and number - 1 not in own


def _check_turn(record, report, name):
    """Counts a photo that the record turns, or does not turn though its EXIF tag says so."""
    way, tag = int(record["image/orientation"]), int(orientation(record["image/encoded"]))
    if way == 1 and tag > 1:
        report.add("lies as stored", name, f"EXIF orientation {tag}, which its labels do not follow")
    if way > 1:
        report.add("turned", name, f"EXIF orientation {way}")
    if way in (2, 3, 4) or (way > 4 and int(record["image/height"]) == int(record["image/width"])):
        report.add(
            "ambiguous turn", name, "its labels fit the stored pixels too; if they are of these, --labels=stored"
        )


def across_splits(reports):
    """Adds photos that occur in two splits to the report of the later one."""
    seen = {}
    for report in reports:
        for digest, name in report.hashes.items():
            if digest in seen:
                report.add("photo in two splits", name, f"the same file as {' '.join(seen[digest])}")
        seen.update({digest: (report.split, name) for digest, name in report.hashes.items()})


# === Output ===


def _classes(report):
    """Rows of the classes: name, photos, segments and percent of the labelled pixels."""
    shares = [f"{share:.2f}" for share in 100 * report.pixels_of / max(report.pixels_of.sum(), 1)]
    return list(zip(report.class_names, report.photos_of, report.segments_of, shares))


def print_report(report, most=12):
    """Prints the classes of a report, and the first `most` findings of each kind."""
    things = ("yes" if thing else "" for thing in report.spec.things) if report.class_names else ()
    classes = [(name, thing, *numbers) for (name, *numbers), thing in zip(_classes(report), things)]
    columns = ("class", "thing", "photos", "segments", "% of pixels")
    print_table(columns, classes, title=f"{report.split}: {report.title}")
    findings = []
    for kind, number in report.counts().items():
        rows = [(photo, detail) for k, photo, detail in report.findings if k == kind]
        for i, (photo, detail) in enumerate(rows[:most]):
            findings.append((*((kind, number) if i == 0 else ("", "")), photo, detail))
        if number > most:
            findings.append(("", "", "...", ""))
    print_table(("finding", "number", "photo", "what"), findings, title=f"{report.split}: findings")


def page(reports):
    """One self-contained HTML page: findings, classes and the painted photos of every report."""
    sections = {}
    for report in reports:
        sections.update(_sections(report))
    return pages.page("Data check", sections)


def _sections(report):
    split = report.split
    yield split, f"<p>{html(f'{report.spec.name}: {report.title}.')}</p>"
    firsts = {kind: next(f"{p} {detail}" for k, p, detail in report.findings if k == kind) for kind in report.counts()}
    found = [(kind, number, firsts[kind]) for kind, number in report.counts().items()]
    yield f"{split}: findings", pages.table(("kind", "number", "first"), found, words=True)
    classes = []
    for i, (name, *numbers) in enumerate(_classes(report)):
        color = "#{:02x}{:02x}{:02x}".format(*report.spec.colors[i].tolist())
        classes.append((Html(f'<i style="background:{html(color)}"></i>{html(name)}'), *numbers))
    yield f"{split}: classes", pages.table(("class", "photos", "segments", "% of pixels"), classes)
    pictures = "\n".join(_picture(name, picture) for name, picture in report.sample)
    yield f"{split}: random photos with their labels", pictures


def _picture(name, picture):
    encoded = io.BytesIO()
    image = Image.fromarray(picture)
    image.thumbnail((1120, 1120))
    image.save(encoded, "JPEG", quality=85)
    return pages.figure(pages.embedded(encoded.getvalue(), name, "jpeg"), name)
