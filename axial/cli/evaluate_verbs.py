"""What the verbs of axial-evaluate do, after their flags are checked. Imports TensorFlow."""

import dataclasses
import functools

import tensorflow as tf

from axial import configuration
from axial.cli import evaluate_sources
from axial.cli.flags import as_path
from axial.cli.pages import finish
from axial.cli.tables import append_scores, print_rows, print_scores
from axial.data.streams import name_damaged_records
from axial.data.tfrecord import fingerprint, read_manifest
from axial.errors import InputError
from axial.evaluation import split_run
from axial.evaluation.checkpoints import checkpoints, removed
from axial.evaluation.loop import evaluate, write_scalar
from axial.evaluation.pictures import save_picture_table
from axial.evaluation.report import Report
from axial.io.show import say
from axial.io.write import output_folder, write_whole
from axial.tasks.registry import find_evaluation
from axial.tasks.segmentation import studies
from axial.tasks.segmentation.cityscapes_scores import check_cityscapes, cityscapes_scores
from axial.tasks.segmentation.drawing import save_stress
from axial.tasks.segmentation.evaluation import submitted
from axial.tasks.segmentation.results import CityscapesResults
from axial.weights.restore import restore_model

PICTURES = 8  # photos of a split in --picture


def run(given, model):
    """Scores each split of a run or an export; `model` is the `Source` of --model."""
    source = evaluate_sources.source(given, model)
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
            rows.setdefault(scored.split, []).append({"image_size": size, **source.evaluation.headline(scores)})
            if given.csv:
                about = dict(model=source.name, split=scored.split, image_size=size)
                append_scores(given.csv, source.evaluation, scores, **about)
    for split, found in rows.items():
        print_rows(split, found)
    finish(table)


def results(given):
    """Scores files that were made elsewhere."""
    _score(evaluate_sources.Results(given), given)


def _score(source, given):
    splits, how, scores, blocks = given.split or [source.split], source.evaluation, {}, []
    for split in splits:
        if given.cityscapes_dir:
            check_cityscapes(given.cityscapes_dir, split)
    for score in [_scoring(source, split, given) for split in splits]:
        scored, result, rows = score()
        scores[scored.split] = result
        blocks.append((scored.split, rows, f"{how.lines(result)[-1].split()[0]} %"))
        _publish(scored, result, given)
    finish(scores)
    if given.picture:
        write_whole(given.picture, lambda path: save_picture_table(path, blocks, how.pictures, given.caption))
    if given.cityscapes_dir:  # last, so that an error loses no scores
        for split in splits:
            theirs = cityscapes_scores(given.cityscapes_dir, given.submission_dir, split)
            scores[split]["cityscapesscripts"] = theirs
            say("cityscapesscripts: " + " ".join(f"{name}={100 * score:.2f}" for name, score in theirs.items()))
        finish(scores)


def _scoring(source, split, given):
    """A function of nothing that scores a split, and returns its `SplitRun`, the scores and the rows of its picture.

    Stored work of others is refused before anything is computed.
    """
    asked = {"thresholds": list(given.thresholds)} if given.thresholds else {}
    scored = split_run.SplitRun(
        source.evaluation,
        source.spec,
        split,
        results_dir=given.results_dir if source.stores else None,
        report=_make_report(given, split, source.evaluation, source.spec),
        data_dir=source.data_dir,
        shard=given.shard or (0, 1),
        identity={**source.identity, "data": fingerprint(source.data_dir, split), **asked},
        model=source.name,
    )
    scored.restore()
    predictions, rows = source.predictions(split), []
    files = given.submission_dir and CityscapesResults(given.submission_dir, source.spec, split)
    if files:
        predictions = submitted(predictions, files, source.spec)
    examples = functools.partial(source.examples, split)

    def watch(example, seen):
        if given.picture and len(rows) < PICTURES:
            rows.append(source.evaluation.draw(example, seen, source.spec))

    def score():
        number, of = scored.shard
        total = len(range(number, read_manifest(source.data_dir, split)["examples"], of))
        with name_damaged_records(source.data_dir, split):
            if given.picture or given.report:  # draws the photos that an earlier call has scored
                stored = zip(examples(scored.shard, 0), scored.stored())
                for photo, (example, seen) in zip(scored.scores.photos, stored):
                    watch(example, seen)
                    if scored.report:
                        scored.report.add(example, seen, photo)
            scores = scored.run(examples, predictions, total, watch=watch)
        if files:
            files.close(name for _, name, _ in scored.scores.photos)
        return scored, scores, rows

    return score


