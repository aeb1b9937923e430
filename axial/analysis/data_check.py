"""Checks a converted data set before training, and reports its faults."""

import collections
import hashlib
import itertools

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
from axial.io.write import bytes_of, file_digest
from axial.tasks.segmentation.drawing import hex_color, overlay

TINY = 16  # pixels
# Findings that make a record useless. All other findings may be intended.
ERRORS = ("unreadable", "unknown id", "segment without pixels", "no label")
VOID = (255, 65535)  # numbers that many programs write for "no object"


class SplitCheck:
    """The check of one split, with its findings so far.

    Attributes:
        split: name of the split.
        spec: `DatasetSpec` or `TextSpec`.
        labels: schema of the records; see `tfrecord.SCHEMAS`.
        photos: number of records.
        findings: list of (kind, photo, detail).
        photos_of: int [classes], number of photos with each class. Sentence pairs have no classes.
        segments_of: int [classes], number of segments or objects of each class; zeros for labels of whole photos.
        pixels_of: int [classes], number of pixels of each class; zeros except for 'panoptic' labels.
        void, pixels: number of unlabelled pixels and of all pixels, for 'panoptic' labels.
        hashes: dict from the SHA-256 of each encoded photo to the photo's name.
        sample: list of (name, uint8 [h, w, 3]): random photos with their segments drawn on them.
        sizes: list of the (height, width) of each readable photo with 'panoptic' labels.
        objects: for each of these photos, an array of the square roots of its things' areas, in pixels.
        numbers: Counter of the photos with a property. 'things': with a thing; 'crowd': with a crowd; 'joined': with an
            object in several pieces, but no two objects of a class; n in `VOID`: with an object number n, but no object
            n - 1.
    """

    def __init__(self, split, spec, labels):
        self.split, self.spec, self.labels = split, spec, labels
        self.class_names = () if labels == "text" else spec.class_names
        self.unit = "sentence pair" if labels == "text" else "photo"
        self.photos_of, self.segments_of, self.pixels_of = np.zeros([3, len(self.class_names)], np.int64)
        self.photos = self.void = self.pixels = 0
        self.hashes, self.numbers = {}, collections.Counter()
        self.findings, self.sample, self.sizes, self.objects = [], [], [], []

    @property
    def unlabelled(self):
        """Fraction of unlabelled pixels for 'panoptic' labels, else None."""
        return self.void / max(self.pixels, 1) if self.labels == "panoptic" else None

    @property
    def title(self):
        what = counted(self.photos, self.unit)
        if self.labels != "panoptic":
            return what
        things = "" if any(self.spec.things) else ", no class is a thing"
        return f"{what}, {100 * self.unlabelled:.1f} % of pixels unlabelled{things}"

    def add(self, kind, photo, detail):
        self.findings.append((kind, photo, detail))

    def counts(self):
        """dict from each kind of finding to its number of findings; errors come first."""
        counts = collections.Counter(kind for kind, *_ in self.findings)
        return dict(sorted(counts.items(), key=lambda item: (item[0] not in ERRORS, -item[1])))

    def errors(self):
        return sum(number for kind, number in self.counts().items() if kind in ERRORS)

    def add_record(self, serialized, where, draw):
        """Checks and counts a serialised record. If `draw`, also draws its photo for `sample`."""
        self.photos += 1
        if fault := record_fault(serialized.numpy(), self.spec, self.labels):
            self.add("unreadable", where, fault.lstrip(": "))
            return
        record = tfrecord.parse_example(serialized, self.labels)
        if "image/encoded" not in record:
            return
        name = record["image/file_name"].numpy().decode()
        digest = hashlib.sha256(record["image/encoded"].numpy()).digest()
        if digest in self.hashes:
            self.add("photo twice", name, f"the same file as {self.hashes[digest]}")
        self.hashes[digest] = name
        photo = decode_photo(record).numpy() if draw else None
        if self.labels == "panoptic":
            photo = self._add_segments(record, name, photo)
        elif "image/class" in record:
            self.photos_of[record["image/class"]] += 1
        else:
            self.photos_of[np.unique(record["box/class"])] += 1
            np.add.at(self.segments_of, record["box/class"], 1)
        if draw:
            self.sample.append((name, photo))

    def _add_segments(self, record, name, photo):
        """Checks and counts the segments of a record. Returns the photo, if given, with the segments drawn on it."""
        way, tag = int(record["image/orientation"]), int(orientation(record["image/encoded"]))
        if way == 1 and tag > 1:
            self.add("lies as stored", name, f"EXIF orientation {tag}, which its labels do not follow")
        if way > 1:
            self.add("turned", name, f"EXIF orientation {way}")
        if way in (2, 3, 4) or (way > 4 and int(record["image/height"]) == int(record["image/width"])):
            detail = "its labels fit the stored pixels too; if they match these, convert with --labels=stored"
            self.add("ambiguous turn", name, detail)
        ids = tfrecord.segment_ids(record["panoptic/encoded"]).numpy()
        listed, classes, crowd = (record[f"segment/{key}"].numpy() for key in ("id", "class", "crowd"))
        for identity in np.setdiff1d(ids, [0, *listed]):
            self.add("unknown id", name, f"{np.count_nonzero(ids == identity)} pixels of id {identity} have no segment")
        if not listed.size:
            self.add("no segment", name, "the whole photo is unlabelled")
        segments = numbered(ids, listed)
        areas = np.bincount(segments.ravel(), minlength=len(listed) + 1)[1:]
        for identity, index, area in zip(listed, classes, areas):
            if area < TINY:
                kind = "tiny segment" if area else "segment without pixels"
                self.add(kind, name, f"{self.class_names[index]}, id {identity}: {area} pixels")
        self.photos_of[np.unique(classes)] += 1
        np.add.at(self.segments_of, classes, 1)
        np.add.at(self.pixels_of, classes, areas)
        is_thing = np.array(self.spec.things)[classes]
        things = is_thing & (crowd == 0)
        self.numbers["things"] += is_thing.any()
        self.numbers["crowd"] += (is_thing & ~things).any()
        alone = np.flatnonzero(things) + 1 if len(set(classes[things])) == things.sum() else ()
        self.numbers["joined"] += any(label(segments == i, np.ones([3, 3]))[1] > 1 for i in alone)
        divisor = self.spec.label_divisor
        objects = set(listed[things & (listed // divisor == classes + 1)] % divisor)
        self.numbers.update(number for number in VOID if number in objects and number - 1 not in objects)
        self.sizes.append(ids.shape)
        self.objects.append(np.sqrt(areas[things & (areas > 0)]))
        self.void, self.pixels = self.void + int((segments == 0).sum()), self.pixels + ids.size
        return None if photo is None else overlay(photo, segments, classes, self.spec)

    def end(self, written):
        """Adds the findings on the whole split; `written` is the manifest's number of records."""
        if self.photos != written and not self.errors():
            self.add("unreadable", self.split, f"{counted(self.photos, 'record')} where {written} were written")
        for index in np.flatnonzero(self.photos_of == 0):
            self.add("class never occurs", "", self.class_names[index])
        if self.labels in tfrecord.WITH_OBJECTS and not self.segments_of.any() and not self.errors():
            self.add("no label", self.split, "no photo has a label; the split is for predictions, not for training")
        elif self.labels == "panoptic":
            for detail in self._misnumbered():
                self.add("numbering?", self.split, detail)

    def _misnumbered(self):
        """Yields a message for each sign that the label images use other numbers than the spec and the layout."""
        spec, never, void, numbers = self.spec, self.photos_of == 0, self.unlabelled, self.numbers
        first, last, things = min(spec.category_ids), max(spec.category_ids), numbers["things"]
        in_a_row = last - first + 1 == spec.num_classes
        last_is_lost = in_a_row and never[spec.class_index(last)] and void > 0.01
        if spec.ignored_ids and (last_is_lost or (never.mean() >= 0.5 and void > 0.25)):
            ignored = f"{100 * void:.1f} % of the pixels are {shortened(spec.ignored_ids)}, which the spec ignores"
            question = f"do label images use other numbers than the spec, {first} to {last}?"
            yield f"{ignored}, and none is {spec.class_names[never.argmax()]}; {question}"
        if in_a_row and first == 0 and never[spec.class_index(0)]:
            yield "the class of the number 0 never occurs; are the label images numbered from 1?"
        if 0 < things == numbers["crowd"]:
            yield "each photo with things has a crowd, which is instance 0; are objects numbered from 0?"
        if 0 < things == numbers["joined"]:
            yield "no photo has two objects of a class, but some are in pieces; do all objects have one number?"
        for number in VOID:
            if 0 < things <= 2 * numbers[number]:
                yield f"{number} is an object in {counted(numbers[number], 'photo')}; does it stand for no object?"

    def classes(self):
        """List with a row for each class: its name, photos, segments and percentage of the labelled pixels."""
        percents = [f"{percent:.2f}" for percent in 100 * self.pixels_of / max(self.pixels_of.sum(), 1)]
        return list(zip(self.class_names, self.photos_of, self.segments_of, percents))


def check_split(data_dir, split, sample=20, seed=0):
    """The `SplitCheck` of one split. Reads every record, one at a time.

    Args:
        data_dir, split: a converted data set and its split.
        sample: number of random photos to draw with their labels.
        seed: seed that selects these photos.

    Raises:
        InputError: there is no such split, or a shard is missing or cut short.
    """
    manifest = tfrecord.read_manifest(data_dir, split)
    check, total = SplitCheck(split, manifest["spec"], manifest["labels"]), manifest["examples"]
    drawn = set(np.random.default_rng(seed).choice(total, min(sample, total), replace=False).tolist())
    with progress(None, f"check {split}", total=total, unit="record", leave=False) as bar:
        for (name, *_), digest in itertools.zip_longest(manifest["shards"], manifest["hashes"]):
            path = tfrecord.shard_path(data_dir, name)
            if digest and file_digest(path)[1] != digest:
                check.add("unreadable", name, "its bytes are not those that were written; convert again")
            try:
                for number, serialized in enumerate(tf.data.TFRecordDataset(path)):
                    check.add_record(serialized, f"{name}: record {number}", check.photos in drawn)
                    bar.update()
            except tf.errors.DataLossError as error:
                check.add("unreadable", name, reason_of(error))
    check.end(total)
    return check


def across_splits(checks):
    """Finds photos that occur in two splits. Adds a finding to the check of the later split."""
    first_names = {}
    for check in checks:
        for digest, name in check.hashes.items():
            if digest in first_names:
                check.add("photo in two splits", name, f"the same file as {first_names[digest]}")
        first_names |= {digest: f"{check.split} {name}" for digest, name in check.hashes.items()}


# === Output ===


def print_report(check, most=12):
    """Prints the classes of a check, and the first `most` findings of each kind."""
    things = ("yes" if thing else "" for thing in check.spec.things) if check.class_names else ()
    classes = [(name, thing, *numbers) for (name, *numbers), thing in zip(check.classes(), things)]
    columns = ("class", "thing", "photos", "segments", "% of pixels")
    print_table(columns, classes, title=f"{check.split}: {check.title}")
    findings = []
    for kind, number in check.counts().items():
        rows = [finding[1:] for finding in check.findings if finding[0] == kind]
        first, *others = rows[:most] + [("...", "")] * (number > most)
        findings += [(kind, number, *first), *(("", "", *row) for row in others)]
    print_table(("finding", "number", "photo", "what"), findings, title=f"{check.split}: findings")


def page(checks):
    """One self-contained HTML page with the findings, classes and drawn photos of every check."""
    sections = {}
    for check in checks:
        firsts = {kind: f"{photo} {detail}" for kind, photo, detail in reversed(check.findings)}
        findings = [(kind, number, firsts[kind]) for kind, number in check.counts().items()]
        colors = map(hex_color, check.spec.colors) if check.class_names else ()
        classes = [
            (Html(f'<i style="background:{html(color)}"></i>{html(name)}'), *numbers)
            for color, (name, *numbers) in zip(colors, check.classes())
        ]
        listed = pages.table(("kind", "number", "first"), findings, words=True) if findings else "<p>No findings.</p>"
        sections[f"{check.split}: findings"] = f"<p>{html(check.title)}.</p>" + listed
        sections[f"{check.split}: random photos with labels"] = pages.grid(itertools.starmap(_picture, check.sample))
        sections[f"{check.split}: classes"] = pages.table(("class", "photos", "segments", "% of pixels"), classes)
    return pages.page(f"Data check: {checks[0].spec.name}", sections)


def _picture(name, picture):
    image = Image.fromarray(picture)
    image.thumbnail((1120, 1120))
    jpeg = bytes_of(lambda file: image.save(file, "JPEG", quality=85))
    return pages.figure(pages.embedded(jpeg, name, "jpeg"), name)
