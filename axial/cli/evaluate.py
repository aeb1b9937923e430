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

from axial.cli import app, evaluate_sources, flags
from axial.cli.checks import check_folder, check_model, check_recipe, check_splits
from axial.cli.evaluate_studies import OfRun, look_for, run_stress, run_sweep, run_watch
from axial.cli.flags import Flag, Flags
from axial.cli.tables import append_scores, print_rows, print_scores
from axial.errors import InputError, check_installed
from axial.io.check import is_remote
from axial.io.show import say
from axial.io.write import write_json, write_whole

_SIDE = r"([1-9]\d{0,4})"
_SIZE = flags.matched(rf"{_SIDE}(?:x{_SIDE})?", "SIDE or HEIGHTxWIDTH in pixels, as in 224 or 224x320")


def _sizes(name, texts):
    """(height, width)s of --image_size."""
    return tuple((height, width or height) for height, width in (_SIZE(name, text) for text in texts))


def _shard(name, text):
    """(i, n) of --shard."""
    expected = "i/n with i from 0 to n - 1, as in 0/4"
    number, of = flags.matched(r"(\d+)/(\d+)", expected)(name, text)
    if not number < of:
        raise InputError(f"--{name}={text}: expected {expected}")
    return number, of


class Written(Flags):
    """What is written of scores."""

    json = flags.JSON
    csv = flags.CSV
    report = Flag(
        str, "folder for SPLIT.html: classes, confusions, the 20 worst and best photos.", path=flags.OUT_FOLDER
    )
    caption = flags.CAPTION


class Scored(Written):
    """What is scored, and how."""

    split = flags.SPLIT
    data_dir = flags.DATA_DIR
    results_dir = Flag(
        str,
        "folder of predictions, panoptic ones in COCO's format: written by run, read by merge and results.",
        path=flags.OUT_FOLDER,
        alone=("submission_dir",),
    )
    picture = flags.PICTURE
    thresholds = flags.THRESHOLDS


class Run(OfRun, Scored):
    model = flags.MODEL
    checkpoint = flags.CHECKPOINT
    average = flags.AVERAGE
    gin_file = flags.GIN_FILE.but(alone=("model_dir",))
    shard = Flag(
        str,
        "'i/n': only every n-th photo from the i-th on, counted from 0; needs --results_dir.",
        needs="results_dir",
        read=_shard,
    )
    submission_dir = Flag(
        str,
        "writes the files that Cityscapes' server takes: panoptic, instance, semantic.",
        path=flags.OUT_FOLDER,
    )
    cityscapes_dir = Flag(
        str,
        "Cityscapes' tree with gtFine: scores --submission_dir by cityscapesscripts.",
        path=flags.IN_FOLDER,
        needs="submission_dir",
    )
    outputs_dir = flags.OUTPUTS_DIR
    image_size = Flag(
        list,
        "sizes of the network's input to score at, each SIDE or HEIGHTxWIDTH; not of an export, not with a "
        "DataConfig.photo_scale.",
        (),
        read=_sizes,
        alone=("results_dir", "submission_dir", "report", "picture"),
    )
    diameter = flags.DIAMETER

    def check(self):
        if bool(self.model_dir) == bool(self.model):
            raise InputError("one of --model and --model_dir is needed")
        super().check()
        if self.cityscapes_dir and is_remote(self.submission_dir):
            raise InputError(f"--submission_dir={self.submission_dir}: cityscapesscripts reads local folders only")
        if len(self.image_size) > 1 and self.outputs_dir:
            raise InputError(f"--outputs_dir: keeps maps of one size, and --image_size has {len(self.image_size)}")
        if self.cityscapes_dir:
            check_installed("Cityscapes' own scores want", "cityscapes", "cityscapesscripts")


class Results(Scored):
    data_dir = flags.DATA_DIR.but(needed=True)
    results_json = Flag(str, "the JSON of the results.", path=flags.IN_FILE, needed=True)
    split = flags.SPLIT.but(needed=True)
    results_dir = Scored.declared()["results_dir"].but(path=flags.PATH)


class Merge(Written):
    results_dir = Results.declared()["results_dir"].but(needed=True)
    split = flags.SPLIT.but(needed=True)


# === run, results, merge ===


def _run(given: Run):
    look_for(given)
    model = check_model(given.model, () if given.gin_file else given.gin_binding) if given.model else None
    if given.gin_file:
        check_recipe(whole=False)
    source = evaluate_sources.source(given, model)
    if given.image_size:
        _score_sizes(source, given)
    else:
        _score(source, given)


def _results(given: Results):
    check_splits(given.data_dir, given.split)
    _score(evaluate_sources.Results(given), given)


