"""Evaluates one split. An evaluation can resume, run as several shards, and write results and a report."""

import contextlib
import dataclasses
import functools
import re
import time
import typing

import msgspec
import tensorflow as tf

from axial.data.files import names_in
from axial.data.specs import DatasetSpec, StoredSpec
from axial.errors import InputError, Preempted
from axial.io.read import read_json
from axial.io.schemas import Struct
from axial.io.show import progress
from axial.io.write import output_file, write_bytes
from axial.training.monitor import for_people
from axial.training.processes import number_of, scored

INTERVAL = 30  # least number of seconds between two writes of the state
RARELY = 20  # least time between two writes of the state, as a multiple of the time that the last write took


class EvaluationState(Struct):
    """The stored state of an unfinished or finished evaluation, with the annotations of its `PredictionWriter`."""

    identity: dict[str, typing.Any]
    complete: bool
    spec: StoredSpec
    annotations: list[dict[str, typing.Any]]
    scores: dict[str, typing.Any]
    kind: str = "panoptic"
    model: str = ""


@dataclasses.dataclass(eq=False)
class SplitRun:
    """The evaluation of a split: its metrics so far, its results, and the photos of its report.

    With a `results_dir` or a `state_dir`, a run writes its state to a hidden file there, at intervals and at the end.
    Another run with the same identity resumes from that file.

    Args:
        evaluator: `Evaluator`.
        spec: `DatasetSpec`.
        split: name of the split.
        identity: dict of the weights, data and settings that the scores depend on. A state with another identity is
            refused. The entry 'thresholds', if any, is passed to the metrics; only `PanopticMetrics` accepts it.
        results_dir: folder of the results and the state, or None.
        state_dir: folder of the state for an evaluation without results. The evaluation goes on if the state cannot be
            written.
        report: `Report`, or None.
        data_dir: folder of the converted split, whose names the results use.
        shard: (i, n) to evaluate every n-th example from the i-th on.
        model: name of the model, for people to read. Two evaluations of the same weights may use different names.

    Attributes:
        metrics: `Metrics` of the examples so far; None before `restore`.
        writer: `PredictionWriter`; None without results.
    """

    evaluator: typing.Any
    spec: typing.Any
    split: str
    identity: dict = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    results_dir: str | None = None
    state_dir: str | None = None
    report: typing.Any = None
    data_dir: str | None = None
    shard: tuple = (0, 1)
    model: str = ""
    metrics = writer = None
    _complete = False

    def __post_init__(self):
        thresholds = self.identity.get("thresholds")
        studied = {} if thresholds is None else {"thresholds": tuple(thresholds)}
        self._make = functools.partial(self.evaluator.metrics, self.spec, **studied)

    def restore(self, shards=None):
        """Restores the state of an earlier run if there is one, or merges the states of complete shards.

        Args:
            shards: list of (i, n) to merge; None to resume this run's own shard.

        Raises:
            InputError: the results exist already; a state belongs to another evaluation, or to an unfinished shard.
        """
        self.metrics, annotations = self._make(self.shard), {}
        path, whole = self._path(self.shard), self._path((0, 1))
        if path != whole and tf.io.gfile.exists(whole):  # refuses another evaluation's state, which `merge` would use
            self._read((0, 1))
        for shard in shards or ([self.shard] if path and tf.io.gfile.exists(path) else []):
            scores, rows, self._complete = self._stored(shard)
            if shards and not self._complete:
                raise _shard_error(self._path(shard), shard, "not finished")
            annotations.update(zip([number for number, *_ in scores.photos], rows))
            self.metrics.merge(scores)
        if self.results_dir:
            written = self.evaluator.writer.path_of(self.results_dir, self.split)
            if tf.io.gfile.exists(written) and (not self._complete or len(shards or ()) > 1):
                raise InputError(f"{written}: exists; delete it or choose another --results_dir")
            self.writer = self.evaluator.writer(self.results_dir, self.spec, self.split, self.data_dir)
            self.writer.restore(path, [annotations[number] for number in sorted(annotations)])

    def stored(self):
        """Iterator over the results of `Metrics.update` for the examples that an earlier run has scored, in order."""
        return map(self.writer.decoded, range(len(self.metrics.photos)))

    def run(self, examples, predictions, total=None, watch=None):
        """Scores the remaining examples, in other processes if there are many. Returns the result over all examples.

        The run of a whole split then writes the results' JSON, and removes the states of shards. The report and
        `watch` also get the examples that an earlier run has scored.

        Args:
            examples: function of (shard, skip) that returns evaluation examples.
            predictions: function that maps examples to an iterator of (example, prediction).
            total: number of examples in the shard; None if unknown.
            watch: function that is called with each example and the result of `Metrics.update` for this example.
        """
        if self.metrics is None:
            self.restore()
        if examples and self.writer and (self.report or watch):
            for photo, example, decoded in zip(self.metrics.photos, examples(self.shard, 0), self.stored()):
                self._show(example, decoded, photo, watch)
        if not self._complete:
            done = len(self.metrics.photos)
            stream = predictions(examples(self.shard, done))
            stream = progress(stream, "evaluate", total=total, initial=done, unit=self.evaluator.unit, leave=False)
            try:
                self._score(stream, number_of((total or 0) - done), watch)
            except Preempted:
                if not self.writer:  # the results of the last example may be half written
                    self._write()
                raise
        self._complete = True
        self._write()
        if self.writer and self.shard[1] == 1:
            self.writer.close()
            for shard in set(_shards(self.results_dir, self.split)) - {(0, 1)}:  # keeps the state of the whole split
                tf.io.gfile.remove(self._path(shard))
        return self.metrics.result()

    def _score(self, stream, processes, watch):
        written, pause = time.monotonic(), INTERVAL
        for pairs in scored(stream, self.metrics, self._make, processes):
            for (example, decoded), photo in zip(pairs, self.metrics.photos[-len(pairs) :]):
                if self.writer:
                    self.writer.add(example, decoded)
                self._show(example, decoded, photo, watch)
            if (now := time.monotonic()) - written >= pause:
                self._write()
                written = time.monotonic()
                pause = max(INTERVAL, RARELY * (written - now))

    def _show(self, example, decoded, photo, watch):
        if self.report:
            self.report.add(example, decoded, photo)
        if watch:
            watch(example, decoded)

    def _path(self, shard):
        """The path of a shard's state; None without a folder."""
        folder = self.results_dir or self.state_dir
        return folder and state_path(folder, self.split, shard)

    def _stored(self, shard):
        """(metrics, annotations, whether the shard is complete) from the stored state of a shard (i, n).

        Raises:
            InputError: the state belongs to another evaluation, or does not hold the shard's first examples.
        """
        path, scores, state = self._path(shard), self._make(shard), self._read(shard)
        try:
            scores.restore(state.scores)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{path}: scores: not the scores of an evaluation ({error}); delete it") from None
        photos = state.annotations if self.results_dir else scores.photos
        if [number for number, *_ in scores.photos] != [shard[0] + shard[1] * i for i in range(len(photos))]:
            raise InputError(f"{path}: not of the first {len(photos)} photos of the shard; delete it")
        return scores, state.annotations, state.complete

    def _read(self, shard):
        """The `EvaluationState` of a shard (i, n). Raises InputError if the state belongs to another evaluation."""
        path = self._path(shard)
        state = read_json(path, EvaluationState)[1]
        _compare(path, state.identity, self.identity)
        return state

    def _write(self):
        """Writes the state."""
        if path := self._path(self.shard):
            state = {
                "kind": self.evaluator.name,
                "identity": self.identity,
                "model": self.model,
                "complete": self._complete,
                "spec": self.spec.to_json(),
                "annotations": self.writer.annotations if self.writer else [],
                "scores": self.metrics.state(),
            }
            with contextlib.nullcontext() if self.results_dir else for_people("the state of the evaluation"):
                write_bytes(path, msgspec.json.encode(state))


