"""Conversion on many machines: the shards of a split as an Apache Beam pipeline.

An element of the pipeline is a shard. A worker lists the items again, once, with the function that the local conversion
has, permutes them in the same way, and encodes those of its shard. So the job holds no items, and every shard has the
bytes of a local conversion. The manifest is written by `convert_split`, after the pipeline. A pipeline that was stopped
is resumed like a local conversion.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import os

import apache_beam
import msgspec
import tensorflow as tf
from apache_beam.options.pipeline_options import PipelineOptions

from axial.data.convert import permuted, write_items
from axial.errors import InputError, nearest
from axial.io import schemas
from axial.io.read import LARGEST_TEXT, first_line, read_json
from axial.io.write import file_digest, write_json


def make_options(runner, texts):
    """Beam's options.

    Args:
        runner: name of a runner.
        texts: options like 'project=mine', as on the command line without the dashes.

    Raises:
        InputError: an option that Beam does not have, or a value that it does not take.
    """
    known = PipelineOptions([]).get_all_options()
    for text in texts:
        name = text.partition("=")[0]
        if name.removeprefix("no_") not in known:
            raise InputError(f"--beam_option={text}: Beam has no option {name!r}{nearest(name, known)}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = PipelineOptions([f"--{text}" for text in texts], runner=runner)
            options.get_all_options()
    except SystemExit:
        reason = (said.getvalue().strip().splitlines() or ["a wrong value"])[-1]
        raise InputError(f"--beam_option: {reason.partition('error: ')[2] or reason}") from None
    return options


def shard_writer(listing, encode, options, *, workers=None):
    """The argument `write` of `convert_split`: a function that writes shards by a pipeline.

    Args:
        listing: function without arguments that returns the items of the split and the bytes of their source. It and
            `encode` travel to the workers.
        encode: see `convert_split`.
        options: of `make_options`.
        workers: threads of a shard; 1 by default, as a runner converts several shards at a time.
    """
    return functools.partial(_run, _WriteShard(listing, encode, workers or 1), options)


def _run(work, options, todo, *, source, permutation, skip_broken, bar):
    """(seconds of each stage, dict from paths to sizes and digests, dict to broken items); see `convert_split`."""
    folder = os.path.dirname(next(iter(todo)))
    report = os.path.join(folder, f".beam-{hashlib.sha256(repr(todo).encode()).hexdigest()[:16]}.json")
    work.source, work.permutation = hashlib.sha256(source).hexdigest(), permutation
    work.skip_broken = skip_broken
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
    rows = msgspec.to_builtins(read_json(report, schemas.WrittenShards, LARGEST_TEXT)[1])
    tf.io.gfile.remove(report)
    for row in sorted(rows, key=lambda row: row["path"]):
        if row["error"]:
            raise InputError(row["error"])
    bar.update(sum(last - first for first, last in todo.values()))
    seconds = {}
    for row in rows:
        for stage, taken in row["seconds"].items():
            seconds[stage] = seconds.get(stage, 0.0) + taken
    digests = {row["path"]: (row["size"], row["digest"]) for row in rows if row["digest"]}
    return seconds, digests, {row["path"]: row["broken"] for row in rows}


class _WriteShard(apache_beam.DoFn):
    """Writes a shard and yields a `schemas.WrittenShard`. Bad input is an outcome, as the runner would try it again."""

    def __init__(self, listing, encode, workers):
        self._listing, self._encode, self._workers = listing, encode, workers
        self._items, self.source, self.permutation, self.skip_broken = None, None, None, False

    def process(self, element):
        path, first, last = element
        row = {"path": path, "size": 0, "digest": "", "seconds": {}, "error": "", "broken": []}
        try:
            if self._items is None:
                items, source = self._listing()
                if hashlib.sha256(source).hexdigest() != self.source:
                    raise InputError(f"{path}: this worker lists other items than the machine that started the job")
                # Not before the check, which each shard of this worker must fail.
                self._items = permuted(items, self.permutation)
            with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
                seconds, row["broken"] = write_items(
                    path, self._items[first:last], self._encode, pool, skip_broken=self.skip_broken
                )
            row["seconds"] = dict(seconds)
            if len(row["broken"]) < (last - first if self.skip_broken else 1):  # else there is no shard
                row["size"], row["digest"] = file_digest(path)
        except InputError as error:
            row["error"] = str(error)
        yield row
