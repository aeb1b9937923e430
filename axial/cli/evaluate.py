"""Scores a checkpoint, a SavedModel or results made elsewhere.

The scores of panoptic segmentation are PQ, mIoU and AP at each photo's own size. --thresholds adds TP / (TP + FP + FN)
of the things, which papers on cells call average precision. Classification has top-1 and top-5, detection COCO's twelve
figures of boxes, and translation BLEU.

%s [run] --model_dir=RUN                    the run's best checkpoint, on the data it was trained with
%s run --model_dir=RUN --data_dir=DATA --split=val2017 --results_dir=RESULTS --json=scores.json
%s run --model_dir=RUN --average=5 --split=newstest2014     the mean of the run's last five checkpoints
%s run --model=EXPORT                           the export, on the sample photos of its classes
%s run --gin_file=cityscapes/axial_deeplab_s.gin --model=WEIGHTS --data_dir=DATA
                                                weights of others (axial-convert weights), by the recipe's protocol
%s run --model_dir=RUN --multi_scale            averaged over the recipe's scales and mirror images
%s run --model_dir=RUN --image_size=224,256,320    a row for each size of the network's input
%s run --model=nuclei --data_dir=DATA --diameter=auto    photos of other magnifications; see axial-predict
%s run --model_dir=RUN --thresholds=0.5,0.75,0.9      matches of things counted at these IoUs too
%s run --model_dir=RUN --gin_binding="PostprocessConfig.nms_kernel = 41"
%s run --model_dir=RUN --split=test --submission_dir=FILES     for Cityscapes' server
%s run --model_dir=RUN --split=val --submission_dir=FILES --cityscapes_dir=CITYSCAPES
                                                and scored by cityscapesscripts too

With --results_dir, the same command resumes a killed evaluation. To split it over four processes, give each its own
--shard, from --shard=0/4 to --shard=3/4, and all the same --results_dir. Then add them up:
%s merge --results_dir=RESULTS --split=val2017 --json=scores.json

To score results of another program, in COCO's or cityscapesscripts' format, give the JSON and the folder of its PNGs,
or COCO's JSON of detections:
%s results --results_json=RESULTS.json --results_dir=RESULTS --data_dir=DATA --split=val2017
%s results --results_json=DETECTIONS.json --data_dir=DATA --split=val2017

Studies of a run
%s stress --model_dir=RUN --model_dir=OTHER --ratios=0.25,0.5,1,2,4 --picture=stress.png
                                                relative changes from RUN to OTHER; of one run from ratio 1
%s sweep --model_dir=RUN --knob=center_threshold=0.05,0.1,0.3 --knob=nms_kernel=7,41 --outputs_dir=OUTPUTS
%s watch --model_dir=RUN --csv=scores.csv       every checkpoint, beside its training
"""

import functools
import sys

from absl import flags

from axial.cli import app, evaluate_sources
from axial.cli.checks import check_checkpoint, check_folder, check_model, check_recipe, check_run, check_splits
from axial.cli.evaluate_studies import check_one_run, check_stress, run_stress, run_sweep, run_watch
from axial.io.check import convert_diameter
from axial.io.show import say

FLAGS = flags.FLAGS

