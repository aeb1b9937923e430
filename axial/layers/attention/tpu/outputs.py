"""Softmax and outputs: a kernel for the outputs, and a kernel for the gradients, which recomputes the maps.

A map is [slots, queries], because the sums of its softmax then add whole registers. Sums along lanes would be slow. The
kernels interleave the steps of several heads (`run_in_step`).
"""

import collections
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from axial.layers.attention.tpu.programs import Operands, float_shape, run_programs
from axial.layers.attention.tpu.shear import LANES, dot, dot_turned, turn_over, up
from axial.layers.attention.tpu.tiling import (
    ROWS,
    Gradient,
    Group,
    Normalized,
    chunks,
    clear,
    only,
    run_windows,
    whole_registers,
    window_rows,
)
from axial.layers.masking import MASKED


class Logits(Group):
    """The logits of a group of heads in a window."""

    def weigh(self, lanes, mask):
        """Generator that returns w, float32 [S, L], and 1 / sum(w) [1, L], of the head with these `lanes` of the group.

        The scale 1 / sum(w) is applied to the results of products with w, which have fewer rows than w.
        """
        shear, k = self.tiling.shear, only(self.k, lanes)
        content, key_term = dot(k, self.content), dot(k, self.tables[1])
        query_term = dot(only(self.tables[0], lanes), self.q)
        yield
        logits = shear.fold(content) + mask
        logits += shear.rotate(shear.fold(key_term, rotated=True))
        logits += shear.to_slots(query_term)
        yield
        w = jnp.exp(logits - jnp.max(logits, 0, keepdims=True))
        return w, 1.0 / jnp.sum(w, 0, keepdims=True)


def _forward(tiling, program, *refs):
    """The outputs, and the sums of their batch norms.

    Input refs: x three times, affine, the tables of the query term, the key term and the values. Output refs: the
    content and the position output, and the sums [4, H*E] of content, content^2, position and position^2. The
    other refs are scratch memory.
    """
    before, center, after, affine, *tables, value_table, content, position, sums = refs[:10]
    pixels = Normalized(*refs[10:])
    pl.when(program.begins)(lambda: clear(sums))

    def window_steps(window):
        first = program.first + window * LANES
        mask, inside = (1.0 - tiling.visible(first)) * MASKED, tiling.inside(first, LANES)

        @functools.cache
        def logits_of(start, stop):
            return Logits(tiling, pixels, tables, window=window, lanes=slice(start, stop))

        @functools.cache
        def values_of(start, stop):
            """v [C, M] of a group, and lists of its heads' content and position outputs [E, L]."""
            return turn_over(pixels.v[window_rows(window, 2 * tiling.halo), start:stop]), [], []

        def run(head):
            lanes, rows = tiling.group(head, tiling.depth)
            w, scale = yield from logits_of(lanes.start, lanes.stop).weigh(rows, mask)
            yield
            lanes, rows = tiling.group(head, tiling.value_depth)
            v, contents, positions = values_of(lanes.start, lanes.stop)
            contents.append(dot(tiling.cast(v[rows, : tiling.shear.keys]), tiling.cast(tiling.shear.unfold(w))) * scale)
            sheared = tiling.cast(tiling.shear.to_band(w))
            yield
            positions.append(dot(value_table[...], sheared) * scale)
            if tiling.ends_group(head, tiling.value_depth):
                lanes = slice(lanes.start, min(lanes.stop, content.shape[1]))
                outputs = [jnp.transpose(whole_registers(heads)) for heads in (contents, positions)]
                for i, (ref, y) in enumerate(zip((content, position), outputs)):
                    y = y[:, : lanes.stop - lanes.start]
                    ref[window_rows(window), lanes] = tiling.cast(y)
                    y = jnp.where(inside, y, 0.0)
                    for row, z in ((2 * i, y), (2 * i + 1, y * y)):
                        sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)

        return run

    run_windows(tiling, program, pixels, window_steps, around=(before, center, after), affine=affine)


_Refs = collections.namedtuple(
    "_Refs",
    "before center after d_total content position affine factors query turned_query key value d_x d_affine d_query "
    "d_key d_value normal_content normal_q normal_k normal_v total query_total key_total value_total",
)


