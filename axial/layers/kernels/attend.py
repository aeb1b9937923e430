"""Attention itself: a kernel for the outputs, and one for the gradients, which makes the maps again.

A program has one window in the chip's fast memory and makes its maps head by head. They are [keys, queries]: so a
softmax adds registers, where a sum along lanes would take the unit that turns them seventeen times as long as a turn
does. A relative term is a product of all q with the whole table, sheared into a map (axial/layers/kernels/shear.py).
Heads run in step, each a few operations behind the one before it (`run_in_step`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from axial.layers.kernels.shear import LANES, dot, dot_turned, join, reverse, reverse_turned
from axial.layers.kernels.window import (
    Gradient,
    add_to_row,
    clear_at_the_start,
    embed,
    flip_matrix,
    float_shape,
    group_lanes,
    pad_rows,
    run_in_step,
    run_programs,
    turn_over,
    turned_tables,
)


class Logits:
    """What w of a group of heads is made of.

    Attributes:
        q_turned, k_turned: float32 [C, width].
    """

    def __init__(self, window, q, k, scales, first):
        """q, k: float32 [height, C]; scales: ref [terms, H]; first: the number of the group's first head."""
        self.window, self.channels = window, q.shape[1]
        lane = lax.broadcasted_iota(jnp.int32, (1, self.channels), 1)

        def scaled(x, term):
            of_lane = jnp.zeros(lane.shape, jnp.float32)
            for i in range(self.channels // window.depth):
                of_lane = jnp.where(lane >= i * window.depth, scales[term, first + i], of_lane)
            return (x * of_lane).astype(window.dtype)

        self.k, self.k_scaled, self.q_scaled = k.astype(window.dtype), scaled(k, 2), scaled(q, 1)
        self.q_turned, self.k_turned = turn_over(q, window.of_keys.width), turn_over(k, window.of_queries.width)

    def weigh(self, rows, scale, tables, block):
        """w, float32 [keys, queries], of the head of some rows of C, in steps; `scale` is of the content term."""
        window, by_query, by_key = self.window, self.window.of_queries, self.window.of_keys

        def place(x):
            return embed(x, rows, self.channels).astype(window.dtype)

        logits = dot(self.k, place(self.q_turned[rows] * scale))
        key_term = dot(self.k_scaled, place(tables[1][...]))
        query_term = dot(self.q_scaled, place(tables[0][...]))
        yield
        logits += by_key.to_map(key_term)
        logits += turn_over(by_query.to_map(query_term), by_key.width)[: by_key.height]
        yield
        logits = window.mask(logits, block)
        w = jnp.exp(logits - jnp.max(logits, 0, keepdims=True))
        return w * (1.0 / jnp.sum(w, 0, keepdims=True))


def _forward(window, *refs):
    """One window's outputs, and their sums.

    Refs: scales, x, affine, the tables of both terms, of values, flip; outputs, sums [4, H*E] of the content, of its
    squares, of the positions, of their squares.
    """
    scales, x, affine, *tables, value_table, flip, content, position, sums = refs
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    height, flip = by_query.height, flip[...]

    def cast(x):
        return x.astype(window.dtype)

    clear_at_the_start(sums)

    @functools.cache
    def logits_of(start):
        lanes = slice(start, start + group_lanes(window.heads, window.depth))
        q = window.read(x, affine, window.query_rows(block), window.lanes_of("q", lanes))
        k = window.read(x, affine, window.key_rows(block), window.lanes_of("k", lanes))
        return Logits(window, q, k, scales, start // window.depth)

    @functools.cache
    def values_of(start):
        """v [C, keys], and where the outputs [E, queries] of the group's heads are put, positions in reverse."""
        lanes = slice(start, start + group_lanes(window.heads, window.value_depth))
        v = window.read(x, affine, window.key_rows(block), window.lanes_of("v", lanes))
        return turn_over(v, by_query.width), [], []

    def run(head):
        lanes, rows = window.part(head, window.depth)
        w = yield from logits_of(lanes.start).weigh(rows, scales[0, head], tables, block)
        w = pad_rows(cast(w), by_query.width)
        yield
        lanes, rows = window.part(head, window.value_depth)
        v_turned, contents, positions = values_of(lanes.start)
        contents.append(dot(cast(v_turned[rows]), w))
        reversed_ = reverse_turned(w, height, flip)
        yield
        sheared = pad_rows(cast(by_query.to_offsets(reversed_)), by_key.width)
        yield
        positions.append(dot_turned(value_table[...], sheared))
        if rows.stop == len(v_turned):
            outputs = jnp.transpose(join(contents, 0))[:height], reverse_turned(cast(join(positions, 0)), height, flip)
            for i, (ref, y) in enumerate(zip((content, position), outputs)):
                ref[0, :, lanes] = cast(y)
                if window.length % height:
                    y = jnp.where(window.of_axis(block * window.queries, y.shape), y, 0.0)
                for row, z in ((2 * i, y), (2 * i + 1, y * y)):
                    sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

    run_in_step(map(run, range(window.heads)))


def _backward(window, *refs):
    """One window's gradients; those of tables, affine and scales are summed over the windows.

    Refs: scales, x, d_content, d_position, affine, the tables of both terms, both for a map sheared, of values, flip;
    d_x, d_affine, d of the three tables [D or E, backward], d_scales [terms*H, 128], of which a head's is the sum of a
    row; the scratch of `Gradient`.
    """
    scales, x, d_content, d_position, affine, *tables, query_back, key_back, value_table, flip = refs[:11]
    d_x, d_affine, d_query, d_key, d_value, d_scales, total = refs[11:]
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    query_rows, key_rows = window.query_rows(block), window.key_rows(block)
    depth, value_depth, flip = window.depth, window.value_depth, flip[...]

    def cast(x):
        return x.astype(window.dtype)

    clear_at_the_start(d_query, d_key, d_value, d_scales)
    gradient = Gradient(window, x, affine, d_x, d_affine, total)

    def reversed_and_turned(x, width):
        return turn_over(reverse(pad_rows(cast(x), width), len(x), flip), width)

    def upright(parts, reversed_, height):
        """[height, C] of the gradients [D, width] of a group's heads, and of those in reverse."""
        return jnp.transpose(join(parts, 0))[:height] + reverse_turned(cast(join(reversed_, 0)), height, flip)

    @functools.cache
    def logits_of(start):
        """Of a group: `Logits`, q and k [C, .] in reverse, lists of its heads' d_q and d_k, the same in reverse."""
        lanes = slice(start, start + group_lanes(window.heads, depth))
        q = window.read(x, affine, query_rows, window.lanes_of("q", lanes))
        k = window.read(x, affine, key_rows, window.lanes_of("k", lanes))
        logits = Logits(window, q, k, scales, start // depth)
        reversed_ = reversed_and_turned(q, by_key.width), reversed_and_turned(k, by_query.width)
        return logits, reversed_, ([], []), ([], [])

    @functools.cache
    def values_of(start):
        """Of a group: v, d_position, d_content [C, .], d_position the same in reverse, a list of its heads' d_v."""
        lanes = slice(start, start + group_lanes(window.heads, value_depth))
        d1, d2 = (window.read_queries(d, block, lanes) for d in (d_content, d_position))
        turned, reversed_ = turn_over(d1, by_key.width), reversed_and_turned(d2, by_key.width)
        v = window.read(x, affine, key_rows, window.lanes_of("v", lanes))
        return cast(v), cast(d2), turned, reversed_, []

    def run(head):
        lanes, rows = window.part(head, depth)
        value_lanes, value_rows = window.part(head, value_depth)
        logits, (q_reversed, k_reversed), (d_qs, d_ks), (d_qs_reversed, d_ks_reversed) = logits_of(lanes.start)
        scale = [scales[i, head] for i in range(3)]
        w = yield from logits.weigh(rows, scale[0], tables, block)

        v, d2, d1_turned, d2_reversed, d_vs = values_of(value_lanes.start)

        def place(x):
            return cast(embed(x, value_rows, len(d1_turned)))

        position_term = dot(d2, place(value_table[...]))
        d_w = dot(v, place(d1_turned[value_rows]))
        yield
        d_w += turn_over(by_query.to_map(position_term), by_key.width)[: by_key.height]
        yield
        d_map = pad_rows(cast(w * (d_w - jnp.sum(w * d_w, 0, keepdims=True))), by_query.width)
        w = pad_rows(cast(w), by_query.width)
        d_vs.append(dot_turned(cast(d1_turned[value_rows]), w))
        w, of_queries = (reverse_turned(x, by_query.height, flip) for x in (w, d_map))
        of_keys = reverse(d_map, by_key.height, flip)
        d_ks.append(dot_turned(cast(logits.q_turned[rows] * scale[0]), d_map))
        content_term = dot(cast(logits.k_turned[rows]), d_map)
        d_qs.append(content_term * scale[0])
        yield
        w, of_queries = (pad_rows(cast(by_query.to_offsets(x)), by_key.width) for x in (w, of_queries))
        of_keys = pad_rows(cast(by_key.to_offsets(of_keys)), by_query.width)
        yield
        d_value[...] += dot(cast(d2_reversed[value_rows]), w)
        d_query[...] += dot(cast(q_reversed[rows] * scale[1]), of_queries)
        d_key[...] += dot(cast(k_reversed[rows] * scale[2]), of_keys)
        query_term, key_term = dot_turned(query_back[...], of_queries), dot_turned(key_back[...], of_keys)
        d_qs_reversed.append(query_term * scale[1])
        d_ks_reversed.append(key_term * scale[2])
        for i, product in enumerate(
            (content_term * logits.q_turned[rows], query_term * q_reversed[rows], key_term * k_reversed[rows])
        ):
            add_to_row(d_scales, i * window.heads + head, product)

        if rows.stop == logits.channels:
            gradient.add("q", lanes, query_rows, upright(d_qs, d_qs_reversed, by_query.height))
            gradient.add("k", lanes, key_rows, upright(d_ks, d_ks_reversed, by_key.height))
        if value_rows.stop == len(d1_turned):
            gradient.add("v", value_lanes, key_rows, jnp.transpose(join(d_vs, 0))[: by_key.height])

    run_in_step(map(run, range(window.heads)))
    gradient.finish()


def attend(window, interpret, scales, x, affine, rows):
    """Content and position [A, ., H*E], and the sums of both and of their squares, [4, H*E]; scales is [terms, H]."""
    size = window.heads * window.value_depth
    output = jax.ShapeDtypeStruct((x.shape[0], window.length, size), window.dtype)
    small = [affine, *turned_tables(window, rows, "query", "key", "value_back"), flip_matrix(window)]
    return run_programs(_forward, window, interpret, [scales], [x], small, [output] * 2, [float_shape(4, size)])


def attend_gradient(window, interpret, scales, x, affine, d, rows):
    """d_x, d_affine, d of the rows '_back' of the three tables [D or E, offsets], of scales [terms*H, 128]."""
    tables = turned_tables(window, rows, "query", "key", "query_back", "key_back", "value")
    small = [affine, *tables, flip_matrix(window)]
    shapes = [rows[name].shape[::-1] for name in ("query_back", "key_back", "value_back")]
    sums = [float_shape(*shape) for shape in (affine.shape, *shapes, (3 * window.heads, LANES))]
    scratch = [(window.rows, window.channels)]
    return run_programs(_backward, window, interpret, [scales], [x, *d], small, [x], sums, scratch)
