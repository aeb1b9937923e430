"""Prediction of large photos in overlapping tiles: the layout of the tiles, and the join of their segmentations.

Each tile is predicted like a photo. Its edges cut objects, and the network may assign the visible rest of a cut object
to a neighbour or to the background. So tiles are joined by these rules:

- If one tile cuts an object and another tile contains it completely, the object comes from the other tile. Some tile
  completely contains an object that is smaller than the overlap.
- Instances of two tiles are one object if their IoU in the overlap is above 0.5. This joins objects larger than the
  overlap.
- All other pixels come from the tile whose core contains them. Cores end in the middle of each overlap.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import typing

import numpy as np
import tensorflow as tf
from scipy.ndimage import find_objects
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from axial.data.preprocess import SCALE, STRIDE, ScaledCanvas, is_whole
from axial.data.specs import DatasetSpec
from axial.data.streams import photo_of
from axial.data.tfrecord import photo_name
from axial.errors import InputError, named
from axial.tasks.segmentation.grouping import PostprocessConfig, apply_pieces, merge_semantic_and_instance, stuff_only


@dataclasses.dataclass(frozen=True)
class Tiled:
    """Predicts photos of any size. With a `ScaledCanvas`, photos larger than the canvas are predicted in tiles.

    Args:
        canvas: canvas argument of `preprocess`.
        example: function that makes an example for predictions from a tile, uint8 [h, w, 3].
        spec, grouping: see `join`.
    """

    canvas: ScaledCanvas | tuple[int, int]
    example: typing.Callable
    spec: DatasetSpec
    grouping: PostprocessConfig

    @classmethod
    def from_task(cls, task):
        """The `Tiled` for a segmentation task."""
        spec = task.spec if task.instances else stuff_only(task.spec)
        return cls(task.canvases, task.example, spec, task.grouping)

    def about(self):
        """dict that `from_export` reads. An export's signature 'classes' returns this dict."""
        knobs = {"stuff_area": self.grouping.stuff_area, "thing_area": self.grouping.thing_area}
        knobs |= {"pieces": self.grouping.pieces or "", "tile_overlap": self.canvas.overlap}
        return {SCALE: self.canvas.scale, "instances": any(self.spec.things), **knobs}

    @classmethod
    def from_export(cls, about, example, spec):
        """The `Tiled` for an export, from its arrays `about`, which include the canvas; None without a photo scale."""
        if SCALE not in about:
            return None
        canvas, scale, overlap = (about[name].tolist() for name in ("canvas", SCALE, "tile_overlap"))
        pieces = about["pieces"].decode() or None if "pieces" in about else None
        stuff_area, thing_area = int(about["stuff_area"]), int(about["thing_area"])
        grouping = PostprocessConfig(stuff_area=stuff_area, thing_area=thing_area, pieces=pieces)
        canvases = ScaledCanvas.within(tuple(canvas), scale, overlap).alone
        return cls(canvases, example, spec if about["instances"] else stuff_only(spec), grouping)

    def __call__(self, predictions, examples):
        """Yields (example, prediction at the photo's own size).

        Args:
            predictions: function that takes examples of photos or tiles that fit on the canvas, and yields (example,
                prediction) in order.
            examples: examples of photos of any size.

        Raises:
            InputError: `is_whole` or `join` refuses a photo. The message names the photo.
        """
        for example, results in self.tile_results(predictions, examples):
            yield example, self.joined(example, results)

    def tile_results(self, predictions, examples):
        """Yields (example, iterator of the predictions of its tiles); see `__call__`. A small photo is a single tile.

        `joined` takes the iterator, which must be consumed before the next example is requested.
        """
        waiting = collections.deque()  # requested examples, with their numbers of tiles
        results = iter(predictions(self._pieces(examples, waiting)))
        for _, first in results:
            example, count = waiting.popleft()
            yield example, itertools.chain([first], (result for _, result in itertools.islice(results, count - 1)))

    def _pieces(self, examples, waiting):
        for example in examples:
            tiling = self.tiling(example)
            waiting.append((example, len(tiling.boxes) if tiling else 1))
            if not tiling:
                yield example
                continue
            photo, about = np.asarray(photo_of(example)), {key: example[key] for key in ("image/id",) if key in example}
            for number, box in enumerate(tiling.boxes):
                yield {**self.example(tf.constant(photo[box])), "tile": number, **about}

    def joined(self, example, results):
        """Joins the predictions of an example's tiles. The prediction of a single tile is returned unchanged."""
        if not (tiling := self.tiling(example)):
            (result,) = results
            return result
        name = _name(example)
        with named(name) if name else contextlib.nullcontext():
            return join(results, tiling, spec=self.spec, grouping=self.grouping, scale=self.canvas.scale)

    def tiling(self, example):
        """`Tiling` of a photo that is larger than the canvas; None for other photos."""
        if not isinstance(self.canvas, ScaledCanvas) or is_whole(example["size"], self.canvas, _name(example)):
            return None
        size, stride = tuple(map(int, example["size"])), STRIDE / self.canvas.scale
        return Tiling(size, self.canvas.tile, self.canvas.overlap, stride)


