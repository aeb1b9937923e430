"""Where axial-evaluate's predictions come from: a run, an export, or files that were made elsewhere.

Each class has a `evaluation`, a `spec`, the default `data_dir` and `split`, a `name` for people, and an `identity`. The
identity is a dict that differs if the predictions may differ: it has the weights and every setting that predictions
depend on, and no path. `examples(split, shard, skip)` are photos, and `predictions(split)` is a function of them; see
`evaluate`. `stores` tells whether --results_dir keeps them. Imports TensorFlow.
"""

from axial import configuration
from axial.cli import app
from axial.cli.flags import as_path
from axial.data.converters.coco import sample_data_dir
from axial.data.converters.nuclei import nuclei_data_dir
from axial.data.specs import NUCLEI, difference
from axial.data.tfrecord import find_splits, fingerprint, read_manifest
from axial.errors import InputError
from axial.io.write import folder_digests
from axial.serving.predictor import Predictor
from axial.serving.zoom import Zoomed
from axial.tasks.registry import evaluation_of_results
from axial.tasks.segmentation.predictions import NetworkOutputs, OutputStore
from axial.tasks.segmentation.studies import refuse_scaled
from axial.training.strategy import make_strategy
from axial.weights.card import PAGE
from axial.weights.interchange import weights_digest
from axial.weights.names import weight_names
from axial.weights.restore import find_weights, read_weights
from axial.weights.source import resolve


def needs(evaluation, study, name):
    """Raises InputError unless a `Evaluation` has the study."""
    if study not in evaluation.studies:
        raise InputError(f"{name}: not for {evaluation.name}")


def check_things(given, evaluation, spec, instances=True):
    """Raises InputError if --thresholds asks for matches of things where there are none.

    Args:
        given: the flags.
        evaluation, spec: of what is evaluated.
        instances: whether a run tells instances apart.
    """
    if given.thresholds is None:
        return
    needs(evaluation, "thresholds", "--thresholds")
    if not any(spec.things):
        raise InputError(f"--thresholds: matches things, and the spec {spec.name!r} has none")
    if not instances:
        raise InputError("--thresholds: matches things, and the run's task has no instances")


def source(given, model=None):
    """What is evaluated, a `Run` or an `Export`, as the flags name it. Raises InputError.

    Args:
        given: the flags.
        model: `Source` of --model; None of --model_dir.
    """
    if model is None:
        return Run(given, as_path(given.model_dir[0]))
    return Export(given, model) if model.kind == "export" else Run(given, model, name=given.model)


class Run:
    """Predictions of a model with its weights. Data, canvas and grouping are those of its recipe, or of --gin_file.

    Args:
        given: the flags.
        what: of the weights; see `resolve`.
        checkpoint: one of the run; by default that of --checkpoint, or the best.
        name: for people; by default the path of the checkpoint.
    """

    stores = True

    def __init__(self, given, what, checkpoint=None, name=None):
        app.silence_xla()
        self.given, checkpoint = given, checkpoint or given.checkpoint
        self.strategy = make_strategy(given.strategy, given.tpu)
        with self.strategy.scope():
            self.task, self.model = task, model = _restored(given, resolve(what), checkpoint, name)
        self.name = name or find_weights(checkpoint or what, given.average)[-1]
        task.jit_compile = configuration.query("TrainingConfig.jit_compile", "auto")
        self.scales, self.flip = given.scales, given.flip
        if given.multi_scale:
            self.scales, self.flip = task.multi_scale, True
        self.evaluation, self.spec, self.data_dir = task.evaluation, task.spec, task.data_dir
        self.split = task.data.eval_split
        for flag in ("submission_dir", "outputs_dir"):
            if getattr(given, flag):
                needs(self.evaluation, flag, f"--{flag}")
        check_things(given, self.evaluation, self.spec, task.instances)
        self.identity = {
            "weights": weights_digest({name: weight.numpy() for name, weight in weight_names(model).items()}),
            "network": task.model.settings(),
            "canvas": task.canvas,
            "scales": self.scales,
            "flip": self.flip,
            "diameter": given.diameter,
            "photo_scale": None,  # what a task's settings say in its place; None also stands for what older files lack
            **task.settings(),
        }

    def resize(self, canvas):
        """Evaluates at another size of the network's input."""
        if self.evaluation.takes != "photo":
            raise InputError(f"--image_size: not for {self.evaluation.name}")
        refuse_scaled(self.task, "--image_size")
        self.task.canvas = self.identity["canvas"] = canvas

    def examples(self, split, shard, skip):
        return self.task.eval_dataset(split, shard=shard, skip=skip)

    def predictions(self, split):
        if self.given.outputs_dir:
            return self.outputs().predictions(self.store(split))
        if self.given.diameter is not None:
            predictor = Predictor.of_task(self.task, self.model, self.scales, self.flip)
            return Zoomed(predictor, self.given.diameter).examples
        return self.task.predictions(self.model, self.strategy, scales=self.scales, flip=self.flip)

    def outputs(self):
        """`NetworkOutputs` of the run."""
        return NetworkOutputs(self.task, self.model, self.strategy, scales=self.scales, flip=self.flip)

    def store(self, split):
        """`OutputStore` of --outputs_dir, or None."""
        if not self.given.outputs_dir:
            return None
        of_network = {name: value for name, value in self.identity.items() if name != "grouping"}
        identity = {**of_network, "data": fingerprint(self.data_dir, split)}
        return OutputStore(self.given.outputs_dir, self.spec, split, identity)


