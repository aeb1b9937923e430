"""The functions of axial-evaluate's verbs, which run after the checks of the flags. Imports TensorFlow."""

import csv
import dataclasses
import datetime
import functools
import io
import os

import tensorflow as tf

from axial.cli.flags import as_path
from axial.data.converters.coco import sample_data_dir
from axial.data.converters.nuclei import nuclei_data_dir
from axial.data.objects import read_objects
from axial.data.preprocess import SCALE
from axial.data.specs import NUCLEI, difference
from axial.data.streams import name_damaged_records
from axial.data.tfrecord import find_splits, fingerprint, read_manifest
from axial.errors import InputError
from axial.io import gfile
from axial.io.lock import locked_file
from axial.io.read import read_text
from axial.io.show import csv_text, percent, print_table, say
from axial.io.write import folder_digests, output_folder, write_json, write_text, write_whole
from axial.layers.device import is_compiled
from axial.recipes import configuration
from axial.serving.predictor import Predictor
from axial.serving.zoom import Zoomed
from axial.tasks.base import Inference
from axial.tasks.metrics import evaluate
from axial.tasks.registry import find_evaluator
from axial.tasks.segmentation import studies
from axial.tasks.segmentation.cityscapes_scores import check_cityscapes, cityscapes_scores
from axial.tasks.segmentation.drawing import save_stress
from axial.tasks.segmentation.evaluator import PANOPTIC, submitted
from axial.tasks.segmentation.prediction_writers import CityscapesPredictionWriter, StoredPredictions
from axial.training import split_run
from axial.training.monitor import write_scalar
from axial.training.report import Report, save_picture_table
from axial.training.saving import checkpoints, removed
from axial.training.strategy import make_strategy
from axial.weights.card import PAGE
from axial.weights.interchange import weights_digest
from axial.weights.names import weight_names
from axial.weights.restore import find_weights, read_weights, restore_model
from axial.weights.source import resolve

PICTURES = 8  # photos per split in --picture

# === Where predictions come from ===
#
# Predictions come from a run, an export, or files of another program. Each of these classes has an `evaluator`, a
# `spec`, the default `data_dir` and `split`, and a readable `name`. `details` names a run's network and checkpoint.
# `identity` is a dict of the weights and of every setting that predictions depend on, without paths.
# `examples(split, shard, skip)` returns examples, and `predictions(split)` returns a function of these examples; see
# `evaluate`. `stores` says whether --results_dir stores the predictions.


def needs(evaluator, study):
    """Raises InputError unless an `Evaluator` supports a study, which is the name of a verb or a flag."""
    if study.removeprefix("--") not in evaluator.studies:
        raise InputError(f"{study}: not for {evaluator.name}")


def check_studies(given, evaluator, spec, instances=True):
    """Raises InputError if the evaluator or spec does not support the given --submission_dir or --thresholds."""
    if given.submission_dir:
        needs(evaluator, "--submission_dir")
    if given.thresholds:
        needs(evaluator, "--thresholds")
        if not any(spec.things):
            raise InputError(f"--thresholds: matches things, and the spec {spec.name!r} has none")
        if not instances:
            raise InputError("--thresholds: matches things, and the run's task has no instances")


class Model:
    """Base of sources whose predictions a `predictor` makes."""

    stores, details = True, ()

    def predictions(self, split):
        diameter = self.given.diameter
        return self.predictor.predictions if diameter is None else Zoomed(self.predictor, diameter).predictions