def _name(example):
    return photo_name(example) if "image/file_name" in example else ""


# === Layout of the tiles ===


@dataclasses.dataclass
class Tiling:
    """The tiles of a photo. All tiles have one size, but the photo's border may cut the last one along an axis.

    Tiles start at multiples of the network's stride. So the pixels of a tile's maps are aligned with the maps of the
    whole photo, and a convolutional network predicts the same segments, except near edges.

    Args:
        size: (height, width) of the photo.
        tile: (height, width) of a tile. If the photo is smaller along an axis, the tile has the photo's side.
        overlap: smallest overlap of neighbouring tiles, in pixels; less than a tile's sides.
        stride: the network's stride, in pixels of the photo. The last tiles may be shorter by less than a stride.

    Attributes:
        boxes: list of the tiles in raster order, as slices (rows, columns) of the photo.
        cores: list of the tiles' cores, as slices of the photo. The cores partition the photo.
    """

    size: tuple[int, int]
    tile: tuple[int, int]
    overlap: int
    stride: float = 1.0

    def __post_init__(self):
        spans = [_spans(side, tile, self.overlap, self.stride) for side, tile in zip(self.size, self.tile)]
        self.boxes, self.cores = ([_slices(ends) for ends in itertools.product(*axes)] for axes in zip(*spans))

    def neighbours(self, number):
        """Numbers of the tiles that overlap tile `number`, without itself."""
        box = self.boxes[number]
        return [
            other
            for other, other_box in enumerate(self.boxes)
            if other != number and all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other_box))
        ]


