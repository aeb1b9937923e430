"""Scores a checkpoint, a SavedModel or results of others: PQ, SQ, RQ, mIoU, mask AP at each photo's own size.

%s --model_dir=RUN                          the run's best checkpoint, on the data it was trained with
%s --model_dir=RUN --data_dir=DATA --split=val2017 --results_dir=RESULTS --json=scores.json
%s --model_dir=RUN --split=test --submission_dir=FILES     for Cityscapes' server
%s --model_dir=RUN --split=val --submission_dir=FILES --cityscapes_dir=CITYSCAPES     scored by cityscapesscripts too
%s --model_dir=RUN --scales=0.5,0.75,1,1.25,1.5 --flip    averaged over scales and mirror images
%s --saved_model=EXPORT --split=val2017     the export, on the sample photos

Files made elsewhere, in COCO's format: the JSON, and the folder of its PNGs
%s --results_json=panoptic_val2017.json --results_dir=panoptic_val2017 --data_dir=DATA --split=val2017

With --results_dir a killed evaluation goes on when called again. Over several processes: each with
--shard=0/4 .. --shard=3/4 and one --results_dir for all, then
%s --merge --results_dir=RESULTS --split=val2017 --json=scores.json

Studies of one run, or of two side by side (a second --model_dir)
%s --model_dir=RUN --stress_ratios=0.25,0.5,1,2,4 --json=stress.json --picture=stress.png
%s --model_dir=RUN --sweep=center_threshold=0.05,0.1,0.3 --sweep=nms_kernel=7,41 --outputs_dir=OUTPUTS
%s --model_dir=RUN --continuous --csv=scores.csv      every checkpoint, beside its training
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS
KNOBS = ("center_threshold", "nms_kernel", "top_k", "stuff_area", "thing_area")

flags.DEFINE_multi_string("model_dir", [], "a run of axial-train; its best checkpoint, else its latest.")
flags.DEFINE_string("checkpoint", None, "one checkpoint of that run, by its prefix.")
flags.DEFINE_string("saved_model", None, "what axial-export wrote, in place of a checkpoint.")
flags.DEFINE_string("results_json", None, "panoptic results in COCO's format, in place of a model.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote; by default the run's data, else the samples.")
flags.DEFINE_multi_string("split", None, "splits to score; the run's evaluation split by default.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the run's own configuration.")
flags.DEFINE_string(
    "results_dir",
    None,
    "writes the predictions there in COCO's panoptic format; with --results_json: its PNGs, only read.",
)
flags.DEFINE_string("submission_dir", None, "writes what Cityscapes' server takes there: panoptic, instance, semantic.")
flags.DEFINE_string(
    "cityscapes_dir", None, "Cityscapes' tree with gtFine: scores --submission_dir by cityscapesscripts."
)
flags.DEFINE_string("json", None, "writes the scores of each split to this file.")
flags.DEFINE_string("csv", None, "appends the scores of each split to this file, a row each.")
flags.DEFINE_string("report", None, "folder for SPLIT.html: classes, confusions, the 20 worst and best photos.")
flags.DEFINE_string(
    "picture",
    None,
    "PNG or JPEG: photo, truth and prediction of each split's first eight photos; the curves of --stress_ratios.",
)
flags.DEFINE_string("caption", "", "title of that picture.")
flags.DEFINE_list("scales", ["1"], "scales of the canvas to average over; needs --model_dir.")
flags.DEFINE_bool("flip", False, "averages over the mirror image as well; needs --model_dir.")
flags.DEFINE_string("shard", None, "'i/n': only every n-th photo from the i-th on, counted from 0.")
flags.DEFINE_bool("merge", False, "scores the shards in --results_dir together; needs no model.")
flags.DEFINE_bool("continuous", False, "waits for new checkpoints and scores each, to TensorBoard too.")
flags.DEFINE_integer("timeout", 3600, "seconds that --continuous waits for another checkpoint.", lower_bound=0)
flags.DEFINE_list("stress_ratios", None, "resolutions to score at, as ratios of the canvas' sides.")
flags.DEFINE_multi_string("sweep", None, "'KNOB=VALUE,VALUE': scores every combination of such knobs.")
flags.DEFINE_string("outputs_dir", None, "keeps the network's maps there, a file each photo, and reuses them.")
flags.DEFINE_float("center_threshold", None, "the least heat of a centre; like all knobs, over the run's own.")
flags.DEFINE_integer("nms_kernel", None, "odd side of the window in which a centre is the hottest pixel.")
flags.DEFINE_integer("top_k", None, "the most instances of a photo.")
flags.DEFINE_integer("stuff_area", None, "a stuff class with fewer pixels of the canvas becomes void.")
flags.DEFINE_integer("thing_area", None, "an instance with fewer pixels of the canvas becomes void.")
flags.DEFINE_enum("strategy", "default", ["default", "mirrored", "tpu"], "devices to run on.")
flags.DEFINE_string("tpu", "local", "with --strategy=tpu: 'local' on a TPU VM, or a TPU's name.")


def _main(_):
    _check_flags()
    if FLAGS.merge:
        _merge()
    elif FLAGS.results_json:
        _score_results()
    elif FLAGS.stress_ratios:
        _stress()
    elif FLAGS.continuous:
        _continuous()
    elif FLAGS.sweep:
        _sweep()
    else:
        _score(_export() if FLAGS.saved_model else _checkpoint())


# === Flags that do not go together ===


def _check_flags():
    from axial.errors import InputError

    sources = ("model_dir", "saved_model", "results_json", "merge")
    if sum(bool(getattr(FLAGS, name)) for name in sources) != 1:
        raise InputError("one of --model_dir and --saved_model is needed, or --results_json, or --merge")
    modes = [name for name in ("stress_ratios", "continuous", "sweep", "shard") if getattr(FLAGS, name)]
    if len(modes) > 1:
        raise InputError(f"--{modes[0]} and --{modes[1]} do not go together")
    if len(FLAGS.model_dir) > (2 if FLAGS.stress_ratios else 1):
        raise InputError("--model_dir: one run, or two with --stress_ratios")
    needs_run = [name for name in (*modes[:1], "flip", "outputs_dir", *KNOBS) if getattr(FLAGS, name) is not None]
    needs_run = [name for name in needs_run if name != "shard" and getattr(FLAGS, name) is not False]
    needs_run += ["scales"] if FLAGS.scales != ["1"] else []
    if needs_run and not FLAGS.model_dir:
        raise InputError(f"--{needs_run[0]} needs --model_dir")
    unused = [name for name in ("results_dir", "report") if modes and modes[0] != "shard" and getattr(FLAGS, name)]
    if unused:
        raise InputError(f"--{modes[0]} and --{unused[0]} do not go together")
    for name in (*modes, "results_dir", "merge"):
        if FLAGS.submission_dir and getattr(FLAGS, name):
            raise InputError(f"--{name} and --submission_dir do not go together")
    if FLAGS.cityscapes_dir and not FLAGS.submission_dir:
        raise InputError("--cityscapes_dir needs --submission_dir")
    if FLAGS.cityscapes_dir and "://" in FLAGS.submission_dir:
        raise InputError(f"--submission_dir={FLAGS.submission_dir}: cityscapesscripts reads local folders only")
    for name in ("shard", "merge", "results_json"):
        if getattr(FLAGS, name) and not FLAGS.results_dir:
            raise InputError(f"--{name} needs --results_dir")
    for name in ("merge", "results_json"):
        if getattr(FLAGS, name) and not FLAGS.split:
            raise InputError(f"--{name} needs --split")
    if FLAGS.results_json and not FLAGS.data_dir:
        raise InputError("--results_json needs --data_dir")
    if FLAGS.picture and not FLAGS.picture.lower().endswith((".png", ".jpg", ".jpeg")):
        raise InputError(f"--picture={FLAGS.picture}: its name must end in .png or .jpg")
    _shard()
    for name in ("scales", "stress_ratios"):
        if getattr(FLAGS, name):
            _numbers(name)
    if FLAGS.results_dir and not FLAGS.results_json:
        from axial.evaluation.coco_results import results_path

        for split in FLAGS.split or []:
            results_path(FLAGS.results_dir, split)


def _numbers(name):
    return app.positive_numbers(name, getattr(FLAGS, name))


def _shard():
    import re

    from axial.errors import InputError

    match = re.fullmatch(r"(\d+)/(\d+)", FLAGS.shard or "0/1")
    if not match or not int(match[1]) < int(match[2]):
        raise InputError(f"--shard={FLAGS.shard}: expected i/n with i from 0 to n - 1, as in 0/4")
    return int(match[1]), int(match[2])


# === Where predictions come from ===


def _export():
    """(predictions, spec, canvas, data_dir, default split, identity) of a SavedModel."""
    from axial.data.coco import sample_data_dir
    from axial.serving.predictor import Predictor

    predictor = Predictor(FLAGS.saved_model)
    data_dir = FLAGS.data_dir or sample_data_dir()
    identity = {"model": FLAGS.saved_model}
    return predictor.examples, predictor.spec, predictor.canvas, data_dir, "val2017", identity


def _checkpoint():
    """The same of a run's checkpoint."""
    from axial.evaluation.predictions import CheckpointPredictions

    task, model, strategy, identity = _restore(FLAGS.model_dir[0])
    if FLAGS.outputs_dir:
        predictions = _outputs(task, model, strategy, identity).predictions(task.grouping)
    else:
        predictions = CheckpointPredictions(task, model, strategy, _numbers("scales"), FLAGS.flip)
    return predictions, task.spec, task.canvas, task.data_dir, task.eval_split, identity