flags.DEFINE_multi_string("model_dir", [], "a run of axial-train; its best checkpoint, else its latest.")
flags.DEFINE_string("checkpoint", None, "one checkpoint of the run in --model_dir, by its prefix.")
flags.DEFINE_integer("average", 1, "averages the weights of so many of the run's latest checkpoints.", lower_bound=1)
flags.DEFINE_string(
    "model",
    None,
    "in place of --model_dir, all that axial.load takes: a model that axial ships, like nuclei; a run, one of its "
    "checkpoints, an export, weights of axial-convert weights, a safetensors file, or hf://OWNER/REPO.",
)
flags.DEFINE_string("saved_model", None, "the older name of --model.")
flags.DEFINE_multi_string(
    "gin_file", [], "with --model, a recipe of the data, canvas and grouping; by default that beside the weights."
)
flags.DEFINE_string("data_dir", None, "what axial-convert wrote; by default the run's data, else the samples.")
flags.DEFINE_multi_string("split", None, "splits to score; the run's evaluation split by default.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the run's own configuration, or the recipe's.")
flags.DEFINE_list("scales", ["1"], "scales of the canvas to average over; not of an export.")
flags.DEFINE_bool("flip", False, "averages over the mirror image as well; not of an export.")
flags.DEFINE_bool("multi_scale", False, "averages over the recipe's own scales, with --flip; not of an export.")
flags.DEFINE_string("diameter", None, "median diameter of the photos' objects in pixels, or auto; see axial-predict.")
flags.DEFINE_list(
    "image_size",
    [],
    "sizes of the network's input to score at, each SIDE or HEIGHTxWIDTH; not of an export, not with a "
    "DataConfig.photo_scale.",
)
flags.DEFINE_enum("strategy", "default", ["default", "mirrored", "tpu"], "devices to run on.")
flags.DEFINE_string("tpu", "local", "with --strategy=tpu: 'local' on a TPU VM, or a TPU's name.")
flags.DEFINE_string(
    "results_dir",
    None,
    "folder of predictions, panoptic ones in COCO's format: written by run, read by merge and results.",
)
flags.DEFINE_string("results_json", None, "the JSON of the results.")
flags.DEFINE_string(
    "shard", None, "'i/n': only every n-th photo from the i-th on, counted from 0; needs --results_dir."
)
flags.DEFINE_string(
    "submission_dir", None, "writes the files that Cityscapes' server takes: panoptic, instance, semantic."
)
flags.DEFINE_string(
    "cityscapes_dir", None, "Cityscapes' tree with gtFine: scores --submission_dir by cityscapesscripts."
)
flags.DEFINE_string("outputs_dir", None, "keeps the network's maps there, a file each photo, and reuses them.")
flags.DEFINE_list(
    "thresholds",
    None,
    "least IoUs, above 0 and at most 1: at each prints TP / (TP + FP + FN) of the things, counted over all photos.",
)
flags.DEFINE_string("json", None, "writes the scores to this file.")
flags.DEFINE_string("csv", None, "appends the scores of each split to this file, a row each.")
flags.DEFINE_string("report", None, "folder for SPLIT.html: classes, confusions, the 20 worst and best photos.")
flags.DEFINE_string(
    "picture", None, "PNG or JPEG: the first eight photos of each split with truth and prediction; curves."
)
flags.DEFINE_string("caption", "", "title of the picture and the report.")
flags.DEFINE_list(
    "ratios", None, "resolutions to score at, as ratios of the canvas' sides; not with a DataConfig.photo_scale."
)
flags.DEFINE_multi_string(
    "knob", None, "'KNOB=VALUE,VALUE' of PostprocessConfig: scores every combination of such knobs."
)
flags.DEFINE_integer("timeout", 3600, "seconds to wait for the next checkpoint.", lower_bound=0)

# === run, results, merge ===


def _run(_):
    if FLAGS.model_dir:
        check_run(FLAGS.model_dir[0], FLAGS.gin_binding)
    else:
        check_model(FLAGS.model or app.as_path(FLAGS.saved_model), () if FLAGS.gin_file else FLAGS.gin_binding)
    if FLAGS.gin_file:
        check_recipe(whole=False)
    check_checkpoint(FLAGS.checkpoint)
    check_splits(FLAGS.data_dir, FLAGS.split)
    source = evaluate_sources.source()
    if FLAGS.image_size:
        _score_sizes(source)
    else:
        _score(source, FLAGS.results_dir)


def _results(_):
    for name in ("data_dir", "results_json", "split"):
        app.flag(name)
    check_splits(FLAGS.data_dir, FLAGS.split)
    _score(evaluate_sources.Results())


def _check_run_flags():
    """Raises InputError for flags that cannot be combined."""
    from axial.errors import InputError, check_installed
    from axial.io.check import is_remote

    if sum(map(bool, (FLAGS.model_dir, FLAGS.saved_model, FLAGS.model))) != 1:
        raise InputError("one of --model and --model_dir is needed")
    for name in ("checkpoint", "average"):
        if FLAGS[name].present and not FLAGS.model_dir:
            raise InputError(f"--{name} needs --model_dir")
    app.refuse_beside("model_dir", ("gin_file",))
    if len(FLAGS.model_dir) > 1:
        raise InputError("--model_dir: one run; stress takes two")
    if FLAGS.submission_dir and FLAGS.results_dir:
        raise InputError("--results_dir and --submission_dir do not go together")
    if FLAGS.cityscapes_dir and not FLAGS.submission_dir:
        raise InputError("--cityscapes_dir needs --submission_dir")
    if FLAGS.cityscapes_dir and is_remote(FLAGS.submission_dir):
        raise InputError(f"--submission_dir={FLAGS.submission_dir}: cityscapesscripts reads local folders only")
    if FLAGS.shard and not FLAGS.results_dir:
        raise InputError("--shard needs --results_dir")
    for name in ("results_dir", "submission_dir", "report", "picture"):
        if FLAGS.image_size and FLAGS[name].value:
            raise InputError(f"--image_size does not go with --{name}")
    if len(FLAGS.image_size) > 1 and FLAGS.outputs_dir:
        raise InputError(f"--outputs_dir: keeps maps of one size, and --image_size has {len(FLAGS.image_size)}")
    evaluate_sources.check_looks()
    app.positive_numbers("scales", FLAGS.scales)
    if FLAGS.diameter is not None:
        convert_diameter("--diameter", FLAGS.diameter)
        app.refuse_beside("diameter", ("outputs_dir", "image_size"))
    _shard()
    _sizes()
    evaluate_sources.thresholds()
    if FLAGS.cityscapes_dir:
        check_installed("Cityscapes' own scores want", "cityscapes", "cityscapesscripts")