def _make_report(given, split, evaluation, spec):
    return Report(evaluation, given.report, split, spec, caption=given.caption) if given.report else None


def _publish(scored, scores, given):
    """Writes the report and the CSV of a split, and prints its table."""
    if scored.report:
        say(f"report {scored.report.write(scored.scores)}")
    photos, shard = len(scored.scores.photos), given.shard and "/".join(map(str, given.shard))
    if given.csv:
        about = dict(model=scored.model, split=scored.split, photos=photos, shard=shard)
        append_scores(given.csv, scored.evaluation, scores, **about)
    print_scores(scored.evaluation, scored.split, scores, photos)


def merge(given):
    """Adds up the shards of each split."""
    scores = {}
    for split in given.split:
        how = functools.partial(_make_report, given, split)
        scored = split_run.merge(given.results_dir, split, find_evaluation, how)
        scores[split] = scored.scores.result()
        _publish(scored, scores[split], given)
    finish(scores)


def stress(given):
    """Scores one run or two at several resolutions."""
    curves = {}
    for model_dir in given.model_dir:
        source = evaluate_sources.Run(given, as_path(model_dir))
        evaluate_sources.needs(source.evaluation, "stress", "stress")
        split = (given.split or [source.split])[0]
        with name_damaged_records(source.data_dir, split):
            rows = studies.stress_test(source.task, source.model, split, given.ratios, inference=source.inference)
            curves[model_dir] = list(rows)
    studies.add_changes(list(curves.values()))
    for name, rows in curves.items():
        print_rows(name, rows)
    finish({"split": split, "runs": curves})
    if given.picture:
        write_whole(given.picture, lambda path: save_stress(path, curves, given.caption))


def sweep(given):
    """Scores a run with every combination of knobs of the grouping."""
    tables, source = {}, evaluate_sources.Run(given, as_path(given.model_dir[0]))
    evaluate_sources.needs(source.evaluation, "sweep", "sweep")
    knobs, groupings = zip(*studies.combinations(source.task.grouping, given.knob))
    tasks = [dataclasses.replace(source.task, grouping=grouping) for grouping in groupings]
    for split in given.split or [source.split]:
        total, thresholds = read_manifest(source.data_dir, split)["examples"], given.thresholds or ()
        with name_damaged_records(source.data_dir, split):
            examples = source.task.eval_dataset(split)
            scores = studies.sweep(tasks, source.model, examples, source.inference, total=total, thresholds=thresholds)
        tables[split] = [{**one, **source.evaluation.headline(result)} for one, result in zip(knobs, scores)]
        print_rows(split, tables[split])
    finish(tables)


def watch(given):
    """Scores every checkpoint of a run, beside its training."""
    model_dir, source, table = given.model_dir[0], None, {}
    if not tf.io.gfile.isdir(model_dir):
        raise InputError(f"--model_dir={model_dir}: no such folder")

    @functools.cache
    def writer(split):
        return tf.summary.create_file_writer(output_folder(model_dir, f"eval_{split}", "--split"))

    for step, prefix in checkpoints(model_dir, lambda: configuration.build("TrainingConfig").steps, given.timeout):
        try:
            if source is None:
                source = evaluate_sources.Run(given, as_path(model_dir), prefix)
                predictions = source.predictions(None)
            else:
                restore_model(source.model, prefix)
        except InputError:
            if tf.io.gfile.exists(f"{prefix}.index"):
                raise
            removed(prefix)
            continue
        how = source.evaluation
        for split in given.split or [source.split]:
            total = read_manifest(source.data_dir, split)["examples"]
            with name_damaged_records(source.data_dir, split):
                scores = evaluate(source.task.eval_dataset(split), predictions, how.scores(source.spec), total)
            with writer(split).as_default():
                for name, value in how.summaries(scores).items():
                    write_scalar(f"eval/{name}", value, step)
            if given.csv:
                append_scores(given.csv, how, scores, model=prefix, split=split, photos=total, shard=None)
            table[f"{split} at step {step}"] = scores
            print_scores(how, split, scores, total)
        finish(table)
