"""Scores a checkpoint or a SavedModel: PQ, SQ, RQ, mIoU and mask AP at each photo's own size.

%s --model_dir=RUN                          the run's best checkpoint, on the data it was trained with
%s --model_dir=RUN --data_dir=DATA --split=val2017 --results_dir=RESULTS --json=scores.json
%s --saved_model=EXPORT --split=val2017     the export, on the sample photos
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_string("model_dir", None, "a run of axial-train; its best checkpoint, else its latest.")
flags.DEFINE_string("checkpoint", None, "one checkpoint of that run, by its prefix.")
flags.DEFINE_string("saved_model", None, "what axial-export wrote, in place of a checkpoint.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote; by default the run's data, else the samples.")
flags.DEFINE_multi_string("split", None, "splits to score; the run's evaluation split by default.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the run's own configuration.")
flags.DEFINE_string("results_dir", None, "writes the predictions there in COCO's panoptic format.")
flags.DEFINE_string("json", None, "writes the scores of each split to this file.")
flags.DEFINE_string("picture", None, "PNG or JPEG: photo, truth and prediction of each split's first eight photos.")
flags.DEFINE_string("caption", "", "title of that picture.")
flags.DEFINE_enum("strategy", "default", ["default", "mirrored", "tpu"], "devices to run on.")
flags.DEFINE_string("tpu", "local", "with --strategy=tpu: 'local' on a TPU VM, or a TPU's name.")


def _main(_):
    from axial.errors import InputError

    if bool(FLAGS.model_dir) == bool(FLAGS.saved_model):
        raise InputError("one of --model_dir and --saved_model is needed")
    if FLAGS.picture and not FLAGS.picture.lower().endswith((".png", ".jpg", ".jpeg")):
        raise InputError(f"--picture={FLAGS.picture}: its name must end in .png or .jpg")
    from axial.data import tfrecord
    from axial.data.pipeline import evaluation_dataset
    from axial.drawing import save_picture_table
    from axial.evaluation.panoptic import CocoResults, draw_example, evaluate

    predictions, spec, canvas, data_dir, default_split = _export() if FLAGS.saved_model else _checkpoint()
    scores, blocks = {}, []
    for split in FLAGS.split or [default_split]:
        examples = evaluation_dataset(data_dir, split, spec, canvas)
        total = tfrecord.read_manifest(data_dir, split)["examples"]
        results = FLAGS.results_dir and CocoResults(FLAGS.results_dir, spec, split)
        rows = []

        def watch(example, table):
            if results:
                results.add(example, table)
            if FLAGS.picture and len(rows) < 8:
                rows.append(draw_example(example, table, spec))

        scores[split] = evaluate(examples, predictions, spec, total, watch)
        if results:
            results.close()
        print_scores(split, scores[split], total)
        blocks.append((split, rows, f"PQ {100 * scores[split]['pq']['all']['pq']:.1f} %"))
    if FLAGS.json:
        tfrecord.write_json(FLAGS.json, scores)
    if FLAGS.picture:
        tfrecord.write_whole(FLAGS.picture, lambda path: save_picture_table(path, blocks, FLAGS.caption))


def _export():
    from axial.data.coco import sample_data_dir
    from axial.serving.predictor import Predictor

    predictor = Predictor(FLAGS.saved_model)
    data_dir = FLAGS.data_dir or sample_data_dir()
    return predictor.examples, predictor.spec, predictor.canvas, data_dir, "val2017"


def _checkpoint():
    from axial.cli import configuration
    from axial.evaluation.panoptic import CheckpointPredictions
    from axial.training.strategy import make_strategy

    strategy = make_strategy(FLAGS.strategy, FLAGS.tpu)
    with strategy.scope():
        task, model = configuration.restore_run(
            FLAGS.model_dir, FLAGS.checkpoint, FLAGS.data_dir, FLAGS.gin_binding
        )
    predictions = CheckpointPredictions(task, model, strategy)
    return predictions, task.spec, task.canvas, task.data_dir, task.eval_split


def print_scores(split, scores, photos):
    """The table of a result of `evaluate`, in percent."""
    from rich.console import Console
    from rich.table import Table

    percent = lambda value: "-" if value != value else f"{100 * value:.1f}"
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table("class", "PQ", "SQ", "RQ", "IoU", "TP", "FP", "FN")
    iou = scores["miou"]["per_class"]
    for name, row in scores["pq"]["per_class"].items():
        counts = (str(row[k]) for k in ("tp", "fp", "fn"))
        values = (percent(row[k]) for k in ("pq", "sq", "rq"))
        table.add_row(name, *values, percent(iou.get(name, float("nan"))), *counts)
    table.add_section()
    for name in ("all", "things", "stuff"):
        row = scores["pq"][name]
        miou = percent(scores["miou"]["miou"]) if name == "all" else ""
        cells = (percent(row[k]) for k in ("pq", "sq", "rq"))
        table.add_row(f"{name} ({row['classes']} classes)", *cells, miou, "", "", "")
    console.print(table)
    ap = scores["ap"]
    print("mask AP " + "  ".join(f"{name}={percent(value)}" for name, value in ap.items()))
    pq = scores["pq"]
    print(
        f"PQ={percent(pq['all']['pq'])} PQ_things={percent(pq['things']['pq'])} "
        f"PQ_stuff={percent(pq['stuff']['pq'])} mIoU={percent(scores['miou']['miou'])} "
        f"AP={percent(ap['ap'])} split={split} photos={photos}",
        flush=True,
    )


def main():
    app.run(_main, sys.modules[__name__])