def _spans(side, tile, overlap, stride):
    """(Ranges of the tiles, ranges of the cores) along an axis. A range is (first pixel, last pixel + 1)."""
    starts, last = [0], side - tile
    while starts[-1] < last:
        furthest = starts[-1] + tile - overlap
        start = min(_multiple(furthest, stride, math.floor), _multiple(last, stride, math.ceil))
        starts.append(start if start > starts[-1] else min(furthest, last))
    tiles = [(start, min(start + tile, side)) for start in starts]
    edges = [0, *((a + b) // 2 for (_, a), (b, _) in itertools.pairwise(tiles)), side]
    return tiles, list(itertools.pairwise(edges))


def _multiple(position, stride, to_whole):
    """int: the last multiple of the stride up to a position (math.floor), or the first one after it (math.ceil)."""
    slack = 0.49 if to_whole is math.floor else -0.49
    return round(to_whole((position + slack) / stride) * stride)


def _slices(spans):
    return tuple(itertools.starmap(slice, spans))


def join(results, tiling, *, spec, grouping, scale):
    """Joins the segmentations of a photo's tiles.

    The joined classes and instances become panoptic labels as in `postprocess`: an instance's class is the majority
    vote of its pixels, and the area thresholds apply to segments of the whole photo.

    Args:
        results: iterable of a dict for each tile: int maps 'semantic' and 'instance' of the tile's size, 'score' [K]
            and 'dropped'; see `postprocess`.
        tiling: `Tiling`.
        spec: `DatasetSpec`; without an instance branch, the result of `stuff_only`.
        grouping: `PostprocessConfig`. Its areas are in pixels of the canvas.
        scale: side of the photo on the canvas / side of the photo.

    Returns:
        dict of int32 maps [*tiling.size] 'semantic', 'instance' and 'panoptic', of 'score' float32 [N], and of
        'dropped' int32 []. Instances are numbered in the raster order of their first pixels. An instance's score is the
        mean of its scores in the tiles, weighted by pixels. 'dropped' is the largest 'dropped' of a tile.

    Raises:
        InputError: a class has more instances than the spec's label_divisor allows.
    """
    ids, semantic, objects, scores, dropped = _assemble(results, tiling)
    instance, scores = _number_objects(ids, objects, scores)
    stuff_area, thing_area = (math.ceil(round(x / scale**2, 6)) for x in (grouping.stuff_area, grouping.thing_area))
    photo_grouping = dataclasses.replace(grouping, stuff_area=stuff_area, thing_area=thing_area)
    maps = tf.constant(semantic), tf.constant(instance)
    panoptic, classes = merge_semantic_and_instance(*maps, len(scores), spec=spec, config=photo_grouping)
    counts = np.bincount(classes[1:], minlength=1)
    if counts.max() >= spec.label_divisor:
        raise InputError(
            f"{counts.max()} instances of {spec.class_names[counts.argmax()]!r} in one photo; the label_divisor "
            f"{spec.label_divisor} of the spec {spec.name!r} has room for {spec.label_divisor - 1}"
        )
    panoptic = np.asarray(apply_pieces(panoptic, spec, grouping, scale))
    maps = {"semantic": semantic, "instance": instance, "panoptic": panoptic}
    return {**maps, "score": scores, "dropped": np.int32(dropped)}


def _assemble(results, tiling):
    """(Instance of each pixel, class of each pixel, object of each instance, score of each instance, 'dropped')."""
    tiles, scores, first, dropped = [], [np.zeros(1)], 0, 0  # index 0 means "no instance"
    for box, result in zip(tiling.boxes, results, strict=True):
        tiles.append(_Tile(result, box, tiling.size, first))
        scores.append(np.asarray(result["score"], np.float64))
        first += len(scores[-1])
        dropped = max(dropped, int(result.get("dropped", 0)))
    repaired = [tile.repaired(tiles[other] for other in tiling.neighbours(number)) for number, tile in enumerate(tiles)]
    pairs = [np.zeros([2, 0], int)]
    for number, tile in enumerate(tiles):
        for other in (other for other in tiling.neighbours(number) if other > number):
            both = tile.view(tiles[other].box, repaired[number])[0], tiles[other].view(tile.box, repaired[other])[0]
            pairs.append(_matching_pairs(*both))
    pairs = np.concatenate(pairs, 1)
    graph = coo_array((np.ones(pairs.shape[1]), tuple(pairs)), shape=[first + 1, first + 1])
    objects = connected_components(graph, directed=False)[1]
    ids, semantic = (np.empty(tiling.size, np.int32) for _ in range(2))
    for tile, core, maps in zip(tiles, tiling.cores, repaired):
        ids[core], semantic[core] = tile.view(core, maps)
    return ids, semantic, objects, np.concatenate(scores), dropped


class _Tile:
    """The prediction of a tile. Its instance i has the number first + i among the instances of all tiles.

    Args:
        result: the tile's prediction.
        box: the tile, as slices of the photo.
        size: (height, width) of the photo.
        first: number of instances in earlier tiles.
    """

    def __init__(self, result, box, size, first):
        instance = np.asarray(result["instance"])
        self.box, self.first = box, first
        ids = np.where(instance > 0, instance + first, 0).astype(np.int32)
        self.maps = ids, np.asarray(result["semantic"], np.int32)
        self.areas = np.bincount(instance.ravel(), minlength=len(result["score"]) + 1)
        # An object that reaches the tile's edge may continue beyond it, except at the photo's border.
        self._low = [axis.start + (axis.start > 0) for axis in box]
        self._high = [axis.stop - (axis.stop < side) for axis, side in zip(box, size)]
        self._bounds = np.zeros([len(self.areas), 2, 2], int)  # [instance, first pixel or end, y or x]
        for i, bounds in enumerate(find_objects(instance), 1):
            if bounds:
                axes = list(zip(box, bounds))
                self._bounds[i] = [a.start + p.start for a, p in axes], [a.start + p.stop for a, p in axes]
        self.whole = (self.areas > 0) & self.contains(self)
        self.whole[0] = False

    def contains(self, other):
        """bool [K + 1]: whether each instance of tile `other` lies in this tile and does not touch its inner edges."""
        first, end = other._bounds[:, 0], other._bounds[:, 1]
        return np.all((first >= self._low) & (end <= self._high), 1)

    def view(self, box, maps=None):
        """Views of the tile's (ids, semantic), or of other `maps`, inside a box of the photo."""
        index = _slices((max(a.start, b.start) - b.start, min(a.stop, b.stop) - b.start) for a, b in zip(box, self.box))
        return [x[index] for x in maps or self.maps]

    def local(self, ids):
        """Numbers of the tile's instances within the tile, from 1; 0 for no instance."""
        return np.maximum(ids - self.first, 0)

    def repaired(self, others):
        """Copies of (ids, semantic) in which whole objects of other tiles replace the objects that this tile cuts."""
        maps = [x.copy() for x in self.maps]
        for other in others:
            cut = other.whole & ~self.contains(other)
            if not cut.any():
                continue
            mine, theirs = self.local(self.view(other.box)[0]), other.view(self.box)
            number = other.local(theirs[0])
            taken = cut[number]
            # If most of an instance is replaced, its rest is an outline or part of a merged object.
            lost = 2 * np.bincount(mine[taken], minlength=len(self.areas)) > self.areas
            lost[0] = False
            taken |= lost[mine] & (other.whole[number] | (number == 0))
            for x, new in zip(self.view(other.box, maps), theirs):
                x[taken] = new[taken]
        return maps


def _matching_pairs(ids, others):
    """int [2, L]: pairs of instances with an IoU above 0.5, from two tiles' views of their overlap."""
    (mine, a), (theirs, b) = (np.unique(x, return_inverse=True) for x in (ids, others))
    a, b = a.ravel(), b.ravel()
    pairs, both = np.unique(a * len(theirs) + b, return_counts=True)
    i, j = np.divmod(pairs, len(theirs))
    matches = np.stack([mine[i], theirs[j]])
    return matches[:, (3 * both > np.bincount(a)[i] + np.bincount(b)[j]) & np.all(matches > 0, 0)]


def _number_objects(ids, objects, scores):
    """Numbers the objects of a photo in the raster order of their first pixels.

    Args:
        ids: instance of each pixel, numbered over all tiles, int32 [h, w]; 0 for none.
        objects: object of each instance, int [I].
        scores: score of each instance, [I].

    Returns:
        object of each pixel, int32 [h, w]; score of each object, float32 [N].
    """
    flat = ids.ravel()
    runs = np.flatnonzero(np.diff(flat, prepend=-1))  # first pixels of runs, in raster order
    visible, first = np.unique(objects[flat[runs[flat[runs] > 0]]], return_index=True)
    number = np.zeros(len(objects), np.int32)
    number[visible[np.argsort(first)]] = np.arange(1, len(visible) + 1)
    number = number[objects]  # object of each instance; 0 for hidden instances
    pixels = np.bincount(flat, minlength=len(objects))
    area, total = (np.bincount(number, x, len(visible) + 1)[1:] for x in (pixels, pixels * scores))
    return number[ids], (total / area).astype(np.float32)