def _restore(model_dir, checkpoint=None):
    """(task, model, strategy, identity) of a run, its grouping as the flags say."""
    import dataclasses

    from axial.cli import configuration
    from axial.evaluation.studies import change_grouping
    from axial.training.checkpoints import find_checkpoint
    from axial.training.strategy import make_strategy

    scales = _numbers("scales")
    strategy = make_strategy(FLAGS.strategy, FLAGS.tpu)
    with strategy.scope():
        task, model = configuration.restore_run(
            model_dir, checkpoint or FLAGS.checkpoint, FLAGS.data_dir, FLAGS.gin_binding
        )
    changes = {name: getattr(FLAGS, name) for name in KNOBS if getattr(FLAGS, name) is not None}
    task.grouping = change_grouping(task.grouping, changes)
    prefix = find_checkpoint(checkpoint or FLAGS.checkpoint or model_dir)
    looks = {"canvas": task.canvas, "scales": scales, "flip": FLAGS.flip}
    return task, model, strategy, {"model": prefix, **looks, "grouping": dataclasses.asdict(task.grouping)}


def _outputs(task, model, strategy, identity):
    from axial.evaluation.predictions import NetworkOutputs

    identity = {name: value for name, value in identity.items() if name != "grouping"}
    scales = _numbers("scales")
    return NetworkOutputs(task, model, FLAGS.outputs_dir, identity, strategy, scales, FLAGS.flip)


