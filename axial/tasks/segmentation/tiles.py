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
import functools
import itertools
import math
import typing

import numpy as np
import tensorflow as tf

from axial.data.preprocess import LEAST_TILE, SCALE, STRIDE, ScaledCanvas, is_whole, scaled_size
from axial.data.specs import DatasetSpec
from axial.data.streams import photo_of
from axial.data.tfrecord import photo_name
from axial.errors import InputError, named
from axial.tasks.segmentation.grouping import (
    PostprocessConfig,
    apply_pieces,
    connected,
    merge_semantic_and_instance,
    stuff_only,
)


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

    def expect(self, size):
        """List of an op that raises InvalidArgumentError for a size (h, w) that `is_whole` refuses."""
        if not isinstance(self.canvas, ScaledCanvas):
            return []
        scaled, canvas = scaled_size(size, self.canvas.scale), self.canvas
        text, served = "at least 1x1", tf.reduce_all(scaled > 0)
        if min(canvas.tile) < LEAST_TILE:  # too small to join
            text, served = "1x1 to {}x{}".format(*canvas.largest), served & tf.reduce_all(scaled <= canvas.largest)
        text = f"image: {{}}x{{}} pixels (h x w) become {{}}x{{}} by {SCALE} = {canvas.scale:g}; expected {text}"
        return [tf.debugging.Assert(served, [tf.strings.format(text, [*tf.unstack(size), *tf.unstack(scaled)])])]

    def serve(self, predict, image):
        """The prediction for a photo of any size, uint8 [h, w, 3], computed in a graph. It equals that of `__call__`.

        Args:
            predict: function that returns the prediction for a photo or tile that fits on the canvas.
            image: the photo.
        """
        if not isinstance(self.canvas, ScaledCanvas):
            return predict(image)
        size, canvas = tf.shape(image)[:2], self.canvas
        whole = tf.reduce_all(scaled_size(size, canvas.scale) <= canvas.largest)
        tile = height, width = tf.unstack(tf.where(whole, size, canvas.tile))
        axes = zip(tf.unstack(size), tile)
        starts = [tile_starts(*axis, canvas.overlap, STRIDE / canvas.scale) for axis in axes]
        # A function of its own: without this attribute, TensorFlow would make the network a part of the loop.
        predict = tf.function(predict, autograph=False, experimental_attributes={"_noinline": True})

        def one(corner):
            y, x = tf.unstack(corner)
            result = predict(image[y : y + height, x : x + width])
            result["panoptic"] = result["panoptic"][: tf.where(whole, height, 0)]  # `join` does not need it
            return {**result, **{name: tf.RaggedTensor.from_tensor(result[name]) for name in maps}}

        maps = dict.fromkeys(("panoptic", "semantic", "instance"), tf.RaggedTensorSpec([None, None], tf.int32, 1))
        others = {"score": tf.TensorSpec([None], tf.float32), "dropped": tf.TensorSpec([], tf.int32)}
        tiles = tf.map_fn(one, _corners(starts), fn_output_signature={**maps, **others}, parallel_iterations=1)
        tiles |= {name: tiles[name].to_tensor() for name in maps}

        def joined():
            inputs = (tiles[name] for name in ("semantic", "instance", "score"))
            result, counts = _join_graph(self.spec, self.grouping, canvas.scale)(*inputs, *starts, size)
            text = f"image: {{}} instances of a class; the label_divisor has room for {self.spec.label_divisor - 1}"
            most = tf.reduce_max(counts)
            tf.debugging.Assert(most < self.spec.label_divisor, [tf.strings.format(text, most)])
            return {**result, "dropped": tf.reduce_max(tiles["dropped"])}

        return tf.cond(whole, lambda: {name: x[0] for name, x in tiles.items()}, joined)


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
        starts: pair of the tiles' first rows, int32 [R], and first columns, int32 [C].
        boxes: list of the tiles in raster order, as slices (rows, columns) of the photo.
    """

    size: tuple[int, int]
    tile: tuple[int, int]
    overlap: int
    stride: float = 1.0

    def __post_init__(self):
        axes = list(zip(self.size, self.tile))
        self.starts = [tile_starts(side, tile, self.overlap, self.stride).numpy() for side, tile in axes]
        ranges = [[slice(a, min(a + tile, side)) for a in map(int, x)] for x, (side, tile) in zip(self.starts, axes)]
        self.boxes = list(itertools.product(*ranges))


@functools.partial(
    tf.function, autograph=False, input_signature=[*[tf.TensorSpec([], tf.int32)] * 3, tf.TensorSpec([], tf.float64)]
)
def tile_starts(side, tile, overlap, stride):
    """int32 [n]: first pixels of the tiles along an axis; see `Tiling`."""

    def multiple(position, to_whole, slack):
        """The last multiple of the stride up to a position (tf.floor), or the first one after it (tf.math.ceil)."""
        return tf.cast(tf.round(to_whole((tf.cast(position, tf.float64) + slack) / stride) * stride), tf.int32)

    def add(starts):
        furthest, last = starts[-1] + tile - overlap, side - tile
        start = tf.minimum(multiple(furthest, tf.floor, 0.49), multiple(last, tf.math.ceil, -0.49))
        start = tf.where(start > starts[-1], start, tf.minimum(furthest, last))
        return [tf.concat([starts, [start]], 0)]

    (starts,) = tf.while_loop(
        lambda starts: starts[-1] < side - tile,
        add,
        [tf.zeros([1], tf.int32)],
        shape_invariants=[tf.TensorShape([None])],
    )
    return starts


def _corners(starts):
    """int32 [T, 2]: first pixel (y, x) of each tile in raster order, from the pair of `Tiling.starts`."""
    rows, columns = starts
    return tf.stack([tf.repeat(rows, tf.size(columns)), tf.tile(columns, tf.shape(rows))], 1)


# === Join ===


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
    results, kinds = list(results), {"semantic": tf.int32, "instance": tf.int32, "score": tf.float32}
    padded = (tf.ragged.stack([tf.cast(x[name], kind) for x in results]).to_tensor() for name, kind in kinds.items())
    joined, counts = _join_graph(spec, grouping, scale)(*padded, *tiling.starts, tiling.size)
    counts = counts.numpy()
    if counts.max() >= spec.label_divisor:
        raise InputError(
            f"{counts.max()} instances of {spec.class_names[counts.argmax()]!r} in one photo; the label_divisor "
            f"{spec.label_divisor} of the spec {spec.name!r} has room for {spec.label_divisor - 1}"
        )
    dropped = np.int32(max(int(result.get("dropped", 0)) for result in results))
    return {**{name: x.numpy() for name, x in joined.items()}, "dropped": dropped}


@functools.cache
def _join_graph(spec, grouping, scale):
    """The graph that joins tiles, for photos of any size; see `join`.

    Its arguments are the tiles' maps 'semantic' and 'instance', int32 [T, h, w], and 'score', float32 [T, K], padded
    with 0; then the two arrays of `Tiling.starts`, and the photo's size, int32 [2].
    """
    stuff_area, thing_area = (math.ceil(round(x / scale**2, 6)) for x in (grouping.stuff_area, grouping.thing_area))
    photo_grouping = dataclasses.replace(grouping, stuff_area=stuff_area, thing_area=thing_area)

    def run(semantic, instance, score, rows, columns, size):
        """(dict of the result of `join` without 'dropped', number of instances of each class)."""
        semantic, instance, score = _joined(_Tiles(semantic, instance, (rows, columns), size), score)
        count = tf.size(score)
        panoptic, classes = merge_semantic_and_instance(semantic, instance, count, spec=spec, config=photo_grouping)
        panoptic = apply_pieces(panoptic, spec, grouping, scale)
        counts = tf.math.bincount(classes[1:], minlength=1)
        return {"semantic": semantic, "instance": instance, "panoptic": panoptic, "score": score}, counts

    int_spec, float_spec = (functools.partial(tf.TensorSpec, dtype=dtype) for dtype in (tf.int32, tf.float32))
    maps = [int_spec([None, None, None])] * 2
    signature = [*maps, float_spec([None, None]), int_spec([None]), int_spec([None]), int_spec([2])]
    graph = functools.partial(run)  # `run` itself would warn of retracing
    return tf.function(graph, autograph=False, input_signature=signature)


class _Tiles:
    """The predictions of the tiles of a photo, in a graph. Instance i of tile t has the number t x `most` + i.

    Args:
        semantic, instance: maps of the tiles, int32 [T, h, w], with zeros beyond the ends of short tiles.
        starts: see `Tiling`.
        size: int32 [2], (height, width) of the photo.
    """

    def __init__(self, semantic, instance, starts, size):
        self.semantic, self.instance, self.starts, self.size = semantic, instance, starts, size
        self.count, self.side, self.most = tf.shape(instance)[0], tf.shape(instance)[1:], tf.reduce_max(instance)
        self.low = _corners(starts)
        self.high = tf.minimum(self.low + self.side, size)
        corner, extent = tf.TensorSpec([None, 2], tf.int32), tf.TensorSpec([None], tf.int32)
        inputs, signature = (instance, self.low), (extent, corner, corner)
        self.areas, self.first, self.end = tf.map_fn(self._bounds, inputs, fn_output_signature=signature)
        # An object that reaches the tile's edge may continue beyond it, except at the photo's border.
        self.inner = self.low + tf.cast(self.low > 0, tf.int32), self.high - tf.cast(self.high < size, tf.int32)
        self.is_number = tf.range(self.most + 1) > 0
        self.whole = self._within(self.inner[0][:, None], self.inner[1][:, None], slice(None))
        self.whole &= (self.areas > 0) & self.is_number
        meet = tf.reduce_all((self.low[:, None] < self.high) & (self.low < self.high[:, None]), -1)
        self.pairs = tf.cast(tf.where(meet & ~tf.eye(self.count, dtype=tf.bool)), tf.int32)

    def _bounds(self, inputs):
        """Area, first pixel and end, (y, x), of each of a tile's instances. Numbers without pixels have no extent."""
        instance, low = inputs
        flat, count = tf.reshape(instance, [-1]), self.most + 1
        places = _corners([tf.range(side) for side in tf.unstack(self.side)]) + low
        first, last = (f(places, flat, count) for f in (tf.math.unsorted_segment_min, tf.math.unsorted_segment_max))
        return tf.math.bincount(flat, minlength=count), first, last + 1

    def _within(self, first, end, other):
        """bool [..., most + 1]: whether each instance of the tiles `other` lies between `first` and `end`."""
        return tf.reduce_all((self.first[other] >= first) & (self.end[other] <= end), -1)

    def overlap(self, tile, other, maps):
        """Two views of each map, int32 [T, h, w], in the overlap of two tiles: the first tile's and the other's."""
        low = tf.maximum(self.low[tile], self.low[other])
        extent = tf.minimum(self.high[tile], self.high[other]) - low
        return [[tf.slice(x[one], low - self.low[one], extent) for one in (tile, other)] for x in maps]

    def repaired(self, tile):
        """Maps (number of the instance, class) of a tile, int32 [h, w].

        Whole objects of other tiles replace the objects that this tile cuts.
        """

        def repair(maps, other):
            cut = self.whole[other] & ~self._within(self.inner[0][tile], self.inner[1][tile], other)
            (mine, theirs), (_, semantic) = self.overlap(tile, other, (self.instance, self.semantic))
            taken = tf.gather(cut, theirs)
            # If most of an instance is replaced, its rest is an outline or part of a merged object.
            replaced = tf.math.bincount(tf.boolean_mask(mine, taken), minlength=self.most + 1)
            lost = (2 * replaced > self.areas[tile]) & self.is_number
            taken |= tf.gather(lost, mine) & (tf.gather(self.whole[other], theirs) | (theirs == 0))
            before = tf.maximum(self.low[other] - self.low[tile], 0)
            around = tf.stack([before, self.side - before - tf.shape(taken)], 1)
            taken, *new = (tf.pad(x, around) for x in (taken, self.numbered(theirs, other), semantic))
            return tuple(tf.where(taken, *pair) for pair in zip(new, maps))

        others = tf.boolean_mask(self.pairs[:, 1], self.pairs[:, 0] == tile)
        maps = self.numbered(self.instance[tile], tile), self.semantic[tile]
        return tf.foldl(repair, others, maps, parallel_iterations=1)

    def numbered(self, instance, tile):
        """The numbers, among all tiles, of a tile's instances; 0 for no instance."""
        return tf.where(instance > 0, instance + tile * self.most, 0)

    def photo(self, maps):
        """A map of the photo, int32 [h, w], from a map of the tiles. A pixel is of the tile whose core contains it."""
        index = []
        for starts, extent, side in zip(self.starts, tf.unstack(self.side), tf.unstack(self.size)):
            edges = (tf.minimum(starts[:-1] + extent, side) + starts[1:]) // 2
            number = tf.searchsorted(edges, tf.range(side), "right")
            index.append(number * extent + tf.range(side) - tf.gather(starts, number))
        grid = tf.reshape(maps, [*map(tf.size, self.starts), *tf.unstack(self.side)])
        grid = tf.reshape(tf.transpose(grid, [0, 2, 1, 3]), [tf.shape(grid)[0] * self.side[0], -1])
        return tf.gather(tf.gather(grid, index[0]), index[1], axis=1)