def _shard():
    """(i, n) of --shard."""
    import re

    from axial.errors import InputError

    match = re.fullmatch(r"(\d+)/(\d+)", FLAGS.shard or "0/1")
    if not match or not int(match[1]) < int(match[2]):
        raise InputError(f"--shard={FLAGS.shard}: expected i/n with i from 0 to n - 1, as in 0/4")
    return int(match[1]), int(match[2])


def _sizes():
    """(height, width)s of --image_size."""
    import re

    from axial.errors import InputError

    matches = [re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text) for text in FLAGS.image_size]
    for text, match in zip(FLAGS.image_size, matches):
        if not match:
            raise InputError(f"--image_size={text}: expected SIDE or HEIGHTxWIDTH in pixels, as in 224 or 224x320")
    return [(int(match[1]), int(match[2] or match[1])) for match in matches]


def _score_sizes(run):
    """Prints a table with a row for each size of the network's input."""
    from axial.cli.tables import append_scores, print_rows
    from axial.io.write import write_json

    rows, table = {}, {}
    for canvas in _sizes():
        run.resize(canvas)
        size = "x".join(map(str, canvas))
        for scored in [_SplitScores(run, split) for split in FLAGS.split or [run.split]]:
            split = scored.split
            table[f"{split} at {size}"] = scores = scored.score()
            rows.setdefault(split, []).append({"image_size": size, **run.evaluation.headline(scores)})
            if FLAGS.csv:
                append_scores(FLAGS.csv, run.evaluation, scores, model=run.name, split=split, image_size=size)
    for split, found in rows.items():
        print_rows(split, found)
    if FLAGS.json:
        write_json(FLAGS.json, table)


def _score(source, results_dir=None):
    """Scores each split of a source, photo by photo."""
    from axial.evaluation.pictures import save_picture_table
    from axial.io.write import write_json, write_whole
    from axial.tasks.segmentation.cityscapes_scores import check_cityscapes, cityscapes_scores

    splits = FLAGS.split or [source.split]
    for split in splits:
        if FLAGS.cityscapes_dir:
            check_cityscapes(FLAGS.cityscapes_dir, split)
    runs = [_SplitScores(source, split, results_dir) for split in splits]
    scores = {}
    for run in runs:
        scores[run.split] = run.score()
        _publish(run.run, scores[run.split])
    if FLAGS.json:
        write_json(FLAGS.json, scores)
    if FLAGS.picture:
        blocks = [run.block() for run in runs]
        write_whole(
            FLAGS.picture, lambda path: save_picture_table(path, blocks, source.evaluation.pictures, FLAGS.caption)
        )
    if FLAGS.cityscapes_dir:  # last, so that an error loses no scores
        for split in splits:
            theirs = cityscapes_scores(FLAGS.cityscapes_dir, FLAGS.submission_dir, split)
            scores[split]["cityscapesscripts"] = theirs
            say("cityscapesscripts: " + " ".join(f"{name}={100 * score:.2f}" for name, score in theirs.items()))
        if FLAGS.json:
            write_json(FLAGS.json, scores)