# === What is done with them ===


def _score(source):
    """Scores each split, photo by photo."""
    from axial.data import tfrecord
    from axial.data.pipeline import evaluation_dataset
    from axial.data.submission import CityscapesResults
    from axial.drawing import save_picture_table
    from axial.evaluation.cityscapes_scores import check_cityscapes, cityscapes_scores
    from axial.evaluation.panoptic import draw_example, submitted
    from axial.evaluation.split_run import SplitRun

    predictions, spec, canvas, data_dir, default_split, identity = source
    results_dir = None if FLAGS.results_json else FLAGS.results_dir
    shard = _shard()
    scores, blocks, runs, files = {}, [], {}, {}
    splits = FLAGS.split or [default_split]
    for split in splits:
        if FLAGS.cityscapes_dir:
            check_cityscapes(FLAGS.cityscapes_dir, split)
        manifest = tfrecord.read_manifest(data_dir, split)
        data = {**identity, "data": manifest["source"]}
        runs[split] = SplitRun(spec, split, results_dir, _report(spec, split), shard, data)
        files[split] = FLAGS.submission_dir and CityscapesResults(FLAGS.submission_dir, spec, split)
    for split, run in runs.items():

        def examples(shard, skip):
            return evaluation_dataset(data_dir, split, spec, canvas, shard, skip)

        total = len(range(shard[0], tfrecord.read_manifest(data_dir, split)["examples"], shard[1]))
        rows = []

        def watch(example, table):
            if FLAGS.picture and len(rows) < 8:
                rows.append(draw_example(example, table, spec))

        predict = predictions(split) if FLAGS.results_json else predictions
        if files[split]:
            predict = submitted(predict, files[split], spec)
        scores[split] = run.run(examples, predict, total, watch)
        if files[split]:
            files[split].close(name for _, name, _ in run.scores.photos)
        _publish(split, run, scores[split], identity["model"])
        blocks.append((split, rows, f"PQ {100 * scores[split]['pq']['all']['pq']:.1f} %"))
    if FLAGS.json:
        tfrecord.write_json(FLAGS.json, scores)
    if FLAGS.picture:
        tfrecord.write_whole(FLAGS.picture, lambda path: save_picture_table(path, blocks, FLAGS.caption))
    if FLAGS.cityscapes_dir:  # last: what it may refuse loses none of the above
        for split in splits:
            theirs = cityscapes_scores(FLAGS.cityscapes_dir, FLAGS.submission_dir, split)
            scores[split]["cityscapesscripts"] = theirs
            print("cityscapesscripts:", *(f"{name}={100 * score:.2f}" for name, score in theirs.items()))
        if FLAGS.json:
            tfrecord.write_json(FLAGS.json, scores)


def _report(spec, split):
    from axial.evaluation.report import Report

    return Report(FLAGS.report, split, spec, FLAGS.caption) if FLAGS.report else None


def _publish(split, run, scores, model):
    """Report, CSV and table of a split."""
    from axial.cli.tables import append_scores, print_scores

    if run.report:
        print(f"report {run.report.write(run.scores)}")
    if FLAGS.csv:
        about = dict(model=model, split=split, photos=len(run.scores.photos), shard=FLAGS.shard)
        append_scores(FLAGS.csv, scores, **about)
    print_scores(split, scores, len(run.scores.photos))


