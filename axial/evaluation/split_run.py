"""Evaluates one split. It resumes, can be shared by several processes, and writes results and a report."""

import contextlib
import functools
import itertools
import os
import re
import time

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


class SplitRun:
    """The evaluation of a split: its scores so far, its results, and the photos of its report.

    With a `results_dir`, every `interval` seconds and at the end of a shard what is new is written to a hidden file
    there, a part of the state. Another run of the same identity resumes from all parts. A part is whole or missing, and
    parts after a missing one are deleted.

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
        identity: dict that differs between different evaluations.
        interval: least seconds between two parts of the state.
        model: what is evaluated, for people; two evaluations of the same weights may call them otherwise.
        thresholds: see `PanopticScores`; part of the identity. Only a evaluation whose `studies` have them takes any.

    Raises:
        InputError: results that exist; the state of another evaluation.
    """

    def __init__(
        self,
        evaluation,
        spec,
        split,
        *,
        results_dir=None,
        state_dir=None,
        guard=contextlib.nullcontext,
        report=None,
        data_dir=None,
        shard=(0, 1),
        identity=None,
        interval=30,
        model="",
        thresholds=(),
    ):
        self.model = model
        asked = {"thresholds": list(thresholds)} if thresholds else {}
        self.evaluation, self.spec, self.split, self.report, self.shard = evaluation, spec, split, report, shard
        self._empty = functools.partial(evaluation.scores, spec, shard, **asked)
        self.scores, self._new = self._empty(), self._empty()  # those of the last parts; those since then
        self.results = None
        self.identity, self.interval, self.complete = {**(identity or {}), **asked}, interval, False
        self.folder, self.guard, self._parts = results_dir or state_dir, guard, 0
        if not self.folder:
            return
        whole = state_path(self.folder, split, (0, 1))
        if shard != (0, 1) and tf.io.gfile.exists(whole):  # `merge` would take it for the whole of the shards
            _compare(whole, _read(whole)["identity"], self.identity)
        paths, stray = _states(self.folder, split).get(shard, ([], []))
        found = _restored(paths, self._empty, shard, identity=self.identity, has_results=bool(results_dir))
        if results_dir and not (found and found["complete"]):
            _refuse_results(evaluation, results_dir, split)
        for path in stray:
            tf.io.gfile.remove(path)
        if results_dir:
            self.results = evaluation.results(results_dir, spec, split, data_dir)
        if found:
            self.scores, self.complete, self._parts = found["scores"], found["complete"], len(paths)
            if results_dir:
                self.results.restore(paths[0], found["annotations"])

    def stored(self):
        """Yields what was seen of each photo that an earlier run has scored, in order."""
        for index in range(len(self.scores.photos)):
            yield self.results.seen(index)

    def run(self, examples, predictions, total=None, watch=None):
        """Scores the photos that are left, many of them in other processes. Returns their result.

        Args:
            examples: function of (shard, skip) that returns evaluation examples.
            predictions: function of the examples that yields (example, prediction).
            total: photos of the shard; None if that is unknown.
            watch: function that is called with each example and what `Scores.update` returns for it.
        """
        if not self.complete:
            try:
                self._run(examples, predictions, total, watch)
            except Preempted:
                if self.folder and not self.results:  # those of a photo may be half written
                    self._write()
                raise
            self.complete = True
            if self.folder:
                self._write()
            self._take_new()
        if self.shard[1] == 1:
            self.close()
        return self.scores.result()

    def _run(self, examples, predictions, total, watch):
        self._written, done = time.monotonic(), len(self.scores.photos)
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
            if self.folder and time.monotonic() - self._written >= self.interval:
                self._write()

    def close(self):
        """Writes the JSON of the results and removes the states of shards. The state of the whole split stays."""
        if self.results:
            self.results.close()
            for shard, files in _states(self.results.folder, self.split).items():
                for path in [path for part in files for path in part] if shard != (0, 1) else ():
                    tf.io.gfile.remove(path)

    def _take_new(self):
        """Adds the scores since the last part to those before."""
        self.scores.merge(self._new)
        self._new = self._empty()

    def _write(self):
        """Writes what is new since the last part of the state."""
        annotations = self.results.annotations[len(self.scores.photos) :] if self.results else []
        with self.guard():
            self._write_part(self._new, annotations)
            self._take_new()
        self._written = time.monotonic()

    def _write_part(self, scores, annotations):
        state = {
            "kind": self.evaluation.name,
            "identity": self.identity,
            "model": self.model,
            "complete": self.complete,
            "spec": self.spec.to_json(),
            "annotations": annotations,
            "scores": scores.state(),
        }
        write_bytes(state_path(self.folder, self.split, self.shard, self._parts), msgspec.json.encode(state))
        self._parts += 1


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
    states = {shard: paths for shard, (paths, _) in _states(results_dir, split).items() if paths}
    if (0, 1) in states:  # an earlier merge, or an evaluation without shards
        whole = states.pop((0, 1))
        for paths in states.values():
            _compare(whole[0], _read(whole[0])["identity"], _read(paths[0])["identity"])
        states = {(0, 1): whole}
    if not states:
        raise InputError(f"{results_dir}: no shard of {split!r} was evaluated with this --results_dir")
    shards = max(n for _, n in states)
    for i in range(shards):
        if (i, shards) not in states:
            raise _left(results_dir, split, (i, shards), "missing")
    path = states[0, shards][0]
    first = _read(path)
    spec = DatasetSpec.from_schema(path, first["spec"])
    evaluation = find_evaluation(first["kind"], f"{path}: kind")
    if shards > 1:
        _refuse_results(evaluation, results_dir, split)
    about = dict(identity=first["identity"], model=first["model"] or first["identity"].get("model", ""))
    whole = SplitRun(evaluation, spec, split, report=report and report(evaluation, spec), **about)
    whole.results = evaluation.results(results_dir, spec, split)
    annotations, empty = {}, functools.partial(evaluation.scores, spec)
    for i in range(shards):
        found = _restored(states[i, shards], empty, (i, shards), identity=first["identity"])
        if not found["complete"]:
            raise _left(results_dir, split, (i, shards), "not finished")
        annotations.update(zip([number for number, *_ in found["scores"].photos], found["annotations"]))
        if i:
            whole.scores.merge(found["scores"])
        else:  # with what only the state knows, as thresholds
            whole.scores = found["scores"]
    whole.results.restore(results_dir, [annotations[number] for number in sorted(annotations)])
    if whole.report:
        whole.report.check(whole.scores.photos)  # while the states of the shards are there, from which they draw
    whole.complete = True
    if shards > 1:
        whole.folder = results_dir
        whole._write_part(whole.scores, whole.results.annotations)
    whole.close()
    return whole