def _joined(tiles, score):
    """Joins the maps of `_Tiles`.

    Args:
        tiles: `_Tiles`.
        score: score of each instance, float32 [T, K].

    Returns:
        maps of the photo 'semantic' and 'instance', int32 [h, w], and the scores, float32 [N]. Objects are numbered in
        the raster order of their first pixels.
    """
    map_spec, codes_spec = tf.TensorSpec([None, None], tf.int32), tf.RaggedTensorSpec([None], tf.int64, 0)
    ids, semantic = tf.map_fn(tiles.repaired, tf.range(tiles.count), fn_output_signature=(map_spec, map_spec))
    numbers = tiles.count * tiles.most + 1
    later = tf.boolean_mask(tiles.pairs, tiles.pairs[:, 0] < tiles.pairs[:, 1])

    def matching(pair):
        """The pairs of instances of two tiles whose IoU in the overlap is above 0.5, as one number each, int64 [L]."""
        ((a, b),) = tiles.overlap(pair[0], pair[1], [ids])
        a, b = (tf.cast(tf.reshape(x, [-1]), tf.int64) for x in (a, b))
        codes = a * tf.cast(numbers, tf.int64) + b
        both, mine, theirs = (tf.gather(x.count, x.idx) for x in map(tf.unique_with_counts, (codes, a, b)))
        return tf.unique(tf.boolean_mask(codes, (3 * both > mine + theirs) & (a > 0) & (b > 0))).y

    codes = tf.map_fn(matching, later, fn_output_signature=codes_spec).flat_values
    pairs = tf.concat([codes // tf.cast(numbers, tf.int64), codes % tf.cast(numbers, tf.int64)], 0)
    objects = connected(numbers, tf.cast(pairs, tf.int32))
    ids = tiles.photo(ids)
    visible, number = tf.unique(tf.concat([[0], tf.gather(objects, tf.reshape(ids, [-1]))], 0))
    count = tf.size(visible)
    instance = tf.reshape(number[1:], tf.shape(ids))
    number = tf.gather(tf.scatter_nd(visible[:, None], tf.range(count), [numbers]), objects)
    pixels = tf.cast(tf.math.bincount(tf.reshape(ids, [-1]), minlength=numbers), tf.float64)
    score = tf.cast(tf.concat([[0.0], tf.reshape(score[:, : tiles.most], [-1])], 0), tf.float64)
    area, total = (tf.math.unsorted_segment_sum(x, number, count)[1:] for x in (pixels, pixels * score))
    return tiles.photo(semantic), instance, tf.cast(total / area, tf.float32)