class _SplitScores:
    """The scoring of one split, with the outputs that the flags ask for."""

    PICTURES = 8

    def __init__(self, source, split, results_dir=None):
        from axial.data.tfrecord import fingerprint, read_manifest
        from axial.evaluation.split_run import SplitRun
        from axial.tasks.segmentation.submission import CityscapesResults

        self.source, self.split, self.rows = source, split, []
        self.manifest = read_manifest(source.data_dir, split)
        self.run = SplitRun(
            source.evaluation,
            source.spec,
            split,
            results_dir=results_dir,
            report=_make_report(split, source.evaluation, source.spec),
            data_dir=source.data_dir,
            shard=_shard(),
            identity={**source.identity, "data": fingerprint(source.data_dir, split)},
            model=source.name,
            thresholds=evaluate_sources.thresholds(),
        )
        self.run.restore()
        self.predictions = source.predictions(split)  # refuses stored work of others before anything is computed
        self.files = FLAGS.submission_dir and CityscapesResults(FLAGS.submission_dir, source.spec, split)

    def score(self):
        from axial.data.streams import name_damaged_records
        from axial.tasks.segmentation.evaluation import submitted

        shard = self.run.shard
        total = len(range(shard[0], self.manifest["examples"], shard[1]))
        predictions = self.predictions
        if self.files:
            predictions = submitted(predictions, self.files, self.source.spec)
        with name_damaged_records(self.source.data_dir, self.split):
            if FLAGS.picture or FLAGS.report:  # draws the photos that an earlier call has scored
                stored = zip(self._examples(shard, 0), self.run.stored())
                for photo, (example, seen) in zip(self.run.scores.photos, stored):
                    self._watch(example, seen)
                    if self.run.report:
                        self.run.report.add(example, seen, photo)
            self.scores = self.run.run(self._examples, predictions, total, watch=self._watch)
        if self.files:
            self.files.close(name for _, name, _ in self.run.scores.photos)
        return self.scores

    def _examples(self, shard, skip):
        return self.source.examples(self.split, shard, skip)

    def _watch(self, example, seen):
        if FLAGS.picture and len(self.rows) < self.PICTURES:
            self.rows.append(self.source.evaluation.draw(example, seen, self.source.spec))

    def block(self):
        """The split's part of the picture, for `save_picture_table`."""
        return self.split, self.rows, f"{self.source.evaluation.lines(self.scores)[-1].split()[0]} %"


def _make_report(split, evaluation, spec):
    from axial.evaluation.report import Report

    return Report(evaluation, FLAGS.report, split, spec, caption=FLAGS.caption) if FLAGS.report else None


def _publish(run, scores):
    """Writes the report and the CSV of a split, and prints its table."""
    from axial.cli.tables import append_scores, print_scores

    if run.report:
        say(f"report {run.report.write(run.scores)}")
    if FLAGS.csv:
        about = dict(model=run.model, split=run.split, photos=len(run.scores.photos), shard=FLAGS.shard)
        append_scores(FLAGS.csv, run.evaluation, scores, **about)
    print_scores(run.evaluation, run.split, scores, len(run.scores.photos))


def _merge(_):
    app.flag("split")
    check_folder("results_dir", app.flag("results_dir"))
    from axial.evaluation.split_run import merge
    from axial.io.write import write_json
    from axial.tasks.registry import find_evaluation

    scores = {}
    for split in app.flag("split"):
        report = functools.partial(_make_report, split)
        run = merge(app.flag("results_dir"), split, find_evaluation, report)
        scores[split] = run.scores.result()
        _publish(run, scores[split])
    if FLAGS.json:
        write_json(FLAGS.json, scores)


_OF_RUN = ("model_dir", "data_dir", "split", "gin_binding", "strategy", "tpu")
_LOOKS = ("scales", "flip", "multi_scale")
_WRITTEN = ("json", "csv", "report", "caption")
VERBS = {
    "run": app.Verb(
        _run,
        (
            *_OF_RUN,
            *_LOOKS,
            *_WRITTEN,
            "checkpoint",
            "average",
            "saved_model",
            "model",
            "gin_file",
            "results_dir",
            "shard",
            "submission_dir",
            "cityscapes_dir",
            "outputs_dir",
            "picture",
            "image_size",
            "thresholds",
            "diameter",
        ),
        writes=("results_dir",),
        check=_check_run_flags,
    ),
    "results": app.Verb(
        _results,
        ("results_json", "results_dir", "data_dir", "split", "picture", "thresholds", *_WRITTEN),
        check=evaluate_sources.thresholds,
    ),
    "merge": app.Verb(_merge, ("results_dir", "split", *_WRITTEN)),
    "stress": app.Verb(
        run_stress, (*_OF_RUN, *_LOOKS, "checkpoint", "ratios", "json", "picture", "caption"), check=check_stress
    ),
    "sweep": app.Verb(
        run_sweep, (*_OF_RUN, *_LOOKS, "checkpoint", "knob", "outputs_dir", "json", "thresholds"), check=check_one_run
    ),
    "watch": app.Verb(run_watch, (*_OF_RUN, *_LOOKS, "timeout", "json", "csv"), check=check_one_run),
}


def main():
    app.run_verbs(VERBS, sys.modules[__name__], default="run")