def state_path(results_dir, split, shard, part=0):
    """The path of a part of a shard's state. The first one has the name that the whole state once had."""
    number = f".{part}" if part else ""
    return output_file(results_dir, f".{split}.{shard[0]}-of-{shard[1]}.state{number}.json", "--split")


def _states(results_dir, split):
    """dict from each shard (i, n) to the paths of its state's parts, in order, and of those after a missing one."""
    pattern = re.compile(re.escape(f".{split}.") + r"(\d+)-of-(\d+)\.state(?:\.([1-9]\d*))?\.json")
    names = names_in(results_dir) if tf.io.gfile.isdir(results_dir) else []
    parts = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        parts.setdefault((int(match[1]), int(match[2])), {})[int(match[3] or 0)] = os.path.join(results_dir, match[0])
    found = {}
    for shard, paths in parts.items():
        whole = list(itertools.takewhile(paths.__contains__, range(len(paths))))
        found[shard] = [paths.pop(number) for number in whole], list(paths.values())
    return found


def _restored(paths, empty, shard, *, identity, has_results=True):
    """dict of the 'scores', 'annotations' and 'complete' of a shard; None without parts.

    Args:
        paths: of all parts of its state.
        empty: function that returns empty `Scores`.
        shard: (i, n).
        identity: that the parts must have.
        has_results: whether there is an annotation of each photo.

    Raises:
        InputError: a part of another evaluation, or one that does not go on where the part before it ends.
    """
    scores, annotations = None, []
    for path in paths:
        state, part = _read(path), empty()
        _compare(path, state["identity"], identity)
        _restore_scores(path, part, state)
        first = shard[0] + shard[1] * (len(scores.photos) if scores else 0)
        photos = state["annotations"] if has_results else part.photos
        wanted = range(first, first + shard[1] * len(photos), shard[1])
        if [number for number, *_ in part.photos] != list(wanted):
            raise InputError(f"{path}: not of the {len(wanted)} photos from number {first} on; delete it")
        annotations += state["annotations"]
        if scores:
            scores.merge(part)
        else:
            scores = part
    return scores and {"scores": scores, "annotations": annotations, "complete": state["complete"]}


def _left(results_dir, split, shard, problem):
    return InputError(
        f"{state_path(results_dir, split, shard)}: {problem}; evaluate --shard={'/'.join(map(str, shard))} first"
    )


def _compare(path, found, wanted):
    """Raises InputError unless two identities are the same. Thresholds that only `found` has are a difference too."""
    compare_identity(path, found, {**wanted, "thresholds": wanted.get("thresholds")}, "--results_dir")


def _restore_scores(path, scores, state):
    try:
        scores.restore(state["scores"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{path}: scores: not those of an evaluation ({error}); delete it") from None


def _refuse_results(evaluation, folder, split):
    """Raises InputError if the folder has results of the split."""
    path = evaluation.results.path_of(folder, split)
    if tf.io.gfile.exists(path):
        raise InputError(f"{path}: exists; delete it or choose another --results_dir")


def _read(path):
    """The state as a dict. Raises InputError."""
    return msgspec.structs.asdict(read_json(path, schemas.EvaluationState)[1])