def _backward(tiling, program, *refs):
    """The gradients of x, of its batch norm and of the tables.

    Input refs: x three times, the gradient of the sum of the normalised outputs, content, position, affine, factors,
    the table of the query term [C, B] and its transpose, the tables of the key term [C, J] and of the values [B, C].
    Output refs: d_x, d_affine, the gradients of the three tables ([E, B] for the values). The other refs are scratch
    memory.
    """
    refs = _Refs(*refs)
    totals = refs.query_total, refs.key_total, refs.value_total
    pixels = Normalized(refs.normal_content, refs.normal_q, refs.normal_k, refs.normal_v)
    gradient = Gradient(
        tiling, program, x=refs.before, affine=refs.affine, d_x=refs.d_x, d_affine=refs.d_affine, total=refs.total
    )
    pl.when(program.begins)(lambda: clear(*totals))

    def window_steps(window):
        return _WindowGradient(tiling, program, refs, pixels, gradient=gradient, window=window).run

    around = refs.before, refs.center, refs.after
    run_windows(tiling, program, pixels, window_steps, around=around, affine=refs.affine)

    gradient.finish()

    @pl.when(program.ends)
    def _():
        for ref, total in zip((refs.d_query, refs.d_key, refs.d_value), totals, strict=True):
            ref[...] = total[...]


class _WindowGradient:
    """The gradients of a window: the operands that the heads of a group share, and the steps of a head."""

    def __init__(self, tiling, program, refs, pixels, gradient, window):
        self.tiling, self.refs, self.pixels, self.gradient, self.window = tiling, refs, pixels, gradient, window
        first = program.first + window * LANES
        self.inside = tiling.inside(first, LANES)
        self.mask = (1.0 - tiling.visible(first)) * MASKED
        self.logits_of, self.values_of = functools.cache(self._logits_of), functools.cache(self._values_of)

    def _logits_of(self, start, stop):
        """The operands of a group: `Logits`, q [C, L], k [C, M], the query term's table [C, B], and three lists.

        The lists collect the heads' gradients of the content queries, of q and of k.
        """
        tables, lanes = (self.refs.turned_query, self.refs.key), slice(start, stop)
        logits = Logits(self.tiling, self.pixels, tables, window=self.window, lanes=lanes)
        q = logits.q.astype(jnp.float32)
        return logits, q, turn_over(logits.k), self.refs.query[lanes], ([], [], [])

    def _values_of(self, start, stop):
        """A group's v, the gradients [C, L] of its content and position outputs, table [B, C], and a list of d_v."""
        refs = self.refs
        rows, lanes = window_rows(self.window), slice(start, min(stop, refs.d_total.shape[1]))
        d, *ys = (ref[rows, lanes].astype(jnp.float32) for ref in (refs.d_total, refs.content, refs.position))

        def gradient_of(i):
            scale, shift, slope = (refs.factors[row : row + 1, lanes] for row in range(3 * i, 3 * i + 3))
            y = jnp.where(self.inside, d * scale + shift + slope * ys[i], 0.0)
            return jnp.pad(y, [(0, 0), (0, stop - lanes.stop)]) if stop > lanes.stop else y

        d1, d2 = turn_over(gradient_of(0)), turn_over(gradient_of(1))
        v = self.pixels.v[window_rows(self.window, 2 * self.tiling.halo), start:stop]
        return v, d1, d2, refs.value[:, start:stop], []

    def run(self, head):
        """Generator that adds the gradients of a head."""
        tiling, refs, shear, cast = self.tiling, self.refs, self.tiling.shear, self.tiling.cast
        lanes, rows = tiling.group(head, tiling.depth)
        value_lanes, value_rows = tiling.group(head, tiling.value_depth)
        head_rows = slice(head * tiling.depth, (head + 1) * tiling.depth)
        logits, q, k, query, d_heads = self.logits_of(lanes.start, lanes.stop)
        w, scale = yield from logits.weigh(rows, self.mask)
        v, d1, d2, table, d_vs = self.values_of(value_lanes.start, value_lanes.stop)
        position_term = dot(only(table, value_rows), cast(d2))
        d_w = dot(only(v, value_rows), cast(d1))
        yield
        d_w = shear.fold(d_w) + shear.to_slots(position_term)
        d_map = w * ((d_w - scale * jnp.sum(w * d_w, 0, keepdims=True)) * scale)
        yield
        by_key = cast(shear.unfold(d_map))
        d_vs.append(dot_turned(cast(d1[value_rows] * scale), cast(shear.unfold(w))))
        k = cast(k[rows, : shear.keys])
        d_heads[0].append(dot(k, by_key))
        d_k = dot_turned(logits.content[rows], by_key)
        yield
        w, d_query_term = cast(shear.to_band(w)), cast(shear.to_band(d_map))
        d_key_term = cast(shear.unfold(shear.unrotate(d_map), rotated=True))
        yield
        refs.value_total[...] += dot_turned(cast(d2[value_rows] * scale), w)
        refs.query_total[head_rows] += dot_turned(cast(q[rows]), d_query_term)
        refs.key_total[head_rows] += dot(k, d_key_term)
        d_heads[1].append(dot(query[rows], d_query_term))
        d_heads[2].append(d_k + dot_turned(logits.tables[1][rows], d_key_term))
        if tiling.ends_group(head, tiling.depth):
            for operand, heads in enumerate(d_heads):
                self.gradient.add(self.window, operand, lanes, jnp.transpose(whole_registers(heads)))
        if tiling.ends_group(head, tiling.value_depth):
            self.gradient.add(self.window, 3, value_lanes, jnp.transpose(whole_registers(d_vs)))


