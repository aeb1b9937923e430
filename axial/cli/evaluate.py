"""Scores a checkpoint, a SavedModel or results of another program.

Panoptic segmentation is scored by PQ, mIoU and AP at each photo's own size. --thresholds adds TP / (TP + FP + FN) of
things, which papers on cells call average precision. Classification is scored by top-1 and top-5 accuracy, detection by
COCO's twelve box metrics, and translation by BLEU.

%s [run] --model_dir=RUN                    the run's best checkpoint, on its own data
%s run --model_dir=RUN --data_dir=DATA --split=val2017 --results_dir=RESULTS --json=scores.json
%s run --model_dir=RUN --average=5 --split=newstest2014     the mean of the run's last five checkpoints
%s run --model=EXPORT                           an export, on the sample photos for its classes
%s run --gin_file=cityscapes/axial_deeplab_s.gin --model=WEIGHTS --data_dir=DATA
                                                converted public weights, by the recipe's protocol
%s run --model_dir=RUN --multi_scale            averages over the recipe's scales and mirror images
%s run --model_dir=RUN --image_size=224,256,320    a row for each input size
%s run --model=nuclei --data_dir=DATA --diameter=auto    photos of other magnifications; see axial-predict
%s run --model_dir=RUN --thresholds=0.5,0.75,0.9      also scores matches of things at these IoUs
%s run --model_dir=RUN --gin_binding="PostprocessConfig.nms_kernel = 41"
%s run --model_dir=RUN --split=test --submission_dir=FILES     for Cityscapes' server
%s run --model_dir=RUN --split=val --submission_dir=FILES --cityscapes_dir=CITYSCAPES
                                                also scored by cityscapesscripts

With --results_dir, the same command resumes a killed evaluation. To split an evaluation over four processes, give each
its own --shard, from --shard=0/4 to --shard=3/4, and the same --results_dir. Then merge the shards:
%s merge --results_dir=RESULTS --split=val2017 --json=scores.json

To score another program's results in the format of COCO or cityscapesscripts, give the JSON and its folder of PNGs:
%s results --results_json=RESULTS.json --results_dir=RESULTS --data_dir=DATA --split=val2017

Studies of a run
%s stress --model_dir=RUN --model_dir=OTHER --ratios=0.25,0.5,1,2,4 --picture=stress.png
                                                changes of OTHER relative to RUN; for one run, relative to ratio 1
%s sweep --model_dir=RUN --knob=center_threshold=0.05,0.1,0.3 --knob=nms_kernel=7,41
%s watch --model_dir=RUN --csv=scores.csv       every checkpoint, while the run trains
"""

from axial import recipes
from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed
from axial.io.gfile import is_remote

_SIDE = r"([1-9]\d{0,4})"
_SIZE = flags.matched(rf"{_SIDE}(?:x{_SIDE})?", "SIDE or HEIGHTxWIDTH in pixels, as in 224 or 224x320")


def _sizes(name, texts):
    """Tuple of the (height, width) pairs of --image_size."""
    return tuple((height, width or height) for height, width in (_SIZE(name, text) for text in texts))


_SHARD = flags.matched(r"(\d+)/(\d+)", "i/n with i from 0 to n - 1, as in 0/4", lambda i, n: i < n)


class Written(Flags):
    """Flags of the outputs that hold scores."""

    shard = submission_dir = cityscapes_dir = None  # flags of Run only
    json = flags.JSON
    csv = flags.CSV
    report = Flag(str, "folder for SPLIT.html: classes, confusions, worst and best photos.", path=flags.OUT_FOLDER)


class Scored(Written):
    """Flags that say which predictions are scored, and how."""

    split = flags.SPLIT
    data_dir = flags.DATA_DIR
    results_dir = Flag(str, "folder of stored predictions.", path=flags.OUT_FOLDER, alone=("submission_dir",))
    picture = flags.PICTURE
    thresholds = flags.THRESHOLDS


class RunFlags(flags.Devices, flags.Looks):
    """Flags of a run, its data and its scales."""

    # Flags that only some verbs have; the other verbs have these values.
    checkpoint = submission_dir = diameter = thresholds = None
    average, gin_file, runs = 1, (), 1
    model_dir = flags.MODEL_DIR.but(kind=tuple)
    data_dir = flags.DATA_DIR
    split = flags.SPLIT
    gin_binding = flags.GIN_BINDING

    def check(self):
        if len(self.model_dir) > self.runs:
            raise InputError("--model_dir: one run; only stress takes two")

    def look(self):
        super().look()
        for model_dir in self.model_dir:
            flags.check_run(model_dir, self.gin_binding)


class Run(RunFlags, Scored):
    model = flags.MODEL
    checkpoint = flags.CHECKPOINT
    average = flags.AVERAGE
    gin_file = flags.GIN_FILE.but(alone=("model_dir",))
    shard = Flag(str, "'i/n': every n-th photo, starting at photo i, counted from 0.", needs="results_dir", read=_SHARD)
    submission_dir = Flag(str, "folder for the files that Cityscapes' server takes.", path=flags.OUT_FOLDER)
    cityscapes_dir = Flag(str, "Cityscapes' tree, for its own scores.", path=flags.IN_FOLDER, needs="submission_dir")
    image_size = Flag(
        list,
        "input sizes, SIDE or HEIGHTxWIDTH; not for exports, nor for models that scale all photos by one factor.",
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
        if self.cityscapes_dir:
            check_installed("Cityscapes' own scores need", "cityscapes", "cityscapesscripts")

    def look(self):
        super().look()
        if self.model:
            flags.check_model(self.model, () if self.gin_file else self.gin_binding)
        if self.gin_file:
            recipes.read(self.gin_file, self.gin_binding, whole=False)


class Results(Scored):
    data_dir = flags.DATA_DIR.but(needed=True)
    results_json = Flag(str, "JSON of the results.", path=flags.IN_FILE, needed=True)
    split = flags.SPLIT.but(needed=True)
    results_dir = Scored.declared()["results_dir"].but(path=None)


class Merge(Written):
    results_dir = Results.declared()["results_dir"].but(path=flags.IN_FOLDER, needed=True)
    split = flags.SPLIT.but(needed=True)


class Study(RunFlags):
    """Flags of a study of one or two runs."""

    model_dir = flags.MODEL_DIR.but(kind=tuple, needed=True)
    json = flags.JSON


class Stress(Study):
    runs = 2
    checkpoint = flags.CHECKPOINT
    ratios = Flag(list, "resolutions, as ratios to the sides of the canvas.", read=flags.positive_numbers, needed=True)
    picture = flags.PICTURE

    def check(self):
        super().check()
        if len(self.split) > 1:
            raise InputError("--split: stress takes one split")


class Sweep(Study):
    checkpoint = flags.CHECKPOINT
    knob = Flag(tuple, "'SETTING=VALUE,VALUE' of PostprocessConfig; scores every combination.", needed=True)
    thresholds = flags.THRESHOLDS


class Watch(Study):
    model_dir = Study.declared()["model_dir"].but(path=flags.IN_FOLDER)
    timeout = Flag(int, "seconds to wait for the next checkpoint.", 3600, least=0)
    csv = flags.CSV

    def look(self):
        Flags.look(self)  # the run may not have its recipe yet


# The functions of the verbs are in a module that imports TensorFlow.
_KINDS = {kind.__name__.lower(): kind for kind in (Run, Results, Merge, Stress, Sweep, Watch)}
VERBS = {name: (kind, f"axial.cli.evaluate_verbs.{name}") for name, kind in _KINDS.items()}


def main():
    app.run(VERBS, default="run")