def _score_results():
    """Scores files that somebody else made."""
    from axial.data import tfrecord
    from axial.evaluation.coco_results import ResultPredictions

    spec = tfrecord.read_manifest(FLAGS.data_dir, FLAGS.split[0])["spec"]

    def of_split(split):
        return ResultPredictions(FLAGS.results_json, FLAGS.results_dir, FLAGS.data_dir, split, spec)

    _score((of_split, spec, (17, 17), FLAGS.data_dir, None, {"model": FLAGS.results_json}))


def _merge():
    """Scores shards together."""
    from axial.data import tfrecord
    from axial.evaluation.split_run import merge

    scores = {}
    for split in FLAGS.split:
        run = merge(FLAGS.results_dir, split, FLAGS.report and (lambda spec: _report(spec, split)))
        scores[split] = run.scores.result()
        _publish(split, run, scores[split], run.identity["model"])
    if FLAGS.json:
        tfrecord.write_json(FLAGS.json, scores)


def _stress():
    """Scores one or two runs over resolutions."""
    from axial.cli.tables import print_rows
    from axial.data import tfrecord
    from axial.drawing import save_stress
    from axial.evaluation.studies import stress_test

    ratios, curves = _numbers("stress_ratios"), {}
    for model_dir in FLAGS.model_dir:
        task, model, strategy, _ = _restore(model_dir)
        split = (FLAGS.split or [task.eval_split])[0]
        options = (strategy, _numbers("scales"), FLAGS.flip)
        curves[model_dir] = list(stress_test(task, model, task.data_dir, split, ratios, *options))
    first = curves[FLAGS.model_dir[0]]
    for rows in curves.values():
        for row, base in zip(rows, first):
            row["relative_change"] = row["pq"] / base["pq"] - 1 if base["pq"] else None
    for name, rows in curves.items():
        print_rows(name, rows)
    if FLAGS.json:
        tfrecord.write_json(FLAGS.json, {"split": split, "runs": curves})
    if FLAGS.picture:
        tfrecord.write_whole(FLAGS.picture, lambda path: save_stress(path, curves, FLAGS.caption))


def _sweep():
    """Scores every combination of knobs from one pass of the network."""
    from axial.cli.tables import print_rows
    from axial.data import tfrecord
    from axial.data.pipeline import evaluation_dataset
    from axial.evaluation.studies import combinations, headline, sweep

    task, model, strategy, identity = _restore(FLAGS.model_dir[0])
    knobs, groupings = zip(*combinations(task.grouping, FLAGS.sweep))
    outputs, tables = _outputs(task, model, strategy, identity), {}
    for split in FLAGS.split or [task.eval_split]:
        examples = evaluation_dataset(task.data_dir, split, task.spec, task.canvas)
        total = tfrecord.read_manifest(task.data_dir, split)["examples"]
        scores = sweep(outputs, examples, task.spec, groupings, total)
        tables[split] = [{**one, **headline(result)} for one, result in zip(knobs, scores)]
        print_rows(split, tables[split])
    if FLAGS.json:
        tfrecord.write_json(FLAGS.json, tables)


def _continuous():
    """Scores each checkpoint of a run as it appears."""
    import os

    import tensorflow as tf

    from axial.cli import configuration
    from axial.cli.tables import append_scores, print_scores
    from axial.data import tfrecord
    from axial.data.pipeline import evaluation_dataset
    from axial.evaluation.panoptic import evaluate, summaries
    from axial.evaluation.predictions import CheckpointPredictions
    from axial.evaluation.studies import checkpoints
    from axial.training.checkpoints import restore_model

    model_dir, task = FLAGS.model_dir[0], None
    table = {}
    for step, prefix in checkpoints(model_dir, lambda: configuration.build("TrainingConfig").steps, FLAGS.timeout):
        if task is None:
            task, model, strategy, _ = _restore(model_dir, prefix)
            predictions = CheckpointPredictions(task, model, strategy, _numbers("scales"), FLAGS.flip)
        else:
            restore_model(model, prefix)
        for split in FLAGS.split or [task.eval_split]:
            examples = evaluation_dataset(task.data_dir, split, task.spec, task.canvas)
            total = tfrecord.read_manifest(task.data_dir, split)["examples"]
            scores = evaluate(examples, predictions, task.spec, total)
            with tf.summary.create_file_writer(os.path.join(model_dir, f"eval_{split}")).as_default():
                for name, value in summaries(scores).items():
                    tf.summary.scalar(f"eval/{name}", value, step)
            if FLAGS.csv:
                append_scores(FLAGS.csv, scores, model=prefix, split=split, photos=total, shard=None)
            table[f"{split} at step {step}"] = scores
            print_scores(split, scores, total)
        if FLAGS.json:
            tfrecord.write_json(FLAGS.json, table)


def main():
    app.run(_main, sys.modules[__name__])
