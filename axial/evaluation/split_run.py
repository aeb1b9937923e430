"""Evaluates one split. It resumes, can be shared by several processes, and writes results and a report."""

import contextlib
import dataclasses
import functools
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

RARELY = 20  # times as long as the last write of the state, at least, between two of them


@dataclasses.dataclass(eq=False)
class SplitRun:
    """The evaluation of a split: its scores so far, its results, and the photos of its report.

    With a folder, its state is written to a hidden file there now and then, and at the end. Another run of the same
    identity goes on from it.

    Args:
        evaluation: `Evaluation`.
        spec: `DatasetSpec`.
        split: name of the split.
        identity: dict that differs between different evaluations. Its `thresholds`, if it has any, are those of the
            scores; see `PanopticScores`. Only an evaluation whose `studies` have them takes any.
        results_dir: folder of the evaluation's results, or None.
        state_dir: folder of the state alone, of an evaluation without results.
        guard: function that returns the context in which the state is written.
        report: `Report`, or None.
        data_dir: folder of the converted split, for the names of the results.
        shard: (i, n) for every n-th photo, from the i-th on.
        interval: least seconds between two writes of the state.
        model: what is evaluated, for people; two evaluations of the same weights may call them otherwise.

    Attributes:
        scores: those of the photos so far; None before `restore`.
        results: what writes the results; None without any.
    """

    evaluation: typing.Any
    spec: typing.Any
    split: str
    identity: dict = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    results_dir: str | None = None
    state_dir: str | None = None
    guard: typing.Callable = contextlib.nullcontext
    report: typing.Any = None
    data_dir: str | None = None
    shard: tuple = (0, 1)
    interval: float = 30
    model: str = ""
    scores = results = None
    _complete = False

    def __post_init__(self):
        thresholds = self.identity.get("thresholds")  # of what makes empty scores, of a spec and a shard
        studied = {} if thresholds is None else {"thresholds": tuple(thresholds)}
        self._make = functools.partial(self.evaluation.scores, self.spec, **studied)

    def restore(self, shards=None):
        """Goes on from the state of an earlier run, if there is one, or takes those of complete shards (i, n).

        Raises:
            InputError: results that exist; the state of another evaluation, or of a shard that is not finished.
        """
        self.scores, annotations = self._make(self.shard), {}
        path, whole = self._path(self.shard), self._path((0, 1))
        if path != whole and tf.io.gfile.exists(whole):  # `merge` would take it for the whole of the shards
            _compare(whole, _read(whole).identity, self.identity)
        for shard in shards or ([self.shard] if path and tf.io.gfile.exists(path) else []):
            scores, rows, self._complete = self._stored(shard)
            if shards and not self._complete:
                raise _left(self._path(shard), shard, "not finished")
            annotations.update(zip([number for number, *_ in scores.photos], rows))
            self.scores.merge(scores)
        if self.results_dir:
            written = self.evaluation.results.path_of(self.results_dir, self.split)
            if tf.io.gfile.exists(written) and (not self._complete or len(shards or ()) > 1):
                raise InputError(f"{written}: exists; delete it or choose another --results_dir")
            self.results = self.evaluation.results(self.results_dir, self.spec, self.split, self.data_dir)
            self.results.restore(path, [annotations[number] for number in sorted(annotations)])

    def stored(self):
        """Yields what was seen of each photo that an earlier run has scored, in order."""
        for index in range(len(self.scores.photos)):
            yield self.results.seen(index)

    def run(self, examples, predictions, total=None, watch=None):
        """Scores the photos that are left, many of them in other processes. Returns the result of all.

        With a report, or something that watches, it draws the photos again that an earlier run has scored.

        Args:
            examples: function of (shard, skip) that returns evaluation examples.
            predictions: function of the examples that yields (example, prediction).
            total: photos of the shard; None if that is unknown.
            watch: function that is called with each example and what `Scores.update` returns for it.
        """
        if self.scores is None:
            self.restore()
        if examples and self.results and (self.report or watch):
            for photo, example, seen in zip(self.scores.photos, examples(self.shard, 0), self.stored()):
                self._show(example, seen, photo, watch)
        if not self._complete:
            done = len(self.scores.photos)
            stream = predictions(examples(self.shard, done))
            stream = progress(stream, "evaluate", total=total, initial=done, unit=self.evaluation.unit, leave=False)
            try:
                self._score(stream, number_of((total or 0) - done), watch)
            except Preempted:
                if not self.results:  # those of a photo may be half written
                    self._write()
                raise
        self._complete = True
        self._write()
        if self.shard[1] == 1:
            self.close()
        return self.scores.result()

    def _score(self, stream, processes, watch):
        written, pause = time.monotonic(), self.interval
        for pairs in scored(stream, self.scores, self._make, processes):
            for (example, seen), photo in zip(pairs, self.scores.photos[-len(pairs) :]):
                if self.results:
                    self.results.add(example, seen)
                self._show(example, seen, photo, watch)
            if (now := time.monotonic()) - written >= pause:
                self._write()
                written = time.monotonic()
                pause = max(self.interval, RARELY * (written - now))

    def _show(self, example, seen, photo, watch):
        if self.report:
            self.report.add(example, seen, photo)
        if watch:
            watch(example, seen)

    def close(self):
        """Writes the JSON of the results and removes the states of shards. The state of the whole split stays."""
        if self.results:
            self.results.close()
            for shard in _shards(self.results_dir, self.split):
                if shard != (0, 1):
                    tf.io.gfile.remove(self._path(shard))

    def _path(self, shard):
        """The path of a shard's state; None without a folder."""
        folder = self.results_dir or self.state_dir
        return folder and state_path(folder, self.split, shard)

    def _stored(self, shard):
        """(scores, annotations, whether it is complete) of the state of a shard (i, n).

        Raises:
            InputError: the state of another evaluation, or not of the shard's first photos.
        """
        path, scores = self._path(shard), self._make(shard)
        state = _read(path)
        _compare(path, state.identity, self.identity)
        try:
            scores.restore(state.scores)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{path}: scores: not those of an evaluation ({error}); delete it") from None
        photos = state.annotations if self.results_dir else scores.photos
        if [number for number, *_ in scores.photos] != [shard[0] + shard[1] * i for i in range(len(photos))]:
            raise InputError(f"{path}: not of the first {len(photos)} photos of the shard; delete it")
        return scores, state.annotations, state.complete

    def _write(self):
        """Writes the state."""
        with self.guard():
            if path := self._path(self.shard):
                state = {
                    "kind": self.evaluation.name,
                    "identity": self.identity,
                    "model": self.model,
                    "complete": self._complete,
                    "spec": self.spec.to_json(),
                    "annotations": self.results.annotations if self.results else [],
                    "scores": self.scores.state(),
                }
                write_bytes(path, msgspec.json.encode(state))


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
            raise _left(state_path(results_dir, split, shard), shard, "missing")
    path = state_path(results_dir, split, shards[0])
    first = _read(path)
    spec = DatasetSpec.from_schema(path, first.spec)
    evaluation = find_evaluation(first.kind, f"{path}: kind")
    model, report = first.model or first.identity.get("model", ""), report and report(evaluation, spec)
    whole = SplitRun(evaluation, spec, split, first.identity, results_dir=results_dir, report=report, model=model)
    whole.restore(shards)
    if report:
        report.check(whole.scores.photos)  # while the states of the shards are there, from which they draw
    whole.run(None, None)
    return whole


def state_path(folder, split, shard):
    """The path of the state of a shard (i, n)."""
    return output_file(folder, f".{split}.{shard[0]}-of-{shard[1]}.state.json", "--split")


def _shards(folder, split):
    """The shards (i, n) that have a state."""
    pattern = re.compile(re.escape(f".{split}.") + r"(\d+)-of-(\d+)\.state\.json")
    names = names_in(folder) if tf.io.gfile.isdir(folder) else []
    return [(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, names) if match]


def _left(path, shard, problem):
    return InputError(f"{path}: {problem}; evaluate --shard={'/'.join(map(str, shard))} first")


def _compare(path, found, wanted):
    """Raises InputError unless two identities are the same. Thresholds that only `found` has are a difference too."""
    compare_identity(path, found, {**wanted, "thresholds": wanted.get("thresholds")}, "--results_dir")


def _read(path):
    return read_json(path, schemas.EvaluationState)[1]
