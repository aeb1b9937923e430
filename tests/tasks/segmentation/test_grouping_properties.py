"""What holds for the grouping of any maps, and for any photo on its way to the canvas and back."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import label as components

from axial.data.preprocess import content_size, place_image, place_labels, preprocess, restore
from axial.models.outputs import CENTER, CLASS, OFFSET, PROBABILITY, SEMANTIC
from axial.tasks.segmentation.canvas_maps import upsample
from axial.tasks.segmentation.grouping import PostprocessConfig, find_centers, of_pieces, postprocess
from tests.tasks.segmentation.test_grouping import loops, make_spec, peaks_of

RUNS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FEWER = settings(RUNS, max_examples=25)
LONG = [25, pytest.param(600, marks=pytest.mark.slow)]
SPEC = make_spec(5, {1, 3})  # its panoptic labels are class x 1000 + instance
SIZES = [(1, 1), (1, 9), (12, 1), (13, 17)]  # few, because the grouping is compiled for each
KNOBS = st.builds(
    PostprocessConfig,
    center_threshold=st.just(0.25),
    nms_kernel=st.sampled_from([1, 3, 7]),
    top_k=st.sampled_from([2, 50, None]),
    stuff_area=st.sampled_from([0, 5, 60]),
    thing_area=st.sampled_from([0, 4]),
)

# === Grouping ===


@st.composite
def network_maps(draw, size=None, ties=True):
    """Maps of one photo with large blobs of classes.

    With ties, heats and offsets are multiples of 1/8: many are equal, and sums are exact. Otherwise all differ.
    """
    height, width = size or draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blobs = rng.integers(0, 5, [4, 4])
    semantic = blobs[np.ix_(np.arange(height) * 4 // height, np.arange(width) * 4 // width)]
    heat = rng.integers(-2, 9, [height, width]) / 8
    offsets = rng.integers(-40, 41, [height, width, 2]) / 8
    if not ties:
        heat = rng.permutation(height * width).reshape(height, width) / (height * width)
        offsets = rng.normal(0, 3, offsets.shape)
    noise = rng.uniform(0, 0.1, [height, width, 5])
    return {
        SEMANTIC: (np.eye(5)[semantic] + noise).astype(np.float32),
        CENTER: (heat * draw(st.sampled_from([1, 1, 1, 0])))[..., None].astype(np.float32),
        OFFSET: offsets.astype(np.float32),
    }


def group(photos, config):
    """`postprocess` of a batch of maps, as arrays."""
    maps = {name: np.stack([photo[name] for photo in photos]) for name in photos[0]}
    semantic = maps.pop(SEMANTIC)
    maps = {name: tf.constant(x) for name, x in maps.items()}
    # Photo by photo: where a number lies among others decides which instructions compute it, and their last bits.
    maps[CLASS], maps[PROBABILITY] = tf.argmax(semantic, -1, tf.int32), tf.stack([*map(tf.nn.softmax, semantic)])
    return {name: x.numpy() for name, x in postprocess(maps, SPEC, config).items()}


def pairs_of(a, b):
    """The pairs of values of two maps."""
    return set(zip(a.ravel().tolist(), b.ravel().tolist()))


@pytest.mark.parametrize("examples", LONG)
def test_the_grouping_is_the_loops(examples):
    """With all ties: of equal pixels the first is the centre, of centres at one distance the first is the nearest."""

    @settings(RUNS, max_examples=examples)
    @given(network_maps(), KNOBS)
    def check(maps, config):
        found = group([maps], config)
        np.testing.assert_array_equal(found["panoptic"][0], loops(maps, SPEC, config))
        peaks = peaks_of(maps[CENTER][..., 0], config)
        assert found["dropped"] == max(len(peaks) - (config.top_k or len(peaks)), 0)

    check()


@FEWER
@given(network_maps(), KNOBS)
def test_every_pixel_has_one_segment_or_none(maps, config):
    found = {name: x[0] for name, x in group([maps], config).items()}
    semantic, instance, panoptic = found["semantic"], found["instance"], found["panoptic"]
    label, void = panoptic % SPEC.label_divisor, panoptic == SPEC.void
    kind = np.where(void, 0, panoptic // SPEC.label_divisor)
    thing = np.array(SPEC.things)
    assert kind.min() >= 0 and kind.max() < SPEC.num_classes
    assert np.all(thing[semantic[instance > 0]])  # pixels of stuff have no instance
    np.testing.assert_array_equal(thing[kind][~void], (instance > 0)[~void])
    np.testing.assert_array_equal(label[~void] > 0, (instance > 0)[~void])
    np.testing.assert_array_equal(kind[~void & (instance == 0)], semantic[~void & (instance == 0)])
    pairs = pairs_of(instance[instance > 0], panoptic[instance > 0])
    labels = [b for _, b in pairs if b != SPEC.void]
    assert len(pairs) == len({a for a, _ in pairs})  # an instance has one label, so it has one class
    assert len(labels) == len(set(labels))  # two instances have two labels
    assert instance.max() <= (config.top_k or instance.size)


@FEWER
@given(network_maps(), KNOBS)
def test_small_segments_vanish_and_no_others(maps, config):
    found = {name: x[0] for name, x in group([maps], config).items()}
    semantic, instance, panoptic = found["semantic"], found["instance"], found["panoptic"]
    for number in np.unique(instance[instance > 0]):
        vanishes = np.sum(instance == number) < config.thing_area
        assert np.all((panoptic == SPEC.void)[instance == number] == vanishes)
    for kind in np.unique(semantic[instance == 0]):
        mask = (semantic == kind) & (instance == 0)
        vanishes = SPEC.things[kind] or mask.sum() < config.stuff_area  # a thing without a centre is void
        assert np.all((panoptic == SPEC.void)[mask] == vanishes)


@FEWER
@given(network_maps(), KNOBS)
def test_scores_are_of_instances(maps, config):
    found = {name: x[0] for name, x in group([maps], config).items()}
    there = np.isin(np.arange(1, len(found["score"]) + 1), found["instance"])
    np.testing.assert_array_equal(found["score"] > 0, there)
    assert np.all(found["score"] <= found["center_score"])
    assert np.all((found["center_score"] == 0) | (found["center_score"] > config.center_threshold))
    assert np.all(np.diff((found["center_score"] > 0).astype(int)) <= 0)  # centres come first


@FEWER
@given(st.sampled_from(SIZES).flatmap(lambda size: st.lists(network_maps(size), min_size=2, max_size=3)), KNOBS)
def test_other_photos_of_a_batch_change_nothing(photos, config):
    batch = group(photos, config)
    for i, maps in enumerate(photos):
        for name, x in group([maps], config).items():
            np.testing.assert_array_equal(batch[name][i], x[0])


@FEWER
@given(network_maps(), KNOBS, st.integers(0, 5), st.integers(0, 5))
def test_a_shift_of_the_maps_shifts_the_segments(maps, config, down, right):
    """Around the photo there are stuff of class 0 and no heat. The photo has neither."""
    maps[SEMANTIC][..., 0] -= 5
    photo = group([maps], config)
    height, width = maps[CENTER].shape[:2]
    window = slice(down, down + height), slice(right, right + width)
    canvas = {name: np.zeros([30, 24, x.shape[-1]], np.float32) for name, x in maps.items()}
    canvas[SEMANTIC][..., 0] = 1
    for name, x in maps.items():
        canvas[name][window] = x
    moved = group([canvas], config)
    for name in ("semantic", "instance", "panoptic"):
        np.testing.assert_array_equal(moved[name][0][window], photo[name][0])
    count = int(photo["instance"].max())
    np.testing.assert_allclose(moved["score"][0, :count], photo["score"][0, :count], rtol=1e-5)


def near_ties(maps, config):
    """Whether some pixel points to where two centres are equally near, up to rounding."""
    centers, scores, _ = (x.numpy()[0] for x in find_centers(tf.constant(maps[CENTER][None, ..., 0]), config, 300))
    place = np.stack(np.indices(maps[OFFSET].shape[:2]), -1) + maps[OFFSET].astype(float)
    distance = np.sort(np.sum((place[..., None, :] - centers[scores > 0]) ** 2, -1), -1)
    return bool(np.any(distance[..., 1:2] - distance[..., :1] < 1e-3))


@FEWER
@given(network_maps(ties=False), KNOBS)
def test_mirrored_maps_give_mirrored_segments(maps, config):
    """Numbers of instances follow raster order, so they differ. Of ties the first in raster order wins."""
    assume(not near_ties(maps, config))
    turned = {name: x[:, ::-1] * np.float32([1, -1] if name == OFFSET else 1) for name, x in maps.items()}
    plain, mirrored = ({name: x[0] for name, x in group([m], config).items()} for m in (maps, turned))
    mirrored.update({name: mirrored[name][:, ::-1] for name in ("semantic", "instance", "panoptic")})
    np.testing.assert_array_equal(mirrored["semantic"], plain["semantic"])
    np.testing.assert_array_equal(*(result["panoptic"] // SPEC.label_divisor for result in (mirrored, plain)))
    for name in ("instance", "panoptic"):
        pairs = pairs_of(mirrored[name], plain[name])
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    scores = [np.append(0, result["score"])[result["instance"]] for result in (mirrored, plain)]
    np.testing.assert_allclose(*scores, rtol=1e-5)


@FEWER
@given(network_maps(), KNOBS)
def test_without_instances_every_class_is_one_segment(maps, config):
    semantic = maps[SEMANTIC].argmax(-1)
    found = group([{SEMANTIC: maps[SEMANTIC]}], config)
    area = np.bincount(semantic.ravel(), minlength=SPEC.num_classes)[semantic]
    wanted = np.where(area >= config.stuff_area, semantic * SPEC.label_divisor, SPEC.void)
    np.testing.assert_array_equal(found["panoptic"][0], wanted)
    assert not found["instance"].any() and not found["score"].any()


# === Pieces of instances ===


def in_pieces(panoptic, config, scale):
    """`of_pieces`, instance by instance."""
    found, others = panoptic.copy(), []
    for label in np.unique(panoptic[panoptic % SPEC.label_divisor > 0]):
        parts, count = components(panoptic == label)
        areas = np.bincount(parts.ravel())[1:]
        for i in range(count):
            mask = parts == i + 1
            if areas[i] * scale**2 < config.thing_area or (config.pieces == "largest" and i != areas.argmax()):
                found[mask] = SPEC.void
            if i != areas.argmax():
                others.append((np.flatnonzero(mask)[0], label // SPEC.label_divisor, mask))
    for number, (_, kind, mask) in enumerate(sorted(others, key=lambda one: one[0]), 1):
        new = (panoptic % SPEC.label_divisor).max() + number
        if config.pieces == "split" and new < SPEC.label_divisor and SPEC.void not in found[mask]:
            found[mask] = kind * SPEC.label_divisor + new
    return found


@pytest.mark.parametrize("examples", LONG)
def test_pieces_are_those_of_scipy(examples):
    """Of small maps with few labels, so that they wind; 995 leaves labels for four more instances."""

    @settings(RUNS, max_examples=examples)
    @given(st.data())
    def check(data):
        size = data.draw(st.tuples(*[st.integers(1, 25)] * 2))
        labels = np.array(data.draw(st.lists(st.sampled_from([0, 1001, 1002, 3007, 1995, SPEC.void]), min_size=1)))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        panoptic = rng.choice(labels, size).astype(np.int32)
        config = PostprocessConfig(
            pieces=data.draw(st.sampled_from(["largest", "split"])), thing_area=int(rng.integers(9))
        )
        found = of_pieces(tf.constant(panoptic), SPEC, config, 1.5).numpy()
        np.testing.assert_array_equal(found, in_pieces(panoptic, config, 1.5))

    check()


def test_a_spiral_is_one_piece():
    """Whose ends are far apart, along it and in runs."""
    panoptic = np.zeros([61, 61], np.int32)
    for i in range(0, 30, 2):
        panoptic[i, max(i - 2, 0) : 61 - i] = panoptic[60 - i, i : 61 - i] = 1001
        panoptic[i : 61 - i, 60 - i] = panoptic[i + 2 : 61 - i, i] = 1001
    assert components(panoptic)[1] == 1
    found = of_pieces(tf.constant(panoptic), SPEC, PostprocessConfig(pieces="largest"), 1.0)
    np.testing.assert_array_equal(found, panoptic)


# === Resizing of a network's maps ===


def growth(old, new):
    """New pixels from one old pixel to the next. An even whole multiple aligns the first pixels, others the corners."""
    if new % 2 == 0 and new % old == 0:
        return new / old
    return (new - 1) / max(old - 1, 1)


def interpolated(x, size):
    """Interpolation of x [h, w, C] in float64, one axis after the other."""
    for axis, new in enumerate(size):
        old = x.shape[axis]
        place = np.minimum(np.arange(new) / max(growth(old, new), 1e-9), old - 1)
        x = np.apply_along_axis(lambda line: np.interp(place, np.arange(old), line), axis, x)
    return x


@RUNS
@given(st.data())
def test_maps_are_interpolated(kind_of_device, data):
    rows, columns = data.draw(st.tuples(*[st.integers(1, 12)] * 2))
    canvas, stride = data.draw(st.tuples(*[st.integers(1, 40)] * 2)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    maps = {name: rng.normal(size=[2, rows, columns, c]) for name, c in ((SEMANTIC, 3), (CENTER, 1), (OFFSET, 2))}
    found = upsample({name: tf.constant(x, tf.float32) for name, x in maps.items()}, canvas, stride)
    size = [-(-side // stride) for side in canvas]
    step = [growth(rows, canvas[0]), growth(columns, canvas[1])]
    for name, x in maps.items():
        wanted = np.stack([interpolated(one, size) for one in x]) * (step if name == OFFSET else 1)
        np.testing.assert_allclose(found[name], wanted, atol=1e-4 * max(*step, 1))
        if name != OFFSET:
            assert found[name].numpy().min() >= x.min() - 1e-5 and found[name].numpy().max() <= x.max() + 1e-5


# === Photos to the canvas and back ===

PHOTO = st.tuples(*[st.integers(1, 150)] * 2)
CANVAS = st.tuples(*[st.integers(9, 70)] * 2)


def coordinates(size):
    """int32 [h, w]: every pixel is labelled by its own place, so that a resized map tells where its labels are from."""
    return np.arange(size[0] * size[1], dtype=np.int32).reshape(size)


def places(labels, size):
    """Rows and columns that `coordinates` of a photo of that size came from."""
    return np.divmod(np.asarray(labels), size[1])


@RUNS
@given(PHOTO, CANVAS)
@example((66, 40), (65, 65))  # a pixel higher and a pixel wider than the canvas
@example((40, 66), (65, 65))
def test_a_photo_fills_the_canvas_and_keeps_its_shape(size, canvas):
    content = content_size(size, canvas).numpy()
    assert np.all(content >= 1) and np.all(content <= canvas)
    assert min(canvas - content) <= 1
    ratio = min(c / s for c, s in zip(canvas, size))
    np.testing.assert_allclose(content, np.maximum(np.multiply(size, ratio), 1), atol=1 + 1e-3)


@RUNS
@given(PHOTO, PHOTO, CANVAS, st.tuples(*[st.integers(-5, 5)] * 2))
def test_each_pixel_of_the_canvas_has_its_nearest_label(size, content, canvas, corner):
    """The nearest pixel is the one that the pixel's centre falls in. On the edge of two pixels it is either."""
    found = place_labels(tf.constant(coordinates(size)), tf.constant(content), canvas, corner, fill=-1).numpy()
    inside = np.ones(canvas, bool)
    for axis, label in enumerate(places(found, size)):
        place = np.arange(canvas[axis]) + corner[axis]
        near, rest = np.divmod((2 * place + 1) * size[axis], 2 * content[axis])
        there = (place >= 0) & (place < content[axis])
        near, there, rest = (np.expand_dims(x, 1 - axis) for x in (near, there, rest))
        assert np.all((label == near) | ((rest == 0) & (label == near - 1)) | (found == -1))
        inside &= there
    np.testing.assert_array_equal(found >= 0, inside)
    black = place_image(tf.zeros([*size, 3], tf.uint8), tf.constant(content), canvas, corner)
    np.testing.assert_allclose(black, np.repeat(np.where(inside, -1.0, 0.0)[..., None], 3, -1), atol=1e-6)