def merge(results_dir, split, find_evaluator, report=None):
    """Merges all shards of a split into one `SplitRun`, and writes its results.

    Args:
        results_dir: the --results_dir of the shards.
        split: name of the split.
        find_evaluator: function that maps an evaluator's name, and the name's position for messages, to an `Evaluator`.
        report: function that maps an `Evaluator` and a `DatasetSpec` to a `Report`; None for no report.

    Raises:
        InputError: the results exist already; a shard is missing, is unfinished or belongs to another evaluation; a
            picture of the report is missing.
    """
    stored = _shards(results_dir, split)
    if not stored:
        raise InputError(f"{results_dir}: no shard of {split!r} was evaluated with this --results_dir")
    # A state of the whole split comes from an earlier merge, or from an evaluation without shards.
    count = 1 if (0, 1) in stored else max(n for _, n in stored)
    shards = [(i, count) for i in range(count)]
    for shard in shards:
        if shard not in stored:
            raise _shard_error(state_path(results_dir, split, shard), shard, "missing")
    path = state_path(results_dir, split, shards[0])
    first = read_json(path, EvaluationState)[1]
    spec = DatasetSpec.from_schema(path, first.spec)
    evaluator = find_evaluator(first.kind, f"{path}: kind")
    model, report = first.model or first.identity.get("model", ""), report and report(evaluator, spec)
    whole = SplitRun(evaluator, spec, split, first.identity, results_dir=results_dir, report=report, model=model)
    whole.restore(shards)
    if report:
        report.check(whole.metrics.photos)  # before `run` removes the states, from which a shard can draw again
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


def _shard_error(path, shard, problem):
    return InputError(f"{path}: {problem}; evaluate --shard={'/'.join(map(str, shard))} first")


def _compare(path, stored, identity):
    """Raises InputError unless a stored identity has all values of `identity`. The message names the first difference.

    If only the stored identity has thresholds, this is a difference too.
    """
    identity = {**identity, "thresholds": identity.get("thresholds")}
    keys, expected = [], msgspec.json.decode(msgspec.json.encode(identity))
    while isinstance(stored, dict) and isinstance(expected, dict):
        key = next((key for key, value in expected.items() if stored.get(key) != value), None)
        if key is None:
            return
        keys.append(key)
        stored, expected = stored.get(key), expected[key]
    differs = f"its {'.'.join(keys)} is {stored!r} and not {expected!r}"
    raise InputError(f"{path}: of another evaluation, {differs}; delete it or choose another --results_dir")