def _gradient_sums(tiling, program, d, content, position, sums):
    """Input refs: d, content and position [P, H*E]. Output ref: the sums [3, H*E]."""
    pl.when(program.begins)(lambda: clear(sums))
    inside = tiling.inside(program.first, ROWS)

    @pl.when(program.exists)
    def _():
        for lanes in chunks(d.shape[1]):
            y = jnp.where(inside, d[:, lanes].astype(jnp.float32), 0.0)
            others = (jnp.where(inside, ref[:, lanes].astype(jnp.float32), 0.0) for ref in (content, position))
            for row, z in enumerate((y, *(y * other for other in others))):
                sums[row : row + 1, lanes] += jnp.sum(z, 0, keepdims=True)


def gradient_sums(tiling, interpret, d, content, position):
    """Sums [3, H*E] of d, d * content and d * position over all pixels."""
    operands = Operands(blocks=[d, content, position], sums=[float_shape(3, d.shape[1])])
    return run_programs(_gradient_sums, tiling, interpret, operands)[0]


def outputs(tiling, interpret, x, affine, tables):
    """The content and the position output [P, H*E], and the sums of the outputs and of their squares [4, H*E].

    Args:
        tiling: `Tiling`.
        interpret: whether jax interprets the kernel on a CPU.
        x, affine: q, k and v, and their batch norm (`tiling.py`).
        tables: the tables of the query term [lanes of q, B] and the key term [lanes of q, J], scaled per head, and of
            the values [E, B].
    """
    size = tiling.heads * tiling.value_depth
    output = jax.ShapeDtypeStruct((tiling.pixels, size), tiling.dtype)
    query, key, value = map(tiling.cast, tables)
    operands = Operands(
        around=[(x, x.shape[1])],
        small=[affine, query.T, key, value],
        outputs=[output] * 2,
        sums=[float_shape(4, size)],
        scratch=Normalized.scratch(tiling),
    )
    return run_programs(_forward, tiling, interpret, operands, flops=tiling.flops(5), exponentials=True)


def outputs_gradient(tiling, interpret, x, affine, d, tables):
    """d_x, d_affine, and the gradients of the three tables.

    Args: see `outputs`. `d` has the gradient of the sum of the normalised outputs, both outputs, and factors [6, H*E],
        three per output. The gradient of an output is (gradient of the sum) * first factor + second factor + output *
        third factor.
    """
    *d, factors = d
    shapes = [table.shape for table in tables]
    query, key, value = map(tiling.cast, tables)
    copies = up(tiling.sizes[2], LANES) // tiling.value_depth + 1
    value = jnp.tile(value.T, (1, copies))[:, : up(tiling.sizes[2], LANES)]
    operands = Operands(
        around=[(x, x.shape[1])],
        blocks=d,
        small=[affine, factors, query, query.T, key, value],
        outputs=[x],
        sums=[float_shape(*shape) for shape in (affine.shape, *shapes)],
        scratch=Normalized.scratch(tiling) + Gradient.scratch(tiling, affine.shape[1], shapes),
    )
    return run_programs(_backward, tiling, interpret, operands, delayed=True, flops=tiling.flops(16), exponentials=True)