def _score_sizes(run, given):
    """Prints a table with a row for each size of the network's input."""
    rows, table = {}, {}
    for canvas in given.image_size:
        run.resize(canvas)
        size = "x".join(map(str, canvas))
        for scored in [_SplitScores(run, split, given) for split in given.split or [run.split]]:
            split = scored.split
            table[f"{split} at {size}"] = scores = scored.score()
            rows.setdefault(split, []).append({"image_size": size, **run.evaluation.headline(scores)})
            if given.csv:
                append_scores(given.csv, run.evaluation, scores, model=run.name, split=split, image_size=size)
    for split, found in rows.items():
        print_rows(split, found)
    if given.json:
        write_json(given.json, table)


def _score(source, given):
    """Scores each split of a source, photo by photo."""
    from axial.evaluation.pictures import save_picture_table
    from axial.tasks.segmentation.cityscapes_scores import check_cityscapes, cityscapes_scores

    splits, cityscapes_dir = given.split or [source.split], getattr(given, "cityscapes_dir", None)
    for split in splits:
        if cityscapes_dir:
            check_cityscapes(cityscapes_dir, split)
    runs = [_SplitScores(source, split, given) for split in splits]
    scores = {}
    for run in runs:
        scores[run.split] = run.score()
        _publish(run.run, scores[run.split], given)
    if given.json:
        write_json(given.json, scores)
    if given.picture:
        blocks, how = [run.block() for run in runs], source.evaluation.pictures
        write_whole(given.picture, lambda path: save_picture_table(path, blocks, how, given.caption))
    if cityscapes_dir:  # last, so that an error loses no scores
        for split in splits:
            theirs = cityscapes_scores(cityscapes_dir, given.submission_dir, split)
            scores[split]["cityscapesscripts"] = theirs
            say("cityscapesscripts: " + " ".join(f"{name}={100 * score:.2f}" for name, score in theirs.items()))
        if given.json:
            write_json(given.json, scores)


class _SplitScores:
    """The scoring of one split, with the outputs that a `Run` or `Results` of flags asks for."""

    PICTURES = 8

    def __init__(self, source, split, given):
        from axial.data.tfrecord import fingerprint, read_manifest
        from axial.evaluation.split_run import SplitRun
        from axial.tasks.segmentation.submission import CityscapesResults

        self.source, self.split, self.given, self.rows = source, split, given, []
        submission_dir = getattr(given, "submission_dir", None)
        self.manifest = read_manifest(source.data_dir, split)
        asked = {"thresholds": list(given.thresholds)} if given.thresholds else {}
        self.run = SplitRun(
            source.evaluation,
            source.spec,
            split,
            results_dir=given.results_dir if isinstance(given, Run) else None,
            report=_make_report(given, split, source.evaluation, source.spec),
            data_dir=source.data_dir,
            shard=getattr(given, "shard", None) or (0, 1),
            identity={**source.identity, "data": fingerprint(source.data_dir, split), **asked},
            model=source.name,
        )
        self.run.restore()
        self.predictions = source.predictions(split)  # refuses stored work of others before anything is computed
        self.files = submission_dir and CityscapesResults(submission_dir, source.spec, split)

    def score(self):
        from axial.data.streams import name_damaged_records
        from axial.tasks.segmentation.evaluation import submitted

        shard = self.run.shard
        total = len(range(shard[0], self.manifest["examples"], shard[1]))
        predictions = self.predictions
        if self.files:
            predictions = submitted(predictions, self.files, self.source.spec)
        with name_damaged_records(self.source.data_dir, self.split):
            if self.given.picture or self.given.report:  # draws the photos that an earlier call has scored
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
        if self.given.picture and len(self.rows) < self.PICTURES:
            self.rows.append(self.source.evaluation.draw(example, seen, self.source.spec))

    def block(self):
        """The split's part of the picture, for `save_picture_table`."""
        return self.split, self.rows, f"{self.source.evaluation.lines(self.scores)[-1].split()[0]} %"


def _make_report(given, split, evaluation, spec):
    from axial.evaluation.report import Report

    return Report(evaluation, given.report, split, spec, caption=given.caption) if given.report else None


def _publish(run, scores, given):
    """Writes the report and the CSV of a split, and prints its table."""
    if run.report:
        say(f"report {run.report.write(run.scores)}")
    photos, shard = len(run.scores.photos), getattr(given, "shard", None)
    if given.csv:
        about = dict(model=run.model, split=run.split, photos=photos, shard=shard and "/".join(map(str, shard)))
        append_scores(given.csv, run.evaluation, scores, **about)
    print_scores(run.evaluation, run.split, scores, photos)


def _merge(given: Merge):
    check_folder("results_dir", given.results_dir)
    from axial.evaluation.split_run import merge
    from axial.tasks.registry import find_evaluation

    scores = {}
    for split in given.split:
        run = merge(given.results_dir, split, find_evaluation, functools.partial(_make_report, given, split))
        scores[split] = run.scores.result()
        _publish(run, scores[split], given)
    if given.json:
        write_json(given.json, scores)


VERBS = {
    "run": _run,
    "results": _results,
    "merge": _merge,
    "stress": run_stress,
    "sweep": run_sweep,
    "watch": run_watch,
}


def main():
    app.run(VERBS, sys.modules[__name__], default="run")
