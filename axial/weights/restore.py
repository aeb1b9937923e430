"""Finds and loads weights, and initialises trainings with them. Weights that do not fit raise an InputError.

`axial.load` calls `load_weights`.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from axial.errors import InputError
from axial.io import gfile
from axial.io.read import read_json
from axial.io.show import counted, say
from axial.layers.batch_norm import BatchNormConfig
from axial.layers.configured import Layer, Model
from axial.layers.spatial_attention.attended import Attended
from axial.layers.spatial_attention.deformable_conv import DeformableConv
from axial.models.base import Network
from axial.models.registry import FREE, PLAIN, ModelConfig, find_variant
from axial.weights.checkpoint import GRAPH, VALUE, check_whole, is_unfinished, refused, run_checkpoints
from axial.weights.interchange import WeightsCard, assign_tensors, build_from_card, built, read_safetensors
from axial.weights.source import CARD, SUFFIX, Location, find_tensors, no_checkpoint, resolve

LEAST = 0.9  # smallest fraction of the backbone's parameters that an initial checkpoint may have


def find_checkpoint(path: str) -> str:
    """The prefix of the checkpoint at `path`, which is a prefix or a folder.

    In a folder, this is the best checkpoint, or the latest one if the folder has no best checkpoint.

    Raises:
        InputError: there is no checkpoint.
    """
    gfile.check_plain(path)
    if tf.io.gfile.exists(path + ".index"):
        return path
    if not tf.io.gfile.isdir(path):
        raise InputError(no_checkpoint(path))
    problem = None
    for folder in (os.path.join(path, "best"), path):
        try:
            if latest := latest_checkpoint(folder):
                if problem:
                    say(f"{problem}; {latest} is taken in its place", error=True)
                return latest
        except InputError as error:
            problem = problem or error
    raise problem or InputError(f"{path}: no checkpoint here")


def find_weights(what: Location, count: int = 1) -> list[str]:
    """The weight files at a location: one file, or the latest checkpoints of a run, for averaging.

    Args:
        what: see `resolve`. In a folder that has both, the checkpoint is chosen, not the safetensors file.
        count: number of latest checkpoints; 1 for the safetensors file or the checkpoint of `find_checkpoint`.

    Returns:
        List of safetensors files or prefixes of checkpoints.

    Raises:
        InputError: there are no weights, or fewer than `count` checkpoints.
    """
    source = resolve(what, no_checkpoint)
    if source.kind == "export":
        raise InputError(f"{source.path}: an export, whose batch norms are folded; a run or weights are expected")
    if count > 1:
        prefixes = run_checkpoints(source.path)
        if len(prefixes) < count:
            count_here = counted(len(prefixes), "checkpoint")
            raise InputError(f"--average={count}: {source.path} has {count_here} of a run; see TrainingConfig.keep")
        return prefixes[-count:]
    if source.file:
        return [source.file if source.file.endswith(SUFFIX) else find_checkpoint(source.file)]
    folders = source.path, os.path.join(source.path, "best")
    tensors = None if any(run_checkpoints(f, with_index=False) for f in folders) else find_tensors(source.path)
    return [tensors or find_checkpoint(source.path)]


def latest_checkpoint(folder: str) -> str | None:
    """Prefix of a folder's newest whole checkpoint, or None if the folder has no checkpoint.

    This function finds checkpoints by their files, not in TensorFlow's list; see `run_checkpoints`. A line on standard
    error names each newer checkpoint that is damaged, except for unfinished checkpoints of a killed process.

    Raises:
        InputError: the folder has checkpoints, but none of them is whole.
    """
    gfile.check_plain(folder)
    problems = []
    for prefix in reversed(run_checkpoints(folder, with_index=False)):
        try:
            check_whole(prefix)
        except InputError as error:
            # A checkpoint that is being written, or that another host has just removed, is not damaged.
            if not is_unfinished(prefix) and prefix in run_checkpoints(folder, with_index=False):
                problems.append(error)
            continue
        for problem in problems:
            say(f"{problem}; {prefix} is taken in its place", error=True)
        return prefix
    if problems:
        raise InputError(f"{problems[0]}{'; no other one there is whole' if len(problems) > 1 else ''}")
    return None


def restore_model(model: Model, prefix: str) -> None:
    """Loads a built model's weights, or their moving averages if there are any, from a checkpoint of the trainer.

    Raises:
        InputError: the checkpoint is damaged, or a weight does not fit. The message names the first such weight.
    """
    check_fits(model, prefix)
    with refused(prefix, "cannot be restored"):
        tf.train.Checkpoint(model=model).read(prefix).assert_existing_objects_matched().expect_partial()
        reader = tf.compat.v1.train.NewCheckpointReader(prefix)
        if reader.has_tensor(f"averages/0{VALUE}"):
            for i, variable in enumerate(model.trainable_variables):
                variable.assign(reader.get_tensor(f"averages/{i}{VALUE}"))


def restore_average(model: Model, prefixes: Sequence[str]) -> None:
    """Loads the mean of the weights that `restore_model` loads from each of several checkpoints."""
    sums: list = [0.0] * len(model.weights)
    for prefix in prefixes:
        restore_model(model, prefix)
        sums = [total + weight.numpy().astype("float64") for total, weight in zip(sums, model.weights)]
    for weight, total in zip(model.weights, sums):
        weight.assign((total / len(prefixes)).astype(weight.dtype.as_numpy_dtype))


def check_fits(model: Model, prefix: str) -> None:
    """Raises InputError unless the checkpoint has every weight of the built model, in the same shape."""
    with refused(prefix, "not a whole checkpoint"):
        stored = tf.compat.v1.train.NewCheckpointReader(prefix).get_variable_to_shape_map()
    for path, weight in object_paths(model, "model").items():
        if (shape := stored.get(f"{path}{VALUE}")) is None:
            raise InputError(f"{prefix}: of another model, it has no weight {path!r}")
        if shape != list(weight.shape):
            mismatch = f"its {path!r} has shape {shape} where {list(weight.shape)} is expected"
            raise InputError(f"{prefix}: of another model or another number of classes, {mismatch}")


def stored_optimizer(prefix: str) -> tuple[list[str], int]:
    """Returns (`slot_names`, number of steps taken) of the optimizer in a checkpoint of the trainer."""
    with refused(prefix, "cannot be restored"):
        reader, steps = tf.compat.v1.train.NewCheckpointReader(prefix), f"optimizer/_iterations{VALUE}"
        names = [name for key, name in _stored_names(reader).items() if key.startswith(("optimizer/", "averages/"))]
        return slot_names(names), int(reader.get_tensor(steps)) if reader.has_tensor(steps) else 0


def _stored_names(reader):
    """dict from each key of a checkpoint to the name of its variable."""
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(GRAPH))
    return {a.checkpoint_key: a.full_name for node in graph.nodes for a in node.attributes}


def slot_names(names: Iterable[str]) -> list[str]:
    """Sorted list of the kinds of optimizer slots, like 'velocity' in the name 'velocity/model/conv/kernel'."""
    return sorted({name.partition("/")[0] for name in names if "/" in name})


def initialize(model: Model, path: str, config: ModelConfig | None = None, random_frozen: bool = True) -> str:
    """Loads each weight that a checkpoint or safetensors file has under the same name and in the same shape.

    The other weights keep their initial values. So a classifier's checkpoint fills the backbone, and a checkpoint with
    other classes fills all but the last layer. A plain ResNet's checkpoint fills all weights that an attended ResNet
    shares with it; modules that start as the identity keep their initial values. If a checkpoint has moving averages of
    the weights, these are loaded instead of the weights.

    Args:
        model: a built model.
        path: path of the weights; see `find_weights`.
        config: the model's `ModelConfig`. Converted weights are refused if their own network uses them in another way
            than this model; see `check_card`.
        random_frozen: False refuses a checkpoint that lacks frozen weights; see `check_frozen`.

    Returns:
        Text: a line with the file, then a line for each group of weights. 'taken': the model takes them from the file.
        'left': only the file has them. 'new': weights of modules that start as the identity, unless the file has all
        weights of the module. 'unmatched': the model's other weights. New and unmatched weights keep their initial
        values.

    Raises:
        InputError: there is no checkpoint; no weight fits; the fraction of the backbone's parameters that fit is below
            `LEAST`; or converted weights need other arguments.
    """
    (file,) = find_weights(path)
    with refused(file, "cannot be restored"):
        stored, remark = (_read_tensors if file.endswith(SUFFIX) else _read_variables)(file, config)
        weights = {plain_path(name): weight for name, weight in object_paths(model, "model").items()}
        fitting = {id(w) for name, w in weights.items() if name in stored and stored[name].shape == tuple(w.shape)}
        # A module that starts as the identity is new unless the checkpoint has all of its weights.
        added = [module.added_weights for module in model.submodules if isinstance(module, (Attended, DeformableConv))]
        lacking = {id(w) for module in added if not all(id(w) in fitting for w in module) for w in module}
        new = [name for name, w in weights.items() if id(w) in lacking]
        taken = [name for name, w in weights.items() if id(w) in fitting - lacking]
        _check_backbone(file, model.backbone, {n: w for n, w in weights.items() if id(w) not in lacking}, taken)
        if not random_frozen:
            check_frozen(model, config, file, [weights[name] for name in taken])  # type: ignore[arg-type]
        for name in taken:
            weights[name].assign(stored[name])
    return "\n".join([f"init_checkpoint: {file}{remark}", *_summary(weights, stored, taken, new)])


def _read_tensors(path, config):
    """(dict from the `plain_path` of each weight in a safetensors file to its array, remark).

    The file's own model is built to find the paths, because other models name the same weights differently. The remark
    is '', because a safetensors file has no moving averages.
    """
    card, arrays = read_safetensors(path)
    check_card(path, card, config)
    source = build_from_card(card, path, arrays=arrays)
    assign_tensors(source, path, arrays)
    return {plain_path(name): weight.numpy() for name, weight in object_paths(source, "model").items()}, ""


def _read_variables(prefix, config):
    """(dict from the `plain_path` of each weight in a checkpoint to its array, remark).

    A weight's moving average, if there is one, replaces the weight. The remark then says so, for the text of
    `initialize`; otherwise it is ''.
    """
    card = os.path.join(os.path.dirname(prefix), CARD)
    if gfile.exists(card):
        check_card(card, read_json(card, WeightsCard)[1], config)
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    names = _stored_names(reader)
    # The optimizer names a variable's average 'average/' + the variable's name.
    averages = {name.removeprefix("average/"): key for key, name in names.items() if key.startswith("averages/")}
    remark, stored = ", moving averages" if averages else "", {}
    for key in sorted(reader.get_variable_to_shape_map()):
        if key.startswith("model/") and key.endswith(VALUE) and "/.OPTIMIZER_SLOT/" not in key:
            array = reader.get_tensor(averages.get(names.get(key), key))
            stored[plain_path(key.removesuffix(VALUE))] = np.asarray(array)
    return stored, remark


def check_frozen(model: Model, config: ModelConfig, path: str | None = None, taken: Sequence[tf.Variable] = ()) -> None:
    """Raises InputError if weights that training never changes would stay random.

    These weights are the parameters of frozen layers and, with `BatchNormConfig.frozen`, all moving statistics.

    Args:
        model: a built model.
        config: the model's `ModelConfig`.
        path: path of the initial checkpoint, or None.
        taken: the model's weights that are loaded from the checkpoint.
    """
    kept = {id(w) for w in (*model.trainable_weights, *taken)}
    random = [w.name for w in model.weights if id(w) not in kept and (w.trainable or config.norm.frozen)]
    if random:
        what = f"{len(random)} frozen weights would stay random, such as {random[0].removesuffix(':0')!r}"
        expected = "a checkpoint that has them (INIT = 'CHECKPOINT'), or TrainingConfig.random_frozen = True"
        raise InputError(f"TrainingConfig.init_checkpoint = {path!r}: {what}; expected {expected}")


def plain_path(path: str) -> str:
    """The path that a weight has in the same network without modules that start as the identity.

    An `AttendedMiddle` has its 3x3 convolution at '.../middle/conv', and a plain block at '.../middle'. A
    `DeformableConv` has no layer 'conv' above its kernel, so both networks have its kernel at '.../middle/conv/kernel'.
    """
    return re.sub(r"/middle/conv/(conv|norm)/", r"/middle/\1/", path)


def _check_backbone(prefix, backbone, weights, taken):
    """Raises InputError unless the checkpoint has enough of the backbone's parameters.

    Args:
        prefix: prefix of the checkpoint, for the message.
        backbone: the backbone layer.
        weights: dict from the path of each weight of the model to the weight, without the weights of new modules.
        taken: paths of the weights that the checkpoint has.
    """
    if not taken:
        raise InputError(f"{prefix}: none of its weights fits the model; is it of axial-train?")
    backbone_ids = {id(w) for w in backbone.weights}
    # A variable's `trainable` is True for parameters, even of frozen layers, and False for moving statistics.
    sizes = {name: w.trainable * w.shape.num_elements() for name, w in weights.items() if id(w) in backbone_ids}
    missing = [name for name in sizes if name not in set(taken)]
    fraction = 1 - sum(sizes[name] for name in missing) / sum(sizes.values())
    if fraction < LEAST:
        has = f"has {100 * fraction:.1f} % of the backbone's parameters, at least {100 * LEAST:.0f} % are expected"
        raise InputError(f"{prefix}: {has}; it lacks, or has in another shape, {_parts(missing, weights)}")


def _summary(weights, stored, taken, new):
    """List of lines, one for each group of weights: taken, left in the checkpoint, new, and unmatched.

    Args:
        weights: dict from the path of each weight of the model to the weight.
        stored: dict from the path of each weight in the checkpoint to its array.
        taken, new: paths of weights; see `initialize`.
    """
    numbers = sum(weights[name].shape.num_elements() for name in taken)
    left = [name for name in stored if name not in weights]
    random = [name for name in weights if name not in {*stored, *new}]
    reshaped = [name for name in weights if name in stored and name not in {*taken, *new}]
    shapes = [f"{list(weights[name].shape)} here, {list(stored[name].shape)} there" for name in reshaped[:1]]
    rows = (
        ("taken", f"{len(taken)} of {len(weights)} weights, {numbers / 1e6:.3f} M numbers", taken, weights),
        ("left", counted(len(left), "weight"), left, stored),
        ("new", f"{counted(len(new), 'weight')} of modules that start as the identity", new, weights),
        ("unmatched", f"{counted(len(random), 'weight')} that start random", random, weights),
        ("unmatched", f"{len(reshaped)} of another shape ({''.join(shapes)})", reshaped, weights),
    )
    return [f"  {word:<10} {text}: {_parts(names, all_paths)}" for word, text, names, all_paths in rows if names]


def _parts(paths, all_paths, most=6):
    """Names, as text, of the fewest modules that contain all of `paths` but no other path of `all_paths`."""

    def prefixes(path):
        return [path[: match.start()] for match in re.finditer("/|$", path)]

    mixed = {prefix for path in set(all_paths) - set(paths) for prefix in prefixes(path)}
    parts = sorted({next(prefix for prefix in prefixes(path) if prefix not in mixed) for path in paths})
    names = ["everything" if path == "model" else path.removeprefix("model/") for path in parts]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_card(path: str, card: WeightsCard, config: ModelConfig | None) -> None:
    """Raises InputError if a card's network uses its weights in another way than the model of `config`.

    Args:
        path: path of the card.
        card: `WeightsCard`.
        config: the model's `ModelConfig`; None for any model.
    """
    if config is None:
        return
    theirs, ours = find_variant(card.model), find_variant(config.name)
    if theirs.backbone not in (ours.backbone, PLAIN.get(ours.backbone)):
        return
    expected, actual = theirs.backbone_arguments(card.arguments), ours.backbone_arguments(config.arguments)
    # A plain backbone's other arguments change shapes, which are compared anyway.
    compared = expected.keys() - FREE if theirs.backbone is ours.backbone else {"stride_first", "pixels"}
    if differing := {name: value for name, value in expected.items() if name in compared and value != actual[name]}:
        arguments = {**config.arguments, **differing}
        raise InputError(f'{path}: these weights need --gin_binding="ModelConfig.arguments = {arguments}"')
    if card.norm.epsilon != config.norm.epsilon:
        raise InputError(f'{path}: these weights need --gin_binding="BatchNormConfig.epsilon = {card.norm.epsilon}"')


def object_paths(model: Model, root: str) -> dict[str, tf.Variable]:
    """dict from the checkpoint key of each weight of a built model to the weight."""
    queue, visited = [(root, model)], {id(model)}
    for path, node in queue:  # breadth first, so that an object with two paths gets TensorFlow's path
        for name, child in node._trackable_children().items():
            if id(child) not in visited:
                visited.add(id(child))
                queue.append((f"{path}/{name}", child))
    weights = {id(w) for w in model.weights}
    return {path: node for path, node in queue if id(node) in weights}


# === Models from weights ===


def load_weights(
    what: Location, name: str | None = None, *, num_classes: int | None = None, arguments: dict | tuple = ()
) -> tuple[Network, WeightsCard | None]:
    """A built model with the weights at a path.

    Args:
        what: where the weights are; see `resolve`.
        name: key of `registry.VARIANTS`; required for a checkpoint without a card, since a card names the model.
        num_classes: number of classes of a checkpoint without a card; the default is the variant's number.
        arguments: dict of arguments of the model; see `build_model`. These override the card's arguments.

    Returns:
        (the model, its `WeightsCard` or None).

    Raises:
        InputError: there are no weights at the path, or they are damaged or belong to another model.
    """
    path, card, arrays, fill = _read(what)
    if card:
        check_asked(path, card.model, card.num_classes, (name, num_classes))
        model = build_from_card(card, path, arguments, arrays=arrays)
    elif name:
        model = built(name, num_classes or find_variant(name).classes, BatchNormConfig(), dict(arguments))
    else:
        raise InputError(f"{path}: has no {CARD} beside it that names its model; say which, as model='NAME'")
    fill(model)
    return model, card


def read_weights(what: Location) -> tuple[WeightsCard | None, Callable[[Model], None]]:
    """The card of weights, and a function that assigns the weights to a model.

    Args:
        what: where the weights are; see `resolve`.

    Returns:
        (card, function). The card is a `WeightsCard`, or None for a checkpoint without a card. The function takes a
        built model, and raises InputError unless the file has every weight of the model, in the same shape.

    Raises:
        InputError: there are no weights at the path, they are damaged, or the card lists random weights.
    """
    path, card, _, fill = _read(what)
    if card and card.unfilled:
        raise InputError(f"{path}: {len(card.unfilled)} weights are random, as the source has none: {card.unfilled[0]}")
    return card, fill


def _read(what):
    """(path, `WeightsCard` or None, arrays of a safetensors file or None, function that assigns the weights)."""
    source = resolve(what)
    (file,), path = find_weights(source), source.path
    if file.endswith(SUFFIX):
        card, arrays = read_safetensors(file)
        return path, card, arrays, lambda model: assign_tensors(model, path, arrays)
    card = read_json(source.card, WeightsCard)[1] if source.card else None
    return path, card, None, lambda model: restore_model(model, file)


def check_asked(path: str, model: str, num_classes: int, asked: tuple[str | None, int | None]) -> None:
    """Raises InputError unless the weights belong to the requested model.

    Args:
        path: path of the weights.
        model, num_classes: name and number of classes of the weights' model.
        asked: the requested (name, number of classes). None in place of either means that any is accepted.
    """
    if asked[0] not in (None, model):
        find_variant(asked[0])
        raise InputError(f"{path}: holds {model!r}, not {asked[0]!r}")
    if asked[1] not in (None, num_classes):
        raise InputError(f"{path}: has {num_classes} classes, not {asked[1]}")


class Features(Model):
    """Only the backbone of a model. A call returns a dict of maps 'res2' to 'res5', whose strides are in `strides`.

    With output stride 16, 'res4' and 'res5' have stride 16. With output stride 8, 'res3' to 'res5' have stride 8.
    """

    def __init__(self, backbone: Layer, name: str = "features"):
        super().__init__(name=name)
        self.backbone = backbone

    @property
    def strides(self) -> dict[str, int]:
        """dict from the name of each map to its stride."""
        last = self.backbone.output_stride
        return {"res2": 4, "res3": 8, "res4": min(last, 16), "res5": last}

    def call(self, images: tf.Tensor, training: bool = False) -> dict[str, tf.Tensor]:
        maps = self.backbone(images, training=training and self.trainable)
        return {name: maps[name] for name in self.strides}
