"""Sums of the logits and of their squares, for their batch norms."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from axial.layers.kernels.shear import LANES, dot, dot_turned, join, up
from axial.layers.kernels.window import (
    Gradient,
    add_to_row,
    clear_at_the_start,
    embed,
    float_shape,
    group_lanes,
    pad_rows,
    run_in_step,
    run_programs,
    turn_over,
    turned_tables,
)


class Terms:
    """The unscaled logits of a group of heads, as their sums want them, relative terms as [queries, offsets]."""

    def __init__(self, window, x, affine, tables, block, lanes):
        self.window, self.tables, self.channels = window, tables, lanes.stop - lanes.start
        query_rows, key_rows = window.query_rows(block), window.key_rows(block)
        self.q = window.read(x, affine, query_rows, window.lanes_of("q", lanes))
        self.k = window.read(x, affine, key_rows, window.lanes_of("k", lanes))
        own = window.read(x, affine, query_rows, window.lanes_of("k", lanes)) if window.blocks > 1 else self.k
        self.own = own  # keys where the queries are
        self.q_turned = turn_over(self.q, window.of_keys.width)
        shape = window.of_keys.height, window.of_keys.width
        self.visible = window.visible(shape, block)
        if self.visible is not None:
            self.visible &= window.of_axis(block * window.queries, shape, 1)

    def products(self, rows):
        """float32 content [keys, queries], query and key term [queries, offsets] of a head."""

        def cast(x):
            return x.astype(self.window.dtype)

        def place(x):
            return cast(embed(x, rows, self.channels))

        relative = zip((self.q, self.own), self.tables)
        return [dot(cast(self.k), place(self.q_turned[rows])), *(dot(cast(x), place(t[...])) for x, t in relative)]

    def counted(self, products, counted):
        """Zero where no pair counts."""
        content, *relative = products
        if self.visible is not None:
            content = jnp.where(self.visible, content, 0.0)
        return [content, *(x * counted for x in relative)]


def _sums(window, *refs):
    """One window's part of the sums of the logits and of their squares.

    Refs: x, affine, tables of the query's and of the key's term; sums [2*terms*H, 128], of which a
    number is the sum of a row.
    """
    x, affine, *tables, sums = refs
    clear_at_the_start(sums)
    block = pl.program_id(1)
    counted = window.counted(block)

    @functools.cache
    def terms_of(start):
        return Terms(window, x, affine, tables, block, slice(start, start + group_lanes(window.heads, window.depth)))

    def run(head):
        lanes, rows = window.part(head, window.depth)
        logits = terms_of(lanes.start).products(rows)
        yield
        for i, s in enumerate(terms_of(lanes.start).counted(logits, counted)):
            add_to_row(sums, i * window.heads + head, s)
            add_to_row(sums, (3 + i) * window.heads + head, s * s)

    run_in_step(map(run, range(window.heads)))


def _sums_backward(window, *refs):
    """Adds what comes from the sums of one window to a gradient of x.

    Refs: d_sums [2*terms, H], x, another gradient of x, affine, the tables; d_x, d_affine of the sums alone, d of the
    tables [D, offsets]; the scratch of `Gradient`.
    """
    d_sums, x, more, affine, *tables, d_x, d_affine, d_query, d_key, total = refs
    by_query, by_key, block = window.of_queries, window.of_keys, pl.program_id(1)
    query_rows, key_rows = window.query_rows(block), window.key_rows(block)

    def cast(x):
        return x.astype(window.dtype)

    clear_at_the_start(d_query, d_key)
    gradient = Gradient(window, x, affine, d_x, d_affine, total, more)
    counted = window.counted(block)

    @functools.cache
    def terms_of(start):
        """Of a group: `Terms`, its keys turned, those where the queries are, lists of d_q, d_k and of these."""
        lanes = slice(start, start + group_lanes(window.heads, window.depth))
        terms = Terms(window, x, affine, tables, block, lanes)
        return terms, *(turn_over(y, up(len(y), LANES)) for y in (terms.k, terms.own)), [], [], []

    def run(head):
        lanes, rows = window.part(head, window.depth)
        terms, k_turned, own_turned, d_qs, d_ks, d_owns = terms_of(lanes.start)
        products = terms.products(rows)
        yield
        d = [d_sums[i, head] + 2.0 * d_sums[3 + i, head] * s for i, s in enumerate(products)]
        d = [pad_rows(cast(x), up(len(x), LANES)) for x in terms.counted(d, counted)]
        yield
        d_qs.append(dot(cast(k_turned[rows]), d[0]) + dot_turned(tables[0][...], d[1]))
        d_ks.append(dot_turned(cast(terms.q_turned[rows]), d[0]))
        d_owns.append(dot_turned(tables[1][...], d[2]))
        d_query[...] += dot(cast(terms.q_turned[rows]), d[1])
        d_key[...] += dot(cast(own_turned[rows]), d[2])
        if rows.stop == terms.channels:

            def upright(parts, height):
                return jnp.transpose(join(parts, 0))[:height]

            gradient.add("q", lanes, query_rows, upright(d_qs, by_query.height))
            gradient.add("k", lanes, key_rows, upright(d_ks, by_key.height))
            gradient.add("k", lanes, query_rows, upright(d_owns, by_query.height))

    run_in_step(map(run, range(window.heads)))
    gradient.finish()


def logit_sums(window, interpret, x, affine, rows):
    """Sums of the logits and of their squares, [2*terms*H, 128]: of x [A, ., C] and affine [2, C]."""
    tables = turned_tables(window, rows, "query", "key_sums")
    sums = [float_shape(6 * window.heads, LANES)]
    return run_programs(_sums, window, interpret, [], [x], [affine, *tables], [], sums)[0]


def logit_sums_gradient(window, interpret, d_sums, x, more, affine, rows):
    """d_x, d_affine, d of the rows 'query' and 'key_sums' [D, offsets]: d_sums is [2*terms, H], `more` added to d_x."""
    tables = turned_tables(window, rows, "query", "key_sums")
    sums = [float_shape(*affine.shape), *(float_shape(*table.shape) for table in tables)]
    scratch = [(window.rows, window.channels)]
    return run_programs(_sums_backward, window, interpret, [d_sums], [x, more], [affine, *tables], [x], sums, scratch)
