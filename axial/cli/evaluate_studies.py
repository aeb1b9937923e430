"""The verbs of axial-evaluate that study runs: stress, sweep, watch."""

import functools

from absl import flags

from axial.cli import app, evaluate_sources
from axial.cli.checks import check_checkpoint, check_folder, check_run, check_splits

FLAGS = flags.FLAGS


def run_stress(_):
    ratios, curves = app.positive_numbers("ratios", app.flag("ratios")), {}
    for model_dir in FLAGS.model_dir:
        check_run(model_dir, FLAGS.gin_binding)
    check_checkpoint(FLAGS.checkpoint)
    check_splits(FLAGS.data_dir, FLAGS.split)
    from axial.cli.tables import print_rows
    from axial.data.streams import name_damaged_records
    from axial.io.write import write_json, write_whole
    from axial.tasks.segmentation.drawing import save_stress
    from axial.tasks.segmentation.studies import add_changes, stress_test

    for model_dir in FLAGS.model_dir:
        run = evaluate_sources.Run(model_dir)
        evaluate_sources.needs(run.evaluation, "stress", "stress")
        split = (FLAGS.split or [run.split])[0]
        looks = dict(strategy=run.strategy, scales=run.scales, flip=run.flip)
        with name_damaged_records(run.data_dir, split):
            curves[model_dir] = list(stress_test(run.task, run.model, split, ratios, **looks))
    add_changes(list(curves.values()))
    for name, rows in curves.items():
        print_rows(name, rows)
    if FLAGS.json:
        write_json(FLAGS.json, {"split": split, "runs": curves})
    if FLAGS.picture:
        write_whole(FLAGS.picture, lambda path: save_stress(path, curves, FLAGS.caption))


def check_one_run():
    """Raises InputError for more than one run."""
    from axial.errors import InputError

    if len(app.flag("model_dir")) > 1:
        raise InputError("--model_dir: one run; stress takes two")
    evaluate_sources.check_looks()
    evaluate_sources.thresholds()


def check_stress():
    """Raises InputError for more than two runs, or more than one split."""
    from axial.errors import InputError

    if len(app.flag("model_dir")) > 2:
        raise InputError("--model_dir: one run or two")
    if len(FLAGS.split or ()) > 1:
        raise InputError("--split: stress takes one")
    evaluate_sources.check_looks()


def run_sweep(_):
    sweeps, tables = app.flag("knob"), {}
    check_run(app.flag("model_dir")[0], FLAGS.gin_binding)
    check_checkpoint(FLAGS.checkpoint)
    check_splits(FLAGS.data_dir, FLAGS.split)
    from axial.cli.tables import print_rows
    from axial.data import tfrecord
    from axial.data.streams import name_damaged_records
    from axial.io.write import write_json
    from axial.tasks.segmentation.studies import combinations, sweep

    run = evaluate_sources.Run(FLAGS.model_dir[0])
    evaluate_sources.needs(run.evaluation, "sweep", "sweep")
    knobs, groupings = zip(*combinations(run.task.grouping, sweeps))
    outputs, stores = run.outputs(), {split: run.store(split) for split in FLAGS.split or [run.split]}
    for split, store in stores.items():
        total = tfrecord.read_manifest(run.data_dir, split)["examples"]
        examples = run.task.eval_dataset(split)
        with name_damaged_records(run.data_dir, split):
            scores = sweep(
                outputs, examples, groupings, store=store, total=total, thresholds=evaluate_sources.thresholds()
            )
        tables[split] = [{**one, **run.evaluation.headline(result)} for one, result in zip(knobs, scores)]
        print_rows(split, tables[split])
    if FLAGS.json:
        write_json(FLAGS.json, tables)


def run_watch(_):
    model_dir, run, table = app.flag("model_dir")[0], None, {}
    check_folder("model_dir", model_dir)
    check_splits(FLAGS.data_dir, FLAGS.split)
    import tensorflow as tf

    from axial import configuration
    from axial.cli.tables import append_scores, print_scores
    from axial.data import tfrecord
    from axial.data.streams import name_damaged_records
    from axial.errors import InputError
    from axial.evaluation.checkpoints import checkpoints, removed
    from axial.evaluation.loop import evaluate, write_scalar
    from axial.io.write import output_folder, write_json
    from axial.weights.restore import restore_model

    if not tf.io.gfile.isdir(model_dir):
        raise InputError(f"--model_dir={model_dir}: no such folder")

    def last_step():
        return configuration.build("TrainingConfig").steps

    @functools.cache
    def writer(split):
        return tf.summary.create_file_writer(output_folder(model_dir, f"eval_{split}", "--split"))

    for step, prefix in checkpoints(model_dir, last_step, FLAGS.timeout):
        try:
            if run is None:
                run = evaluate_sources.Run(model_dir, prefix)
                predictions = run.predictions(None)
            else:
                restore_model(run.model, prefix)
        except InputError:
            if tf.io.gfile.exists(f"{prefix}.index"):
                raise
            removed(prefix)
            continue
        for split in FLAGS.split or [run.split]:
            total = tfrecord.read_manifest(run.data_dir, split)["examples"]
            with name_damaged_records(run.data_dir, split):
                scores = evaluate(run.task.eval_dataset(split), predictions, run.task.scores(), total)
            with writer(split).as_default():
                for name, value in run.evaluation.summaries(scores).items():
                    write_scalar(f"eval/{name}", value, step)
            if FLAGS.csv:
                append_scores(FLAGS.csv, run.evaluation, scores, model=prefix, split=split, photos=total, shard=None)
            table[f"{split} at step {step}"] = scores
            print_scores(run.evaluation, split, scores, total)
        if FLAGS.json:
            write_json(FLAGS.json, table)