@RUNS
@given(PHOTO, CANVAS)
@example((66, 66), (65, 65))
def test_labels_come_back_to_where_they_were(size, canvas):
    """To within a pixel of the photo or of the canvas, whichever is larger. Padding never comes back."""
    content = content_size(size, canvas)
    there = place_labels(tf.constant(coordinates(size)), content, canvas, fill=-1)
    back = restore(there, content, size).numpy()
    assert back.shape == size and back.min() >= 0
    for axis, label in enumerate(places(back, size)):
        away = np.abs(label - np.indices(size)[axis])
        assert away.max() <= max(size[axis] / int(content[axis]), 1)
    if tuple(content.numpy()) == size:
        np.testing.assert_array_equal(back, coordinates(size))


@st.composite
def random_photos(draw):
    """uint8 [h, w, 3] of blocks."""
    height, width = draw(PHOTO)
    blocks = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 256, [9, 9, 3], np.uint8)
    return blocks[np.ix_(np.arange(height) * 9 // height, np.arange(width) * 9 // width)]


@RUNS
@given(random_photos(), CANVAS)
def test_a_photo_is_resized_as_pillow_resizes_it(photo, canvas):
    image, content = (x.numpy() for x in preprocess(tf.constant(photo), canvas))
    for channel in range(3):
        resized = Image.fromarray(photo[..., channel].astype(np.float32)).resize(content[::-1].tolist(), Image.BILINEAR)
        wanted = np.zeros(canvas)
        wanted[: content[0], : content[1]] = np.asarray(resized) / 127.5 - 1
        np.testing.assert_allclose(image[..., channel], wanted, atol=1e-3)


@RUNS
@given(random_photos(), CANVAS)
def test_a_mirrored_photo_gives_the_mirrored_canvas(photo, canvas):
    """Up to the rounding of float32."""
    content = content_size(photo.shape[:2], canvas)
    plain, mirrored = (place_image(tf.constant(p), content, content.numpy()) for p in (photo, photo[:, ::-1]))
    np.testing.assert_allclose(mirrored[:, ::-1], plain, atol=1e-4)
