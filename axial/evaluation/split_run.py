"""Evaluates one split. It resumes, can be shared by several processes, and writes results and a report."""

import contextlib
import dataclasses
import functools
import itertools
import re
import time
import typing

import msgspec
import tensorflow as tf

from axial.data.files import names_in
from axial.data.specs import DatasetSpec
from axial.errors import InputError, Preempted
from axial.evaluation.processes import number_of, scored
from axial.io import schemas
from axial.io.identity import compare_identity
from axial.io.read import read_json
from axial.io.show import progress
from axial.io.write import output_file, write_bytes


@dataclasses.dataclass(eq=False)
class SplitRun:
    """The evaluation of a split: its scores so far, its results, and the photos of its report.

    With a folder, every `interval` seconds and at the end of a shard what is new is written to a hidden file there, a
    part of the state. Another run of the same identity goes on from all parts. A part is whole or missing, and the
    parts after a missing one are not read.

    Args:
        evaluation: `Evaluation`.
        spec: `DatasetSpec`.
        split: name of the split.
        results_dir: folder of the evaluation's results, or None.
        state_dir: folder of the state alone, of an evaluation without results.
        guard: function that returns the context in which a part of the state is written. If that takes up an error, the
            next part has what this one lacks.
        report: `Report`, or None.
        data_dir: folder of the converted split, for the names of the results.
        shard: (i, n) for every n-th photo, from the i-th on.
        identity: dict that differs between different evaluations. Its `thresholds`, if it has any, are those of the
            scores; see `PanopticScores`. Only an evaluation whose `studies` have them takes any.
        interval: least seconds between two parts of the state.
        model: what is evaluated, for people; two evaluations of the same weights may call them otherwise.

    Attributes:
        scores: those of the parts of the state; None before `restore`.
        results: what writes the results; None without any.
    """

    evaluation: typing.Any
    spec: typing.Any
    split: str
    _: dataclasses.KW_ONLY
    results_dir: str | None = None
    state_dir: str | None = None
    guard: typing.Callable = contextlib.nullcontext
    report: typing.Any = None
    data_dir: str | None = None
    shard: tuple = (0, 1)
    identity: dict = dataclasses.field(default_factory=dict)
    interval: float = 30
    model: str = ""
    scores: typing.Any = dataclasses.field(default=None, init=False)
    results: typing.Any = dataclasses.field(default=None, init=False)
    _complete = False

    def restore(self):
        """Goes on from the state of an earlier run, if there is one.

        Raises:
            InputError: results that exist; the state of another evaluation.
        """
        self.scores, self._new, self._parts = self._empty(), self._empty(), 0
        if not self._folder:
            return
        whole = state_path(self._folder, self.split, (0, 1))
        if self.shard != (0, 1) and tf.io.gfile.exists(whole):  # `merge` would take it for the whole of the shards
            _compare(whole, _read(whole).identity, self.identity)
        paths = _parts(self._folder, self.split, self.shard)
        self.scores, annotations, self._complete = self._restored(paths, self.shard)
        self._parts = len(paths)
        if self.results_dir:
            if not self._complete:
                _refuse_results(self.evaluation, self._folder, self.split)
            self.results = self.evaluation.results(self._folder, self.spec, self.split, self.data_dir)
            if paths:
                self.results.restore(paths[0], annotations)

    def _restored(self, paths, shard):
        """(scores, annotations, whether it is complete) of a shard (i, n), of the paths of all parts of its state.

        Raises:
            InputError: a part of another evaluation, or one that does not go on where the part before it ends.
        """
        scores, annotations, complete = self._empty(), [], False
        for path in paths:
            state, part = _read(path), self._empty()
            _compare(path, state.identity, self.identity)
            try:
                part.restore(state.scores)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise InputError(f"{path}: scores: not those of an evaluation ({error}); delete it") from None
            first = shard[0] + shard[1] * len(scores.photos)
            photos = state.annotations if self.results_dir else part.photos
            wanted = range(first, first + shard[1] * len(photos), shard[1])
            if [number for number, *_ in part.photos] != list(wanted):
                raise InputError(f"{path}: not of the {len(wanted)} photos from number {first} on; delete it")
            annotations += state.annotations
            complete = state.complete
            scores.merge(part)
        return scores, annotations, complete

    def stored(self):
        """Yields what was seen of each photo that an earlier run has scored, in order."""
        for index in range(len(self.scores.photos)):
            yield self.results.seen(index)

    def run(self, examples, predictions, total=None, watch=None):
        """Scores the photos that are left, many of them in other processes. Returns the result of all.

        Args:
            examples: function of (shard, skip) that returns evaluation examples.
            predictions: function of the examples that yields (example, prediction).
            total: photos of the shard; None if that is unknown.
            watch: function that is called with each example and what `Scores.update` returns for it.
        """
        if self.scores is None:
            self.restore()
        if not self._complete:
            try:
                self._score(examples, predictions, total, watch)
            except Preempted:
                if not self.results:  # those of a photo may be half written
                    self._write()
                raise
            self._complete = True
            self._write()
        if self.shard[1] == 1:
            self.close()
        return self.scores.result()

    def _score(self, examples, predictions, total, watch):
        written, done = time.monotonic(), len(self.scores.photos)
        bar = dict(total=total, initial=done, unit=self.evaluation.unit, leave=False)
        found = progress(predictions(examples(self.shard, done)), "evaluate", **bar)
        processes = number_of((total or 0) - done)
        for part, photos in scored(found, self._empty, before=done, processes=processes):
            self._new.merge(part)
            for (example, seen), photo in zip(photos, part.photos):
                if self.results:
                    self.results.add(example, seen)
                if self.report:
                    self.report.add(example, seen, photo)
                if watch:
                    watch(example, seen)
            if self._folder and time.monotonic() - written >= self.interval:
                self._write()
                written = time.monotonic()

    def close(self):
        """Writes the JSON of the results and removes the states of shards. The state of the whole split stays."""
        if self.results:
            self.results.close()
            for shard in _shards(self.results_dir, self.split):
                for path in _parts(self.results_dir, self.split, shard) if shard != (0, 1) else ():
                    tf.io.gfile.remove(path)

    @property
    def _folder(self):
        return self.results_dir or self.state_dir

    @property
    def _empty(self):
        asked = {"thresholds": tuple(self.identity["thresholds"])} if "thresholds" in self.identity else {}
        return functools.partial(self.evaluation.scores, self.spec, self.shard, **asked)

    def _write(self):
        """Writes a part of the state, with what is new, and adds that to the scores."""
        with self.guard():
            if self._folder:
                state = {
                    "kind": self.evaluation.name,
                    "identity": self.identity,
                    "model": self.model,
                    "complete": self._complete,
                    "spec": self.spec.to_json(),
                    "annotations": self.results.annotations[len(self.scores.photos) :] if self.results else [],
                    "scores": self._new.state(),
                }
                path, following = (state_path(self._folder, self.split, self.shard, self._parts + i) for i in (0, 1))
                if tf.io.gfile.exists(following):  # was after a part that is missing
                    tf.io.gfile.remove(following)
                write_bytes(path, msgspec.json.encode(state))
                self._parts += 1
            self.scores.merge(self._new)
            self._new = self._empty()


