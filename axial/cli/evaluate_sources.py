"""Where axial-evaluate's predictions come from: a run, an export, or files that were made elsewhere.

Each class has a `evaluation`, a `spec`, the default `data_dir` and `split`, a `name` for people, and an `identity`. The
identity is a dict that differs if the predictions may differ: it has the weights and every setting that predictions
depend on, and no path. `examples(split, shard, skip)` are photos, and `predictions(split)` is a function of them; see
`evaluate`.
"""

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS


def needs(evaluation, study, name):
    """Raises InputError unless a `Evaluation` has the study."""
    from axial.errors import InputError

    if study not in evaluation.studies:
        raise InputError(f"{name}: not for {evaluation.name}")


def check_things(evaluation, spec, instances=True):
    """Raises InputError if --thresholds asks for matches of things where there are none.

    Args:
        evaluation, spec: of what is evaluated.
        instances: whether a run tells instances apart.
    """
    from axial.errors import InputError

    if FLAGS.thresholds is None:
        return
    needs(evaluation, "thresholds", "--thresholds")
    if not any(spec.things):
        raise InputError(f"--thresholds: matches things, and the spec {spec.name!r} has none")
    if not instances:
        raise InputError("--thresholds: matches things, and the run's task has no instances")


def check_looks():
    """Raises InputError for scales beside those of the recipe."""
    app.refuse_beside("multi_scale", ("scales",))


def thresholds():
    """The numbers of --thresholds; none without the flag."""
    from axial.errors import InputError

    if FLAGS.thresholds is None:
        return ()
    try:
        values = tuple(float(text) for text in FLAGS.thresholds)
    except ValueError:
        values = ()
    if not values or len(set(values)) < len(values) or not all(0 < value <= 1 for value in values):
        given = ",".join(FLAGS.thresholds)
        raise InputError(f"--thresholds={given}: expected different IoUs, above 0 and at most 1, as in 0.5,0.75")
    return values


def zoomed(predictor):
    """The function of examples that predicts photos at the zoom of --diameter. Raises InputError; see `Zoomed`."""
    from axial.serving.zoom import Zoomed

    return Zoomed(predictor, FLAGS.diameter).examples


class _Restored:
    """Predictions of a model with its weights. A subclass says where these are from.

    `_restore()`, under the strategy's scope, returns the task, its model, and text that differs if the weights do. It
    sets `name`.
    """

    def __init__(self):
        from axial import configuration
        from axial.training.strategy import make_strategy

        app.silence_xla()
        self.strategy = make_strategy(FLAGS.strategy, FLAGS.tpu)
        with self.strategy.scope():
            self.task, self.model, weights = self._restore()
        task = self.task
        task.jit_compile = configuration.query("TrainingConfig.jit_compile", "auto")
        self.scales, self.flip = app.positive_numbers("scales", FLAGS.scales), FLAGS.flip
        if FLAGS.multi_scale:
            self.scales, self.flip = task.multi_scale, True
        self.evaluation, self.spec, self.data_dir, self.split = (
            task.evaluation,
            task.spec,
            task.data_dir,
            task.data.eval_split,
        )
        for name in ("submission_dir", "outputs_dir"):
            if FLAGS[name].value:
                needs(self.evaluation, name, f"--{name}")
        check_things(self.evaluation, self.spec, task.instances)
        self.identity = {
            "weights": weights,
            "network": task.model.settings(),
            "canvas": task.canvas,
            "scales": self.scales,
            "flip": self.flip,
            "diameter": FLAGS.diameter,
            "photo_scale": None,  # what a task's settings say in its place; None also stands for what older files lack
            **task.settings(),
        }

    def resize(self, canvas):
        """Evaluates at another size of the network's input."""
        from axial.errors import InputError
        from axial.tasks.segmentation.studies import refuse_scaled

        if self.evaluation.takes != "photo":
            raise InputError(f"--image_size: not for {self.evaluation.name}")
        refuse_scaled(self.task, "--image_size")
        self.task.canvas = self.identity["canvas"] = canvas

    def examples(self, split, shard, skip):
        return self.task.eval_dataset(split, shard=shard, skip=skip)

    def predictions(self, split):
        if FLAGS.outputs_dir:
            return self.outputs().predictions(self.store(split))
        if FLAGS.diameter is not None:
            from axial.serving.predictor import RunPredictor

            return zoomed(RunPredictor(self.task, self.model, self.scales, self.flip))
        return self.task.predictions(self.model, self.strategy, scales=self.scales, flip=self.flip)

    def outputs(self):
        """`NetworkOutputs` of the run."""
        from axial.tasks.segmentation.predictions import NetworkOutputs

        return NetworkOutputs(self.task, self.model, self.strategy, scales=self.scales, flip=self.flip)

    def store(self, split):
        """`OutputStore` of --outputs_dir, or None."""
        from axial.data.tfrecord import fingerprint
        from axial.tasks.segmentation.predictions import OutputStore

        if not FLAGS.outputs_dir:
            return None
        of_network = {name: value for name, value in self.identity.items() if name != "grouping"}
        identity = {**of_network, "data": fingerprint(self.data_dir, split)}
        return OutputStore(FLAGS.outputs_dir, self.spec, split, identity)


