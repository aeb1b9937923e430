"""Softmax and outputs: one kernel for the outputs, and one for the gradients, which recomputes the maps.

A program computes one window in fast memory and makes its maps head by head. A map is [keys, queries], because the sums
of a softmax then add registers, while a sum along lanes would be slow. A relative term is a product of all q with the
whole table, sheared into a map (`shear.py`). The heads run in step, each a few operations behind the one before it
(`run_in_step`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from axial.layers.attention.tpu.shear import LANES, dot, dot_turned, join, reverse, reverse_turned
from axial.layers.attention.tpu.tiling import (
    Gradient,
    Operands,
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
    window_of_program,
)


class Logits:
    """The factors of the logits of a group of heads.

    Args:
        tiling: `Tiling`.
        q, k: float32 [height, C].
        scales: ref [terms, H].
        first: number of the group's first head.

    Attributes:
        q_turned, k_turned: transposes of q and k, float32 [C, width].
    """

    def __init__(self, tiling, *, q, k, scales, first):
        self.tiling, self.channels = tiling, q.shape[1]
        lane = lax.broadcasted_iota(jnp.int32, (1, self.channels), 1)

        def scaled(x, term):
            of_lane = jnp.zeros(lane.shape, jnp.float32)
            for i in range(self.channels // tiling.depth):
                of_lane = jnp.where(lane >= i * tiling.depth, scales[term, first + i], of_lane)
            return (x * of_lane).astype(tiling.dtype)

        self.k, self.k_scaled, self.q_scaled = k.astype(tiling.dtype), scaled(k, 2), scaled(q, 1)
        self.q_turned, self.k_turned = turn_over(q, tiling.of_keys.width), turn_over(k, tiling.of_queries.width)

    def weigh(self, rows, scale, tables, block):
        """w, float32 [keys, queries], of the head with the given rows of C, in steps. `scale` is the content term's."""
        tiling, by_query, by_key = self.tiling, self.tiling.of_queries, self.tiling.of_keys

        def place(x):
            return embed(x, rows, self.channels).astype(tiling.dtype)

        logits = dot(self.k, place(self.q_turned[rows] * scale))
        key_term = dot(self.k_scaled, place(tables[1][...]))
        query_term = dot(self.q_scaled, place(tables[0][...]))
        yield
        logits += by_key.to_map(key_term)
        logits += turn_over(by_query.to_map(query_term), by_key.width)[: by_key.height]
        yield
        logits = tiling.mask(logits, block)
        w = jnp.exp(logits - jnp.max(logits, 0, keepdims=True))
        return w * (1.0 / jnp.sum(w, 0, keepdims=True))


