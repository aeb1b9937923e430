"""Converts a split on many machines: an Apache Beam pipeline writes its shards.

An element of the pipeline is a shard. Each worker lists the items once, with the same function as a local conversion,
permutes them in the same way and encodes the items of its shards. So no items pass through the pipeline, and a shard
has the same bytes as in a local conversion. `convert_split` writes the manifest after the pipeline. A stopped pipeline
resumes like a local conversion.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import io
import os

import apache_beam
import tensorflow as tf
from apache_beam.options.pipeline_options import PipelineOptions

from axial.data.convert import WrittenShard, write_items
from axial.errors import InputError, nearest
from axial.io.read import LARGEST_TEXT, first_line, read_json
from axial.io.write import write_json


def make_options(runner, texts):
    """Beam's pipeline options.

    Args:
        runner: name of a Beam runner.
        texts: options such as 'project=mine', written as on the command line but without the dashes.

    Raises:
        InputError: Beam does not have an option, or does not take its value.
    """
    defaults = PipelineOptions([]).get_all_options()
    for text in texts:
        name = text.partition("=")[0]
        if name.removeprefix("no_") not in defaults:
            raise InputError(f"--beam_option={text}: Beam has no option {name!r}{nearest(name, defaults)}")
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options = PipelineOptions([f"--{text}" for text in texts], runner=runner)
            options.get_all_options()
    except SystemExit:
        reason = (stderr.getvalue().strip().splitlines() or ["a wrong value"])[-1]
        raise InputError(f"--beam_option: {reason.partition('error: ')[2] or reason}") from None
    return options


def shard_writer(listing, options):
    """Returns the argument `write` of `convert_split`: a function that writes shards with a pipeline.

    Args:
        listing: function without arguments that returns the items of the split and bytes that identify them. Beam
            pickles it, with the conversion's `encode`, for the workers. A shard gets one thread by default, because a
            runner converts several shards at a time.
        options: pipeline options from `make_options`.
    """
    return functools.partial(_run, listing, options)


def _run(listing, options, conversion, todo, bar):
    """Returns the list of `WrittenShard`s; see `convert_split`."""
    report = os.path.join(conversion.output_dir, f".beam-{hashlib.sha256(repr(todo).encode()).hexdigest()[:16]}.json")
    source = hashlib.sha256(conversion.source).digest()
    work = _WriteShard(dataclasses.replace(conversion, items=None, source=source), listing)
    runner = options.get_all_options()["runner"]
    try:
        pipeline = apache_beam.Pipeline(options=options)
    except (ValueError, ImportError, AttributeError) as error:
        raise InputError(f"--runner={runner}: {first_line(error)}; Google's runners need apache-beam[gcp]") from None
    (
        pipeline
        | "shards" >> apache_beam.Create([(path, *bounds) for path, bounds in todo.items()])
        | "spread" >> apache_beam.Reshuffle()
        | "write" >> apache_beam.ParDo(work)
        | "gather" >> apache_beam.combiners.ToList()
        | "report" >> apache_beam.Map(functools.partial(write_json, report))
    )
    pipeline.run().wait_until_finish()
    rows = read_json(report, list[WrittenShard], LARGEST_TEXT)[1]
    tf.io.gfile.remove(report)
    if error := next((row.error for row in sorted(rows, key=lambda row: row.path) if row.error), None):
        raise InputError(error)
    bar.update(sum(last - first for first, last in todo.values()))
    return rows


class _WriteShard(apache_beam.DoFn):
    """Writes a shard and yields a `WrittenShard`, for bad input too: runners would retry after an exception.

    The conversion's `source` is replaced by its hash. The worker gets the items from `listing`.
    """

    def __init__(self, conversion, listing):
        self._conversion, self._listing, self._items = conversion, listing, None

    def process(self, element):
        path, first, last = element
        try:
            if self._items is None:
                items, source = self._listing()
                if hashlib.sha256(source).digest() != self._conversion.source:
                    raise InputError(f"{path}: this worker lists other items than the machine that started the job")
                # `_items` is set after the check, so that a check that fails is repeated for each shard of the worker.
                self._items = dataclasses.replace(self._conversion, items=items).permuted()
            with concurrent.futures.ThreadPoolExecutor(self._conversion.workers or 1) as pool:
                yield write_items(self._conversion, path, self._items[first:last], pool)
        except InputError as error:
            yield WrittenShard(path, error=str(error))