class Run(Model):
    """Predictions of a model with its weights. Its recipe, or --gin_file, gives the data, canvas and grouping.

    Args:
        given: the flags.
        what: path or name of the weights; see `resolve`.
        checkpoint: a checkpoint of the run; by default --checkpoint, or the best one.
        name: readable name; by default the path of the checkpoint.
    """

    def __init__(self, given, what, checkpoint=None, name=None):
        self.given, checkpoint = given, checkpoint or given.checkpoint
        strategy, source = make_strategy(given.strategy, given.tpu), resolve(what)
        with strategy.scope():
            self.task, self.model = task, model = _restored(given, source, checkpoint)
        self.objects = None if given.gin_file else read_objects(source.folder)
        weights = find_weights(checkpoint or source, given.average)[-1]
        self.name, self.details = name or weights, (task.model.name, os.path.basename(weights))
        looks = (task.multi_scale, True) if given.multi_scale else (given.scales, given.flip)
        alone = given.diameter is not None  # predicts one photo at a time
        compiled = not alone and is_compiled(configuration.query("TrainingConfig.jit_compile", "auto"))
        self.inference = Inference(None if alone else strategy, *looks, compiled)
        self.evaluator, self.spec, self.data_dir = task.evaluator, task.spec, task.data_dir
        self.split = task.data.eval_split
        check_studies(given, self.evaluator, self.spec, task.instances)
        self.identity = {
            "weights": weights_digest({name: weight.numpy() for name, weight in weight_names(model).items()}),
            "network": task.model.settings(),
            "canvas": task.canvas,
            "scales": self.inference.scales,
            "flip": self.inference.flip,
            "diameter": given.diameter,
            SCALE: None,  # `task.settings` may replace it; None equals a missing value, as in older files
            **task.settings,
        }

    def resize(self, canvas):
        """Sets another canvas for the following evaluations."""
        if self.evaluator.takes != "photo":
            raise InputError(f"--image_size: not for {self.evaluator.name}")
        self.task = dataclasses.replace(self.task, data=self.task.data.resized(canvas))
        self.identity["canvas"] = self.task.canvas

    def examples(self, split, shard, skip):
        return self.task.eval_dataset(split, shard=shard, skip=skip)

    @property
    def predictor(self):
        return Predictor.of_task(self.task, self.model, self.inference, self.objects)


def _restored(given, source, checkpoint):
    """Builds the task of a `Source`, by --gin_file or else by its own recipe, and the model with its weights."""
    splits = given.split or [None]
    if given.gin_file:
        card, fill = read_weights(source)
        task = configuration.task_of_weights(given.gin_file, card, given.data_dir, given.gin_binding, path=source.path)
        configuration.check_splits(task, splits)
        model = task.build_model()
        fill(model)
        return task, model
    arguments = source, checkpoint, given.data_dir, given.gin_binding
    return configuration.restore_run(*arguments, average=given.average, splits=splits)


class Export(Model):
    """Predictions of an export, given as a `Source`."""

    def __init__(self, given, source):
        for flag in given.changed("gin_file", "scales", "flip", "multi_scale", "gin_binding", "image_size"):
            raise InputError(f"--{flag}: {given.model} is an export, which is fixed; a run takes --{flag}")
        self.given = given
        self.predictor = configuration.load_export(source)
        self.spec, self.evaluator = self.predictor.spec, self.predictor.evaluator
        check_studies(given, self.evaluator, self.spec)
        sample, split = (sample_data_dir, "val2017") if difference(self.spec, NUCLEI) else (nuclei_data_dir, "test")
        self.data_dir = given.data_dir or sample()
        (self.split,) = find_splits(self.data_dir, {"val": split})
        self.name, files = given.model, folder_digests(source.folder, leave=(PAGE,))
        self.identity = {"files": files, "diameter": given.diameter}

    def examples(self, split, shard, skip):
        return self.predictor.examples(self.data_dir, split, shard=shard, skip=skip)


class Results:
    """Segmentations from result files of another program."""

    stores, split, details = False, None, ()

    def __init__(self, given):
        self.given, self.data_dir = given, given.data_dir
        self.evaluator = PANOPTIC
        self.spec = read_manifest(self.data_dir, given.split[0])["spec"]
        check_studies(given, self.evaluator, self.spec)
        self.name, self.identity = given.results_json, {}

    def examples(self, split, shard, skip):
        return self.evaluator.examples(self.data_dir, split, self.spec, shard=shard, skip=skip)

    def predictions(self, split):
        given = self.given
        return StoredPredictions(given.results_json, given.results_dir, self.data_dir, split, spec=self.spec)


# === Output of scores ===


def tell(given, evaluator, scores, columns):
    """Prints the scores of an `Evaluator` in percent, and appends them to --csv; see `append_scores`."""
    append_scores(given.csv, evaluator, scores, columns)
    print_table(*evaluator.classes(scores))
    *lines, main = evaluator.lines(scores)
    say(*lines, f"{main} split={columns['split']} {evaluator.unit}s={columns['photos']}")


def print_rows(title, rows, about):
    """Prints dicts with equal keys as the rows of a table. All columns but `about` are fractions, shown in percent."""
    cells = [[value if name in about else percent(value) for name, value in row.items()] for row in rows]
    print_table(rows[0], cells, title=title)