def _forward(tiling, *refs):
    """One window's outputs and their sums.

    Refs: scales, x, affine, the tables of the query term, the key term and the values, flip. Then the outputs content
    and position, and sums [4, H*E]: of the content, its squares, the positions, their squares.
    """
    scales, x, affine, *tables, value_table, flip, content, position, sums = refs
    by_query, by_key, block = tiling.of_queries, tiling.of_keys, window_of_program()
    height, flip = by_query.height, flip[...]

    def cast(x):
        return x.astype(tiling.dtype)

    clear_at_the_start(sums)

    @functools.cache
    def logits_of(start):
        lanes = slice(start, start + group_lanes(tiling.heads, tiling.depth))
        q = tiling.read(x, affine, tiling.query_rows(block), tiling.lanes_of("q", lanes))
        k = tiling.read(x, affine, tiling.key_rows(block), tiling.lanes_of("k", lanes))
        return Logits(tiling, q=q, k=k, scales=scales, first=start // tiling.depth)

    @functools.cache
    def values_of(start):
        """v [C, keys], and two lists for the outputs [E, queries] of the group's heads. Positions are in reverse."""
        lanes = slice(start, start + group_lanes(tiling.heads, tiling.value_depth))
        v = tiling.read(x, affine, tiling.key_rows(block), tiling.lanes_of("v", lanes))
        return turn_over(v, by_query.width), [], []

    def run(head):
        lanes, rows = tiling.part(head, tiling.depth)
        w = yield from logits_of(lanes.start).weigh(rows, scales[0, head], tables, block)
        w = pad_rows(cast(w), by_query.width)
        yield
        lanes, rows = tiling.part(head, tiling.value_depth)
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
                if tiling.length % height:
                    y = jnp.where(tiling.of_axis(block * tiling.queries, y.shape), y, 0.0)
                for row, z in ((2 * i, y), (2 * i + 1, y * y)):
                    sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

    run_in_step(map(run, range(tiling.heads)))


def _backward(tiling, *refs):
    """One window's gradients. Those of tables, affine and scales are summed over the windows.

    Refs: scales, x, d_content, d_position, affine, the tables of both logit terms, the same two for sheared maps, the
    table of the values, flip. Then d_x, d_affine, the gradients of the three tables [D or E, backward], d_scales
    [terms*H, 128], whose rows are to be summed, and the scratch of `Gradient`.
    """
    scales, x, d_content, d_position, affine, *tables, query_back, key_back, value_table, flip = refs[:11]
    d_x, d_affine, d_query, d_key, d_value, d_scales, total = refs[11:]
    by_query, by_key, block = tiling.of_queries, tiling.of_keys, window_of_program()
    query_rows, key_rows = tiling.query_rows(block), tiling.key_rows(block)
    depth, value_depth, flip = tiling.depth, tiling.value_depth, flip[...]

    def cast(x):
        return x.astype(tiling.dtype)

    clear_at_the_start(d_query, d_key, d_value, d_scales)
    gradient = Gradient(tiling, x=x, affine=affine, d_x=d_x, d_affine=d_affine, total=total)

    def reversed_and_turned(x, width):
        return turn_over(reverse(pad_rows(cast(x), width), len(x), flip), width)

    def upright(parts, reversed_, height):
        """[height, C]: the sum of two lists of gradients [D, width] of a group's heads, the second in reverse."""
        return jnp.transpose(join(parts, 0))[:height] + reverse_turned(cast(join(reversed_, 0)), height, flip)

    @functools.cache
    def logits_of(start):
        """For a group: `Logits`, q and k [C, .] in reverse, lists for its heads' d_q and d_k, two more in reverse."""
        lanes = slice(start, start + group_lanes(tiling.heads, depth))
        q = tiling.read(x, affine, query_rows, tiling.lanes_of("q", lanes))
        k = tiling.read(x, affine, key_rows, tiling.lanes_of("k", lanes))
        logits = Logits(tiling, q=q, k=k, scales=scales, first=start // depth)
        reversed_ = reversed_and_turned(q, by_key.width), reversed_and_turned(k, by_query.width)
        return logits, reversed_, ([], []), ([], [])

    @functools.cache
    def values_of(start):
        """For a group: v, d_position, d_content [C, .], d_position [C, .] in reverse, a list for its heads' d_v."""
        lanes = slice(start, start + group_lanes(tiling.heads, value_depth))
        d1, d2 = (tiling.read_queries(d, block, lanes) for d in (d_content, d_position))
        turned, reversed_ = turn_over(d1, by_key.width), reversed_and_turned(d2, by_key.width)
        v = tiling.read(x, affine, key_rows, tiling.lanes_of("v", lanes))
        return cast(v), cast(d2), turned, reversed_, []

    def run(head):
        lanes, rows = tiling.part(head, depth)
        value_lanes, value_rows = tiling.part(head, value_depth)
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
            add_to_row(d_scales, i * tiling.heads + head, product)

        if rows.stop == logits.channels:
            gradient.add("q", lanes, query_rows, upright(d_qs, d_qs_reversed, by_query.height))
            gradient.add("k", lanes, key_rows, upright(d_ks, d_ks_reversed, by_key.height))
        if value_rows.stop == len(d1_turned):
            gradient.add("v", value_lanes, key_rows, jnp.transpose(join(d_vs, 0))[: by_key.height])

    run_in_step(map(run, range(tiling.heads)))
    gradient.finish()


def outputs(tiling, interpret, scales, x, affine, rows):
    """Content and position [A, ., H*E], and the sums of both and of their squares, [4, H*E].

    Args:
        tiling: `Tiling`.
        interpret: whether jax computes it on a CPU.
        scales: [terms, H].
        x, affine: q, k and v, and their batch norm.
        rows: dict of the table rows at `Tiling.offsets`.
    """
    size, depth, value_depth = tiling.heads * tiling.value_depth, tiling.depth, tiling.value_depth
    output = jax.ShapeDtypeStruct((x.shape[0], tiling.length, size), tiling.dtype)
    tables = turned_tables(tiling, rows, "query", "key", "value_back")
    operands = Operands(
        scalars=[scales],
        arrays=[x],
        small=[affine, *tables, flip_matrix(tiling)],
        outputs=[output] * 2,
        sums=[float_shape(4, size)],
    )
    flops = tiling.map_flops(depth + value_depth) + tiling.offset_flops(2 * depth + value_depth)
    return run_programs(_forward, tiling, interpret, operands, flops=flops, exponentials=tiling.exponentials)


def outputs_gradient(tiling, interpret, scales, x, affine, d, rows):
    """d_x, d_affine, the gradients of the three tables' rows '_back' [D or E, offsets], d_scales [terms*H, 128].

    Args: see `outputs`, and d, the gradients of content and position.
    """
    depth, value_depth = tiling.depth, tiling.value_depth
    tables = turned_tables(tiling, rows, "query", "key", "query_back", "key_back", "value")
    shapes = [rows[name].shape[::-1] for name in ("query_back", "key_back", "value_back")]
    operands = Operands(
        scalars=[scales],
        arrays=[x, *d],
        small=[affine, *tables, flip_matrix(tiling)],
        outputs=[x],
        sums=[float_shape(*shape) for shape in (affine.shape, *shapes, (3 * tiling.heads, LANES))],
        scratch=[(tiling.rows, tiling.channels)],
    )
    flops = tiling.map_flops(3 * depth + 2 * value_depth) + tiling.offset_flops(6 * depth + 2 * value_depth)
    return run_programs(_backward, tiling, interpret, operands, flops=flops, exponentials=tiling.exponentials)
