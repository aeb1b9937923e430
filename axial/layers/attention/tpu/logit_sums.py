"""Sums of the logits and of their squares, which their batch norms need."""

import functools

import jax.numpy as jnp

from axial.layers.attention.tpu.shear import LANES, dot, dot_turned, join, up
from axial.layers.attention.tpu.tiling import (
    Gradient,
    Operands,
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
    window_of_program,
)


class Terms:
    """The unscaled logits of a group of heads. The relative terms are [queries, offsets].

    Args:
        tiling: `Tiling`.
        x, affine, tables: refs.
        block: number of the tiling.
        lanes: slice of the group among all lanes.
    """

    def __init__(self, tiling, x, affine, *, tables, block, lanes):
        self.tiling, self.tables, self.channels = tiling, tables, lanes.stop - lanes.start
        query_rows, key_rows = tiling.query_rows(block), tiling.key_rows(block)
        self.q = tiling.read(x, affine, query_rows, tiling.lanes_of("q", lanes))
        self.k = tiling.read(x, affine, key_rows, tiling.lanes_of("k", lanes))
        own = tiling.read(x, affine, query_rows, tiling.lanes_of("k", lanes)) if tiling.blocks > 1 else self.k
        self.own = own  # the keys at the queries' own positions
        self.q_turned = turn_over(self.q, tiling.of_keys.width)
        shape = tiling.of_keys.height, tiling.of_keys.width
        self.visible = tiling.visible(shape, block)
        if self.visible is not None:
            self.visible &= tiling.of_axis(block * tiling.queries, shape, 1)

    def products(self, rows):
        """float32 content [keys, queries], and query and key term [queries, offsets], of a head."""

        def cast(x):
            return x.astype(self.tiling.dtype)

        def place(x):
            return cast(embed(x, rows, self.channels))

        relative = zip((self.q, self.own), self.tables)
        return [dot(cast(self.k), place(self.q_turned[rows])), *(dot(cast(x), place(t[...])) for x, t in relative)]

    def counted(self, products, counted):
        """The products, zero where a pair does not count."""
        content, *relative = products
        if self.visible is not None:
            content = jnp.where(self.visible, content, 0.0)
        return [content, *(x * counted for x in relative)]


def _sums(tiling, *refs):
    """One window's part of the sums of the logits and of their squares.

    Refs: x, affine, the tables of the query and the key term. Then sums [2*terms*H, 128], whose rows are to be summed.
    """
    x, affine, *tables, sums = refs
    clear_at_the_start(sums)
    block = window_of_program()
    counted = tiling.counted(block)

    @functools.cache
    def terms_of(start):
        lanes = slice(start, start + group_lanes(tiling.heads, tiling.depth))
        return Terms(tiling, x, affine, tables=tables, block=block, lanes=lanes)

    def run(head):
        lanes, rows = tiling.part(head, tiling.depth)
        logits = terms_of(lanes.start).products(rows)
        yield
        for i, s in enumerate(terms_of(lanes.start).counted(logits, counted)):
            add_to_row(sums, i * tiling.heads + head, s)
            add_to_row(sums, (3 + i) * tiling.heads + head, s * s)

    run_in_step(map(run, range(tiling.heads)))


def _sums_backward(tiling, *refs):
    """Adds the gradient through the sums of one window to another gradient of x.

    Refs: d_sums [2*terms, H], x, the other gradient of x, affine, the tables. Then d_x, d_affine through the sums
    alone, the gradients of the tables [D, offsets], and the scratch of `Gradient`.
    """
    d_sums, x, more, affine, *tables, d_x, d_affine, d_query, d_key, total = refs
    by_query, by_key, block = tiling.of_queries, tiling.of_keys, window_of_program()
    query_rows, key_rows = tiling.query_rows(block), tiling.key_rows(block)

    def cast(x):
        return x.astype(tiling.dtype)

    clear_at_the_start(d_query, d_key)
    gradient = Gradient(tiling, x=x, affine=affine, d_x=d_x, d_affine=d_affine, total=total, more=more)
    counted = tiling.counted(block)

    @functools.cache
    def terms_of(start):
        """For a group: `Terms`, its transposed keys, its transposed own keys, and lists for d of q, k and own."""
        lanes = slice(start, start + group_lanes(tiling.heads, tiling.depth))
        terms = Terms(tiling, x, affine, tables=tables, block=block, lanes=lanes)
        return terms, *(turn_over(y, up(len(y), LANES)) for y in (terms.k, terms.own)), [], [], []

    def run(head):
        lanes, rows = tiling.part(head, tiling.depth)
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

    run_in_step(map(run, range(tiling.heads)))
    gradient.finish()


def logit_sums(tiling, interpret, x, affine, rows):
    """Sums of the logits and of their squares, [2*terms*H, 128], whose rows are to be summed.

    Args: see `outputs.outputs`.
    """
    tables = turned_tables(tiling, rows, "query", "key_sums")
    operands = Operands(arrays=[x], small=[affine, *tables], sums=[float_shape(6 * tiling.heads, LANES)])
    flops = tiling.map_flops(tiling.depth) + tiling.offset_flops(2 * tiling.depth)
    return run_programs(_sums, tiling, interpret, operands, flops=flops)[0]


def logit_sums_gradient(tiling, interpret, d_sums, x, more, affine, rows):
    """d_x, d_affine, and the gradients of the rows 'query' and 'key_sums' [D, offsets].

    Args: see `logit_sums`; d_sums [2*terms, H]; more: another gradient of x, which is added to d_x.
    """
    tables = turned_tables(tiling, rows, "query", "key_sums")
    operands = Operands(
        scalars=[d_sums],
        arrays=[x, more],
        small=[affine, *tables],
        outputs=[x],
        sums=[float_shape(*affine.shape), *(float_shape(*table.shape) for table in tables)],
        scratch=[(tiling.rows, tiling.channels)],
    )
    flops = tiling.map_flops(3 * tiling.depth) + tiling.offset_flops(6 * tiling.depth)
    return run_programs(_sums_backward, tiling, interpret, operands, flops=flops)