def write_scores(path, scores):
    """Writes scores to the file of --json, if given."""
    if path:
        write_json(path, scores)


def append_scores(path, evaluator, scores, columns):
    """Appends a row to a CSV, if given. Creates a missing file with its header.

    Args:
        path: path of the CSV, or None.
        evaluator: `Evaluator` of the scores.
        scores: the scores; the row has them in percent.
        columns: dict from the names of the columns before the scores to their values.

    Raises:
        InputError: the file has other columns.
    """
    if not path:
        return
    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row = {"time": time, **columns}
    row.update({name: "" if v != v else round(100 * v, 3) for name, v in evaluator.columns(scores).items()})
    header, line = csv_text([row]), csv_text([row.values()])
    (new,) = csv.DictReader(io.StringIO(header + line))
    with locked_file(path):  # another command may append to it
        text = read_text(path) if gfile.exists(path) else ""
        if text and next(csv.reader(io.StringIO(text)), []) != list(row):
            raise InputError(f"{path}: has other columns than {', '.join(row)}; choose another --csv")
        if any({**new, "time": old["time"]} == old for old in csv.DictReader(io.StringIO(text))):
            return  # the command was killed after it wrote the row, and runs again
        write_text(path, (text or header) + line)


# === The verbs ===


def run(given):
    """Scores each split of a run or an export."""
    model = resolve(given.model or as_path(given.model_dir[0]))
    source = Export(given, model) if given.model and model.kind == "export" else Run(given, model, name=given.model)
    if not given.image_size:
        _score(source, given)
        return
    rows, table = {}, {}
    for canvas in given.image_size:
        source.resize(canvas)
        size = "x".join(map(str, canvas))
        for score in [_scoring(source, split, given) for split in given.split or [source.split]]:
            scored, scores, _ = score()
            table[f"{scored.split} at {size}"] = scores
            rows.setdefault(scored.split, []).append({"image_size": size, **source.evaluator.headline(scores)})
            columns = {"model": source.name, "split": scored.split, "image_size": size}
            append_scores(given.csv, source.evaluator, scores, columns)
    for split, sizes in rows.items():
        print_rows(split, sizes, ["image_size"])
    write_scores(given.json, table)


def results(given):
    """Scores result files of another program."""
    _score(Results(given), given)


def _score(source, given):
    splits, how, scores, blocks = given.split or [source.split], source.evaluator, {}, []
    for split in splits if given.cityscapes_dir else ():
        check_cityscapes(given.cityscapes_dir, split)
    for score in [_scoring(source, split, given) for split in splits]:
        scored, result, rows = score()
        scores[scored.split] = result
        blocks.append((scored.split, rows, f"{how.lines(result)[-1].split()[0]} %"))
        _publish(scored, result, given, source.details)
    write_scores(given.json, scores)
    if given.picture:
        write_whole(given.picture, lambda path: save_picture_table(path, blocks, how.pictures))
    if given.cityscapes_dir:  # last, so that no error loses scores
        for split in splits:
            theirs = cityscapes_scores(given.cityscapes_dir, given.submission_dir, split)
            scores[split]["cityscapesscripts"] = theirs
            say("cityscapesscripts: " + " ".join(f"{name}={100 * score:.2f}" for name, score in theirs.items()))
        write_scores(given.json, scores)


def _scoring(source, split, given):
    """A function without arguments that scores a split and returns (`SplitRun`, scores, rows of the picture).

    Raises InputError before any computation if --results_dir has results of other predictions.
    """
    asked = {"thresholds": list(given.thresholds)} if given.thresholds else {}
    scored = split_run.SplitRun(
        source.evaluator,
        source.spec,
        split,
        results_dir=given.results_dir if source.stores else None,
        report=Report(source.evaluator, source.spec, given.report, split) if given.report else None,
        data_dir=source.data_dir,
        shard=given.shard or (0, 1),
        identity={**source.identity, "data": fingerprint(source.data_dir, split), **asked},
        model=source.name,
    )
    scored.restore()
    predictions, rows = source.predictions(split), []
    files = given.submission_dir and CityscapesPredictionWriter(given.submission_dir, source.spec, split)
    if files:
        predictions = submitted(predictions, files, source.spec)
    examples = functools.partial(source.examples, split)

    def watch(example, decoded):
        if len(rows) < PICTURES:
            rows.append(source.evaluator.draw(example, decoded, source.spec))

    def score():
        number, of = scored.shard
        total = len(range(number, read_manifest(source.data_dir, split)["examples"], of))
        with name_damaged_records(source.data_dir, split):
            scores = scored.run(examples, predictions, total, watch=watch if given.picture else None)
        if files:
            files.close(name for _, name, _ in scored.metrics.photos)
        return scored, scores, rows

    return score


