"""Sums of the logits and of their squares, which the batch norms of the logit terms need."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from axial.layers.attention.tpu.programs import Operands, float_shape, run_programs
from axial.layers.attention.tpu.shear import LANES, dot, dot_turned, join, turn_over
from axial.layers.attention.tpu.tiling import (
    Gradient,
    Group,
    Normalized,
    add_to_row,
    clear,
    only,
    run_windows,
    whole_registers,
)


class Terms(Group):
    """The logit terms of a group of heads in a window. The relative terms are in the layout of their products.

    Args: see `Group`.
    """

    def products(self, lanes):
        """list of the content term [S, L], the query term [B, L] and the key term [128, J] of a head, in float32.

        `lanes` are the lanes of the head within the group.
        """
        k, halo = only(self.k, lanes), self.tiling.halo
        content = self.tiling.shear.fold(dot(k, self.content))
        return [content, dot(only(self.tables[0], lanes), self.q), dot(k[halo : halo + LANES], self.tables[1])]


def _counted(tiling, first):
    """list of a float32 mask for each of `Terms.products`: 1 where a pair is visible."""
    counted = tiling.counted(first)
    by_key = jnp.transpose(join([counted[tiling.halo :], counted[: tiling.halo]]))  # in the order of `OFFSETS`
    return [tiling.visible(first), counted[: len(tiling.shear.band)], by_key]


def _sums(tiling, program, *refs):
    """Sums of all terms and of their squares.

    Input refs: x three times, affine, the tables of the query and the key term. Output ref: the sums [2*terms*H, 128],
    which the caller adds up over the lanes. The other refs are scratch memory.
    """
    before, center, after, affine, query, key, sums, *scratch = refs
    pl.when(program.begins)(lambda: clear(sums))
    pixels = Normalized(*scratch)

    def window_steps(window):
        counted = _counted(tiling, program.first + window * LANES)

        @functools.cache
        def terms_of(start, stop):
            return Terms(tiling, pixels, (query, key), window=window, lanes=slice(start, stop))

        def run(head):
            lanes, rows = tiling.group(head, tiling.depth)
            products = terms_of(lanes.start, lanes.stop).products(rows)
            yield
            for i, (s, counts) in enumerate(zip(products, counted, strict=True)):
                add_to_row(sums, i * tiling.heads + head, s * counts)
                add_to_row(sums, (3 + i) * tiling.heads + head, s * s * counts)

        return run

    run_windows(tiling, program, pixels, window_steps, around=(before, center, after), affine=affine)


def _sums_backward(tiling, program, *refs):
    """Adds the gradient of x through the sums to another gradient of x.

    Input refs: d_sums [2*terms, H], x three times, the other gradient of x, affine, the tables. Output refs: d_x,
    d_affine (through the sums only), the gradients of the tables. The other refs are scratch memory.
    """
    d_sums, before, center, after, more, affine, query, turned_query, key, d_x, d_affine, d_query, d_key = refs[:13]
    *scratch, total, query_total, key_total = refs[13:]
    pixels, tables = Normalized(*scratch), (turned_query, key)
    gradient = Gradient(tiling, program, x=before, affine=affine, d_x=d_x, d_affine=d_affine, total=total, more=more)
    pl.when(program.begins)(lambda: clear(query_total, key_total))

    def window_steps(window):
        counted = _counted(tiling, program.first + window * LANES)

        @functools.cache
        def terms_of(start, stop):
            """`Terms` of a group; q, k, and k without the halo, [C, .]; the query term's table [C, B]; four lists.

            The lists collect the heads' gradients of the content queries, of q, of k, and of k without the halo.
            """
            terms = Terms(tiling, pixels, tables, window=window, lanes=slice(start, stop))
            turned = turn_over(terms.k), turn_over(terms.k[tiling.halo : tiling.halo + LANES])
            return terms, (terms.q.astype(jnp.float32), *turned), query[start:stop], ([], [], [], [])

        def run(head):
            lanes, rows = tiling.group(head, tiling.depth)
            head_rows = slice(head * tiling.depth, (head + 1) * tiling.depth)
            terms, (q, k, center_keys), table, (d_contents, d_qs, d_ks, d_centers) = terms_of(lanes.start, lanes.stop)
            products = terms.products(rows)
            yield
            pairs = enumerate(zip(products, counted, strict=True))
            d = [(d_sums[i, head] + 2.0 * d_sums[3 + i, head] * s) * counts for i, (s, counts) in pairs]
            d_content, d_of_query, d_of_key = tiling.cast(tiling.shear.unfold(d[0])), *map(tiling.cast, d[1:])
            yield
            d_contents.append(dot(tiling.cast(k[rows, : tiling.shear.keys]), d_content))
            d_ks.append(dot_turned(terms.content[rows], d_content))
            d_qs.append(dot(table[rows], d_of_query))
            d_centers.append(dot_turned(terms.tables[1][rows], d_of_key))
            query_total[head_rows] += dot_turned(tiling.cast(q[rows]), d_of_query)
            key_total[head_rows] += dot(tiling.cast(center_keys[rows]), d_of_key)
            if tiling.ends_group(head, tiling.depth):
                for operand, heads in ((0, d_contents), (1, d_qs), (2, d_ks), (2, d_centers)):
                    gradient.add(window, operand, lanes, jnp.transpose(whole_registers(heads)))

        return run

    run_windows(tiling, program, pixels, window_steps, around=(before, center, after), affine=affine)

    gradient.finish()

    @pl.when(program.ends)
    def _():
        d_query[...], d_key[...] = query_total[...], key_total[...]


def logit_sums(tiling, interpret, x, affine, tables):
    """Sums of the logits and of their squares, [2*terms*H, 128]. The caller adds them up over the lanes.

    Args: see `outputs.outputs`.
    """
    keys = tiling.lanes[1].stop
    query, key = map(tiling.cast, tables[:2])
    operands = Operands(
        around=[(x, keys)],
        small=[affine, query.T, key],
        sums=[float_shape(6 * tiling.heads, LANES)],
        scratch=Normalized.scratch(tiling, values=False),
    )
    return run_programs(_sums, tiling, interpret, operands, flops=tiling.flops(3))[0]


def logit_sums_gradient(tiling, interpret, d_sums, x, more, affine, tables):
    """d_x, d_affine, and the gradients of the tables of the query and the key term.

    Args: see `logit_sums`. d_sums is [2*terms, H], and `more` is another gradient of x, which d_x includes.
    """
    q, k, _ = tiling.lanes
    query, key = map(tiling.cast, tables[:2])
    shapes = [table.shape for table in tables[:2]]
    operands = Operands(
        scalars=[d_sums],
        around=[(x, k.stop)],
        before=[(more, k.stop)],
        small=[affine, query, query.T, key],
        sums=[float_shape(*shape) for shape in (affine.shape, *shapes)],
        scratch=Normalized.scratch(tiling, values=False) + Gradient.scratch(tiling, q.stop + k.stop, shapes),
    )
    return run_programs(_sums_backward, tiling, interpret, operands, delayed=True, flops=tiling.flops(9))
