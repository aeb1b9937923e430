"""Evaluates one split. It resumes, can be shared by several processes, and writes results and a report."""

import os
import re
import time

import msgspec
import tensorflow as tf

from axial.data.files import names_in
from axial.data.specs import DatasetSpec
from axial.errors import InputError
from axial.evaluation.loop import evaluate
from axial.io import schemas
from axial.io.identity import compare_identity
from axial.io.read import read_json
from axial.io.write import output_file, write_bytes


class SplitRun:
    """The evaluation of a split: its scores so far, its results, and the photos of its report.

    With a `results_dir`, the state is written to a hidden file there, every `interval` seconds and at the end of a
    shard. Another run of the same identity resumes from it.

    Args:
        evaluation: `Evaluation`.
        spec: `DatasetSpec`.
        split: name of the split.
        results_dir: folder of the evaluation's results, or None.
        report: `Report`, or None.
        data_dir: folder of the converted split, for the names of the results.
        shard: (i, n) for every n-th photo, from the i-th on.
        identity: dict that differs between different evaluations.
        interval: least seconds between two writes of the state.
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
        self.scores = evaluation.scores(spec, shard, **asked)
        self.results = None
        self.identity, self.interval, self.complete = {**(identity or {}), **asked}, interval, False
        self.path = results_dir and state_path(results_dir, split, shard)
        if not results_dir:
            return
        whole = state_path(results_dir, split, (0, 1))
        if shard != (0, 1) and tf.io.gfile.exists(whole):  # `merge` would take it for the whole of the shards
            _compare(whole, _read(whole)["identity"], self.identity)
        state = _read(self.path) if tf.io.gfile.exists(self.path) else {"complete": False}
        if not state["complete"]:
            _refuse_results(evaluation, results_dir, split)
        self.results = evaluation.results(results_dir, spec, split, data_dir)
        if "identity" in state:
            _compare(self.path, state["identity"], self.identity)
            self._restore(state)

    def _restore(self, state):
        _restore_scores(self.path, self.scores, state)
        self.results.restore(self.path, state["annotations"])
        self.complete = state["complete"]

    def stored(self):
        """Yields what was seen of each photo that an earlier run has scored, in order."""
        for index in range(len(self.scores.photos)):
            yield self.results.seen(index)

    def run(self, examples, predictions, total=None, watch=None):
        """Scores the photos that are left. Returns their result.

        Args:
            examples: function of (shard, skip) that returns evaluation examples.
            predictions: see `evaluate`.
            total: photos of the shard, for the progress bar.
            watch: see `evaluate`.
        """
        self._written = time.monotonic()

        def see(example, seen):
            if self.results:
                self.results.add(example, seen)
            if self.report:
                self.report.add(example, seen, self.scores.photos)
            if watch:
                watch(example, seen)
            if self.path and time.monotonic() - self._written >= self.interval:
                self._write()

        if not self.complete:
            left = examples(self.shard, len(self.scores.photos))
            evaluate(left, predictions, self.scores, total, watch=see, unit=self.evaluation.unit)
            self.complete = True
            if self.path:
                self._write()
        if self.shard[1] == 1:
            self.close()
        return self.scores.result()

    def close(self):
        """Writes the JSON of the results and removes the states of shards. The state of the whole split stays."""
        if self.results:
            self.results.close()
            for shard, path in _states(self.results.folder, self.split).items():
                if shard != (0, 1):
                    tf.io.gfile.remove(path)

    def _write(self):
        state = {
            "kind": self.evaluation.name,
            "identity": self.identity,
            "model": self.model,
            "complete": self.complete,
            "spec": self.spec.to_json(),
            "annotations": self.results.annotations,
            "scores": self.scores.state(),
        }
        write_bytes(self.path, msgspec.json.encode(state))
        self._written = time.monotonic()


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
    states = _states(results_dir, split)
    if (0, 1) in states:  # an earlier merge, or an evaluation without shards
        whole = states.pop((0, 1))
        for path in states.values():
            _compare(whole, _read(whole)["identity"], _read(path)["identity"])
        states = {(0, 1): whole}
    if not states:
        raise InputError(f"{results_dir}: no shard of {split!r} was evaluated with this --results_dir")
    shards = max(n for _, n in states)
    found = {}
    for i in range(shards):
        path = state_path(results_dir, split, (i, shards))
        found[i] = _read(path) if (i, shards) in states else None
        if not (found[i] and found[i]["complete"]):
            problem = "not finished" if found[i] else "missing"
            raise InputError(f"{path}: {problem}; evaluate --shard={i}/{shards} first")
        _compare(path, found[i]["identity"], found[0]["identity"])
    spec = DatasetSpec.from_schema(path, found[0]["spec"])
    evaluation = find_evaluation(found[0]["kind"], f"{path}: kind")
    if shards > 1:
        _refuse_results(evaluation, results_dir, split)
    about = dict(identity=found[0]["identity"], model=found[0]["model"] or found[0]["identity"].get("model", ""))
    whole = SplitRun(evaluation, spec, split, report=report and report(evaluation, spec), **about)
    whole.results = evaluation.results(results_dir, spec, split)
    annotations = {}
    for i, state in found.items():
        part = evaluation.scores(spec, (i, shards))
        _restore_scores(results_dir, part, state)
        if i:
            whole.scores.merge(part)
        else:  # with what only this state knows, as thresholds
            _restore_scores(results_dir, whole.scores, state)
        annotations.update(zip([number for number, *_ in part.photos], state["annotations"]))
    whole.results.restore(results_dir, [annotations[number] for number in sorted(annotations)])
    if whole.report:
        whole.report.check(whole.scores.photos)  # while the states of the shards are there, from which they draw
    whole.path, whole.complete = state_path(results_dir, split, (0, 1)), True
    whole._write()
    whole.close()
    return whole


def state_path(results_dir, split, shard):
    return output_file(results_dir, f".{split}.{shard[0]}-of-{shard[1]}.state.json", "--split")


def _states(results_dir, split):
    """Dict from each shard (i, n) to the path of its state."""
    pattern = re.compile(re.escape(f".{split}.") + r"(\d+)-of-(\d+)\.state\.json")
    names = names_in(results_dir) if tf.io.gfile.isdir(results_dir) else []
    matches = [match for match in map(pattern.fullmatch, names) if match]
    return {(int(m[1]), int(m[2])): os.path.join(results_dir, m[0]) for m in matches}


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