class Run(_Restored):
    """Predictions of a run's checkpoint."""

    def __init__(self, model_dir, checkpoint=None):
        self._model_dir, self._checkpoint = app.as_path(model_dir), checkpoint or FLAGS.checkpoint
        super().__init__()

    def _restore(self):
        from axial import configuration
        from axial.io.write import file_digest
        from axial.weights.restore import find_checkpoints

        task, model = configuration.restore_run(
            *(self._model_dir, self._checkpoint, FLAGS.data_dir, FLAGS.gin_binding),
            average=FLAGS.average,
            splits=FLAGS.split or [None],
        )
        prefixes = find_checkpoints(self._checkpoint or self._model_dir, FLAGS.average)
        self.name = prefixes[-1]
        # An index holds a checksum of every tensor.
        return task, model, " ".join(file_digest(f"{prefix}.index")[1] for prefix in prefixes)


def source():
    """What is evaluated: a `Run`, an `Export` or `Weights`, as the flags name it. Raises InputError."""
    from axial import api

    if FLAGS.model_dir:
        return Run(FLAGS.model_dir[0])
    name = FLAGS.model or app.as_path(FLAGS.saved_model)
    found = api.find(name)
    return Export(name, found.export) if found.export else Weights(name, found)


class Weights(_Restored):
    """Predictions of weights: data, canvas and grouping are those of --gin_file, or of the config.gin beside them.

    Args:
        name: for people.
        found: `api.Found` of weights.
    """

    def __init__(self, name, found):
        self.name, self._found = name, found
        super().__init__()

    def _restore(self):
        from axial import configuration
        from axial.errors import InputError
        from axial.weights.interchange import weights_digest
        from axial.weights.loading import read_weights
        from axial.weights.names import weight_names

        found, path, splits = self._found, self._found.path, FLAGS.split or [None]
        if FLAGS.gin_file:
            card, fill = read_weights(path)
            task = configuration.task_of_weights(FLAGS.gin_file, card, FLAGS.data_dir, FLAGS.gin_binding, path=path)
            configuration.check_splits(task, splits)
            model = task.build_model()
            fill(model)
        elif found.run:
            of_run = found.run, found.checkpoint, FLAGS.data_dir, FLAGS.gin_binding
            task, model = configuration.restore_run(*of_run, splits=splits)
        else:
            raise InputError(f"{self.name}: no recipe (config.gin) is in it; --gin_file names one")
        return task, model, weights_digest({name: weight.numpy() for name, weight in weight_names(model).items()})


class Export:
    """Predictions of an export.

    Args:
        name: for people.
        folder: of the export.
    """

    def __init__(self, name, folder):
        from axial import configuration
        from axial.data.converters.coco import sample_data_dir
        from axial.data.converters.nuclei import nuclei_data_dir
        from axial.data.specs import NUCLEI, difference
        from axial.data.tfrecord import find_splits
        from axial.errors import InputError
        from axial.io.write import folder_digests
        from axial.weights.card import PAGE

        for flag in ("gin_file", "scales", "flip", "multi_scale", "outputs_dir", "gin_binding", "image_size"):
            if FLAGS[flag].present:
                raise InputError(f"--{flag}: {name} is an export, which is as it is; a run takes --{flag}")
        app.silence_xla()
        self._predictor = configuration.load_export(folder)
        self.spec, self.evaluation = self._predictor.spec, self._predictor.evaluation
        if FLAGS.submission_dir:
            needs(self.evaluation, "submission_dir", "--submission_dir")
        check_things(self.evaluation, self.spec)
        sample, split = (sample_data_dir, "val2017") if difference(self.spec, NUCLEI) else (nuclei_data_dir, "test")
        self.data_dir = FLAGS.data_dir or sample()
        (self.split,) = find_splits(self.data_dir, {"val": split})
        self.name, self.identity = name, {"files": folder_digests(folder, leave=(PAGE,)), "diameter": FLAGS.diameter}

    def examples(self, split, shard, skip):
        return self._predictor.photos(self.data_dir, split, shard=shard, skip=skip)

    def predictions(self, split):
        if FLAGS.diameter is not None:
            return zoomed(self._predictor)
        return self._predictor.examples


class Results:
    """Predictions from files that were made elsewhere."""

    split = None

    def __init__(self):
        from axial.data.tfrecord import read_manifest
        from axial.tasks.registry import evaluation_of_results

        self.data_dir = app.flag("data_dir")
        self.evaluation = evaluation_of_results(app.flag("results_json"))
        self.spec = read_manifest(self.data_dir, app.flag("split")[0])["spec"]
        check_things(self.evaluation, self.spec)
        self.name, self.identity = app.flag("results_json"), {}

    def examples(self, split, shard, skip):
        canvas = (17, 17)  # no network looks at it
        return self.evaluation.examples(self.data_dir, split, self.spec, canvas, shard=shard, skip=skip)

    def predictions(self, split):
        return self.evaluation.reader(FLAGS.results_json, FLAGS.results_dir, self.data_dir, split, spec=self.spec)