def _publish(scored, scores, given, details=()):
    """Writes the report and the CSV of a split, and prints its table."""
    if scored.report:
        say(f"report {scored.report.write(scored.metrics, [scored.model, *details])}")
    photos, shard = len(scored.metrics.photos), given.shard and "/".join(map(str, given.shard))
    columns = {"model": scored.model, "split": scored.split, "photos": photos, "shard": shard}
    tell(given, scored.evaluator, scores, columns)


def merge(given):
    """Merges the shards of each split and prints the scores."""
    scores = {}
    for split in given.split:
        report = given.report and functools.partial(Report, folder=given.report, split=split)
        scored = split_run.merge(given.results_dir, split, find_evaluator, report)
        scores[split] = scored.metrics.result()
        _publish(scored, scores[split], given)
    write_scores(given.json, scores)


def stress(given):
    """Scores one or two runs at several resolutions."""
    curves = {}
    for model_dir in given.model_dir:
        source = Run(given, as_path(model_dir))
        needs(source.evaluator, "stress")
        split = (given.split or [source.split])[0]
        with name_damaged_records(source.data_dir, split):
            rows = studies.stress_test(source.task, source.model, split, given.ratios, inference=source.inference)
            curves[model_dir] = list(rows)
    studies.add_changes(list(curves.values()))
    for name, rows in curves.items():
        print_rows(name, rows, ["ratio", "canvas"])
    write_scores(given.json, {"split": split, "runs": curves})
    if given.picture:
        write_whole(given.picture, lambda path: save_stress(path, curves))


def sweep(given):
    """Scores a run with every combination of grouping settings."""
    tables, source = {}, Run(given, as_path(given.model_dir[0]))
    needs(source.evaluator, "sweep")
    knobs, groupings = zip(*studies.combinations(source.task.grouping, given.knob))
    tasks = [dataclasses.replace(source.task, grouping=grouping) for grouping in groupings]
    for split in given.split or [source.split]:
        total, thresholds = read_manifest(source.data_dir, split)["examples"], given.thresholds or ()
        with name_damaged_records(source.data_dir, split):
            examples = source.task.eval_dataset(split)
            scores = studies.sweep(tasks, source.model, examples, source.inference, total=total, thresholds=thresholds)
        tables[split] = [{**one, **source.evaluator.headline(result)} for one, result in zip(knobs, scores)]
        print_rows(split, tables[split], knobs[0])
    write_scores(given.json, tables)


def watch(given):
    """Scores every checkpoint of a run while it trains."""
    model_dir, source, table = given.model_dir[0], None, {}
    if not tf.io.gfile.isdir(model_dir):
        raise InputError(f"--model_dir={model_dir}: no such folder")
    say(f"{model_dir}: scores each checkpoint, and waits up to {given.timeout} seconds for the next", error=True)

    @functools.cache
    def writer(split):
        return tf.summary.create_file_writer(output_folder(model_dir, f"eval_{split}", "--split"))

    for step, prefix in checkpoints(model_dir, lambda: configuration.build("TrainingConfig").steps, given.timeout):
        try:
            if source is None:
                source = Run(given, as_path(model_dir), prefix)
                predictions = source.predictions(None)
            else:
                restore_model(source.model, prefix)
        except InputError:
            if tf.io.gfile.exists(f"{prefix}.index"):
                raise
            removed(prefix)
            continue
        how = source.evaluator
        for split in given.split or [source.split]:
            total = read_manifest(source.data_dir, split)["examples"]
            with name_damaged_records(source.data_dir, split):
                scores = evaluate(source.task.eval_dataset(split), predictions, how.metrics(source.spec), total)
            with writer(split).as_default():
                for name, value in how.summaries(scores).items():
                    write_scalar(f"eval/{name}", value, step)
            table[f"{split} at step {step}"] = scores
            tell(given, how, scores, {"model": prefix, "split": split, "photos": total, "shard": None})
        write_scores(given.json, table)
