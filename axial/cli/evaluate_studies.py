"""The verbs of axial-evaluate that study runs: stress, sweep, watch."""

import functools

from axial.cli import evaluate_sources, flags
from axial.cli.checks import check_checkpoint, check_folder, check_run, check_splits
from axial.cli.flags import Flag, as_path
from axial.cli.tables import append_scores, print_rows, print_scores
from axial.errors import InputError
from axial.io.write import output_folder, write_json, write_whole


class OfRun(flags.Devices, flags.Looks):
    """A run, and how it looks at which photos."""

    # What has a flag of some verbs alone.
    checkpoint = outputs_dir = submission_dir = diameter = thresholds = model = None
    average, gin_file = 1, ()
    model_dir = flags.MODEL_DIR.but(kind=tuple)
    data_dir = flags.DATA_DIR
    split = flags.SPLIT
    gin_binding = flags.GIN_BINDING

    def check(self):
        if len(self.model_dir) > 1:
            raise InputError("--model_dir: one run; stress takes two")


class Study(OfRun):
    """A study of a run, or of two."""

    model_dir = flags.MODEL_DIR.but(kind=tuple, needed=True)


class Stress(Study):
    checkpoint = flags.CHECKPOINT
    ratios = Flag(
        list,
        "resolutions to score at, as ratios of the canvas' sides; not with a DataConfig.photo_scale.",
        read=flags.positive_numbers,
        needed=True,
    )
    json = flags.JSON
    picture = flags.PICTURE
    caption = flags.CAPTION

    def check(self):
        if len(self.model_dir) > 2:
            raise InputError("--model_dir: one run or two")
        if len(self.split) > 1:
            raise InputError("--split: stress takes one")


class Sweep(Study):
    checkpoint = flags.CHECKPOINT
    knob = Flag(tuple, "'KNOB=VALUE,VALUE' of PostprocessConfig: scores every combination of such knobs.", needed=True)
    outputs_dir = flags.OUTPUTS_DIR
    json = flags.JSON
    thresholds = flags.THRESHOLDS


class Watch(Study):
    timeout = Flag(int, "seconds to wait for the next checkpoint.", 3600, least=0)
    json = flags.JSON
    csv = flags.CSV


def look_for(given):
    """Raises InputError unless the runs, the checkpoint and the splits are there that flags name."""
    for model_dir in given.model_dir:
        check_run(model_dir, given.gin_binding)
    check_checkpoint(given.checkpoint)
    check_splits(given.data_dir, given.split)


def run_stress(given: Stress):
    look_for(given)
    from axial.data.streams import name_damaged_records
    from axial.tasks.segmentation.drawing import save_stress
    from axial.tasks.segmentation.studies import add_changes, stress_test

    curves = {}
    for model_dir in given.model_dir:
        run = evaluate_sources.Run(given, as_path(model_dir))
        evaluate_sources.needs(run.evaluation, "stress", "stress")
        split = (given.split or [run.split])[0]
        looks = dict(strategy=run.strategy, scales=run.scales, flip=run.flip)
        with name_damaged_records(run.data_dir, split):
            curves[model_dir] = list(stress_test(run.task, run.model, split, given.ratios, **looks))
    add_changes(list(curves.values()))
    for name, rows in curves.items():
        print_rows(name, rows)
    if given.json:
        write_json(given.json, {"split": split, "runs": curves})
    if given.picture:
        write_whole(given.picture, lambda path: save_stress(path, curves, given.caption))


def run_sweep(given: Sweep):
    look_for(given)
    from axial.data import tfrecord
    from axial.data.streams import name_damaged_records
    from axial.tasks.segmentation.studies import combinations, sweep

    tables = {}
    run = evaluate_sources.Run(given, as_path(given.model_dir[0]))
    evaluate_sources.needs(run.evaluation, "sweep", "sweep")
    knobs, groupings = zip(*combinations(run.task.grouping, given.knob))
    outputs, stores = run.outputs(), {split: run.store(split) for split in given.split or [run.split]}
    for split, store in stores.items():
        total = tfrecord.read_manifest(run.data_dir, split)["examples"]
        examples = run.task.eval_dataset(split)
        with name_damaged_records(run.data_dir, split):
            how = dict(store=store, total=total, thresholds=given.thresholds or ())
            scores = sweep(outputs, examples, groupings, **how)
        tables[split] = [{**one, **run.evaluation.headline(result)} for one, result in zip(knobs, scores)]
        print_rows(split, tables[split])
    if given.json:
        write_json(given.json, tables)


def run_watch(given: Watch):
    model_dir, run, table = given.model_dir[0], None, {}
    check_folder("model_dir", model_dir)
    check_splits(given.data_dir, given.split)
    import tensorflow as tf

    from axial import configuration
    from axial.data import tfrecord
    from axial.data.streams import name_damaged_records
    from axial.evaluation.checkpoints import checkpoints, removed
    from axial.evaluation.loop import evaluate, write_scalar
    from axial.weights.restore import restore_model

    if not tf.io.gfile.isdir(model_dir):
        raise InputError(f"--model_dir={model_dir}: no such folder")

    def last_step():
        return configuration.build("TrainingConfig").steps

    @functools.cache
    def writer(split):
        return tf.summary.create_file_writer(output_folder(model_dir, f"eval_{split}", "--split"))

    for step, prefix in checkpoints(model_dir, last_step, given.timeout):
        try:
            if run is None:
                run = evaluate_sources.Run(given, as_path(model_dir), prefix)
                predictions = run.predictions(None)
            else:
                restore_model(run.model, prefix)
        except InputError:
            if tf.io.gfile.exists(f"{prefix}.index"):
                raise
            removed(prefix)
            continue
        for split in given.split or [run.split]:
            total = tfrecord.read_manifest(run.data_dir, split)["examples"]
            with name_damaged_records(run.data_dir, split):
                scores = evaluate(run.task.eval_dataset(split), predictions, run.task.scores(), total)
            with writer(split).as_default():
                for name, value in run.evaluation.summaries(scores).items():
                    write_scalar(f"eval/{name}", value, step)
            if given.csv:
                append_scores(given.csv, run.evaluation, scores, model=prefix, split=split, photos=total, shard=None)
            table[f"{split} at step {step}"] = scores
            print_scores(run.evaluation, split, scores, total)
        if given.json:
            write_json(given.json, table)