def _restored(given, source, checkpoint, name):
    """(task, model with its weights) of a `Source`, by its own recipe or by that of --gin_file."""

    splits = given.split or [None]
    if given.gin_file:
        card, fill = read_weights(source)
        of_recipe = given.gin_file, card, given.data_dir, given.gin_binding
        task = configuration.task_of_weights(*of_recipe, path=source.path)
        configuration.check_splits(task, splits)
        model = task.build_model()
        fill(model)
        return task, model
    if source.kind == "weights":
        raise InputError(f"{name or source.path}: no recipe (config.gin) is in it; --gin_file names one")
    of_run = source, checkpoint, given.data_dir, given.gin_binding
    return configuration.restore_run(*of_run, average=given.average, splits=splits)


class Export:
    """Predictions of an export.

    Args:
        given: the flags.
        source: `Source` of the export.
    """

    stores = True

    def __init__(self, given, source):
        for flag in ("gin_file", "scales", "flip", "multi_scale", "outputs_dir", "gin_binding", "image_size"):
            if given.has(flag):
                raise InputError(f"--{flag}: {given.model} is an export, which is as it is; a run takes --{flag}")
        app.silence_xla()
        self.given = given
        self._predictor = configuration.load_export(source)
        self.spec, self.evaluation = self._predictor.spec, self._predictor.evaluation
        if given.submission_dir:
            needs(self.evaluation, "submission_dir", "--submission_dir")
        check_things(given, self.evaluation, self.spec)
        sample, split = (sample_data_dir, "val2017") if difference(self.spec, NUCLEI) else (nuclei_data_dir, "test")
        self.data_dir = given.data_dir or sample()
        (self.split,) = find_splits(self.data_dir, {"val": split})
        self.name, files = given.model, folder_digests(source.folder, leave=(PAGE,))
        self.identity = {"files": files, "diameter": given.diameter}

    def examples(self, split, shard, skip):
        return self._predictor.photos(self.data_dir, split, shard=shard, skip=skip)

    def predictions(self, split):
        if self.given.diameter is not None:
            return Zoomed(self._predictor, self.given.diameter).examples
        return self._predictor.examples


class Results:
    """Predictions from files that were made elsewhere."""

    split, stores = None, False

    def __init__(self, given):
        self.given, self.data_dir = given, given.data_dir
        self.evaluation = evaluation_of_results(given.results_json)
        self.spec = read_manifest(self.data_dir, given.split[0])["spec"]
        check_things(given, self.evaluation, self.spec)
        self.name, self.identity = given.results_json, {}

    def examples(self, split, shard, skip):
        canvas = (17, 17)  # no network looks at it
        return self.evaluation.examples(self.data_dir, split, self.spec, canvas, shard=shard, skip=skip)

    def predictions(self, split):
        return self.evaluation.reader(
            self.given.results_json, self.given.results_dir, self.data_dir, split, spec=self.spec
        )