def merge(results_dir, split, find_evaluation, report=None):
    """Merges all shards of a split into one `SplitRun`, and writes its results.

    Args:
        results_dir: folder that the shards were evaluated with.
        split: name of the split.
        find_evaluation: function of a name and a place, for messages, that returns the `Evaluation` of the name.
        report: function of a `Evaluation` and a `DatasetSpec` that returns a `Report`, or None.

    Raises:
        InputError: results that exist; a shard that is missing, unfinished or of another evaluation; a picture of the
            report that is missing.
    """
    there = _shards(results_dir, split)
    if not there:
        raise InputError(f"{results_dir}: no shard of {split!r} was evaluated with this --results_dir")
    # A state of the whole is of an earlier merge, or of an evaluation without shards.
    count = 1 if (0, 1) in there else max(n for _, n in there)
    shards = [(i, count) for i in range(count)]
    for shard in shards:
        if shard not in there:
            raise _left(results_dir, split, shard, "missing")
    path = state_path(results_dir, split, shards[0])
    first = _read(path)
    for shard in there if count == 1 else ():
        _compare(path, first.identity, _read(state_path(results_dir, split, shard)).identity)
    spec = DatasetSpec.from_schema(path, first.spec)
    evaluation = find_evaluation(first.kind, f"{path}: kind")
    if count > 1:
        _refuse_results(evaluation, results_dir, split)
    about = dict(identity=first.identity, model=first.model or first.identity.get("model", ""))
    whole = SplitRun(evaluation, spec, split, report=report and report(evaluation, spec), **about)
    whole.restore()
    whole.results_dir, annotations = results_dir, {}
    whole.results = evaluation.results(results_dir, spec, split)
    for shard in shards:
        scores, found, complete = whole._restored(_parts(results_dir, split, shard), shard)
        if not complete:
            raise _left(results_dir, split, shard, "not finished")
        annotations.update(zip([number for number, *_ in scores.photos], found))
        whole._new.merge(scores)
    whole.results.restore(results_dir, [annotations[number] for number in sorted(annotations)])
    if whole.report:
        whole.report.check(whole._new.photos)  # while the states of the shards are there, from which they draw
    whole._complete = True
    if count > 1:
        whole._write()
    else:
        whole.scores = whole._new
    whole.close()
    return whole


def state_path(folder, split, shard, part=0):
    """The path of a part of a shard's state. The first one has the name that the whole state once had."""
    number = f".{part}" if part else ""
    return output_file(folder, f".{split}.{shard[0]}-of-{shard[1]}.state{number}.json", "--split")


def _parts(folder, split, shard):
    """The paths of all parts of a shard's state, up to the first that is missing."""
    paths = (state_path(folder, split, shard, part) for part in itertools.count())
    return list(itertools.takewhile(tf.io.gfile.exists, paths))


def _shards(folder, split):
    """The shards (i, n) that have a state."""
    pattern = re.compile(re.escape(f".{split}.") + r"(\d+)-of-(\d+)\.state\.json")
    names = names_in(folder) if tf.io.gfile.isdir(folder) else []
    return [(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, names) if match]


def _left(results_dir, split, shard, problem):
    return InputError(
        f"{state_path(results_dir, split, shard)}: {problem}; evaluate --shard={'/'.join(map(str, shard))} first"
    )


def _compare(path, found, wanted):
    """Raises InputError unless two identities are the same. Thresholds that only `found` has are a difference too."""
    compare_identity(path, found, {**wanted, "thresholds": wanted.get("thresholds")}, "--results_dir")


def _refuse_results(evaluation, folder, split):
    """Raises InputError if the folder has results of the split."""
    path = evaluation.results.path_of(folder, split)
    if tf.io.gfile.exists(path):
        raise InputError(f"{path}: exists; delete it or choose another --results_dir")


def _read(path):
    return read_json(path, schemas.EvaluationState)[1]
