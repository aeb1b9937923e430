"""The tasks of segmentation: models, data, losses and predictions.

`PanopticTask` is panoptic segmentation. `SegmentationTask` is semantic segmentation with sliding-window inference, as
in the spatial-attention study.
"""

import dataclasses
import functools
import math

import tensorflow as tf

from axial.data.preprocess import IN_FILE, SCALE, preprocess
from axial.io import schemas
from axial.io.check import BelowOne, Scales
from axial.models.registry import find_variant
from axial.tasks.base import DistributedPredictor, Inference, Task
from axial.tasks.segmentation.canvas_maps import canvas_maps, sliding
from axial.tasks.segmentation.evaluator import PANOPTIC
from axial.tasks.segmentation.grouping import PostprocessConfig, photo_prediction, postprocess, segment_rows
from axial.tasks.segmentation.input_pipeline import Augmentation, DataConfig, training_example
from axial.tasks.segmentation.losses import LossConfig, TargetConfig, panoptic_losses
from axial.tasks.segmentation.tiles import Tiled


class Quality(schemas.Struct):
    pq: float | None


class PanopticQuality(schemas.Struct):
    all: Quality
    things: Quality = Quality(pq=None)
    stuff: Quality = Quality(pq=None)


class MeanIou(schemas.Struct):
    miou: float | None


class BestScores(schemas.Struct):
    """best/scores.json of a segmentation task: the scores that `main_score` reads, and the other main scores."""

    pq: PanopticQuality
    miou: MeanIou
    ap: schemas.AveragePrecision = schemas.AveragePrecision()


@dataclasses.dataclass(eq=False)
class DensePrediction(Task):
    """Base class of both segmentation tasks, whose networks predict maps on a canvas.

    Args:
        model: `ModelConfig`.
        data: `DataConfig`.
        data_dir: folder of the converted data set. If the folder has neither split of `data`, the task uses the only
            splits there whose names begin with 'train' and 'val'.
        spec: `DatasetSpec`; by default the spec of the converted training split.
        loss: `LossConfig`.
        grouping: `PostprocessConfig`.
        one_canvas: with a `DataConfig.photo_scale`, whether all photos use the largest canvas, as in an export.

    Attributes:
        canvases: canvas argument of `preprocess`: (height, width) or a `ScaledCanvas`.
        exported: the `Tiled` of an export, which has only the largest canvas.

    Raises:
        InputError: the data does not exist.
    """

    evaluator = PANOPTIC
    best_scores = BestScores
    trained_by = ("loss", "instances")
    served = (
        ("panoptic", "int32", "[h, w]", "class x label_divisor + instance, of each pixel of the photo"),
        ("semantic", "int32", "[h, w]", "class index of each pixel"),
        ("instance", "int32", "[h, w]", "0 for none, i for the i-th row of score"),
        ("score", "float32", "[K]", "confidence of each instance, 0 to 1"),
        ("dropped", "int32", "[]", "number of objects that the grouping dropped"),
    )
    served_in_file = (
        *served,
        ("segment", "int32", "[S]", "the values of panoptic, sorted, without void"),
        ("segment_class", "int32", "[S]", "class index of each segment"),
        ("segment_score", "float32", "[S]", "confidence of each segment, 0 to 1; 1 for stuff"),
        ("segment_box", "int32", "[S, 4]", "x, y, width and height of each segment in pixels of the photo"),
    )

    data: DataConfig
    loss: LossConfig = LossConfig()
    grouping: PostprocessConfig = PostprocessConfig()
    one_canvas: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.canvas, self.scale = tuple(self.data.canvas), self.data.photo_scale
        self.canvases = self.data.canvases(self.one_canvas)
        self.instances = self.instances and any(self.spec.things)
        branches = ("center", "offset") if self.instances else ()
        branches = ("auxiliary",) if find_variant(self.model.name).task == "segmentation" else branches
        self.loss_names = "semantic", *branches, "total"
        self.settings = {"grouping": dataclasses.asdict(self.grouping), "instances": self.instances}
        if self.scale is not None:
            self.settings |= {SCALE: self.scale, "tile_overlap": self.canvases.overlap}
            self.about = Tiled.from_task(self).about()
        self.exported = dataclasses.replace(Tiled.from_task(self), canvas=self.data.canvases(one=True))
        self.expect = self.exported.expect

    def resized(self, canvas):
        """A copy with another canvas for predictions. The areas of the grouping are scaled with that of the canvas.

        With a `DataConfig.photo_scale`, photos and areas keep their scale: the canvas only decides the size of tiles.
        """
        ratio = 1 if self.scale else math.prod(canvas) / math.prod(self.canvas)
        stuff_area, thing_area = (round(ratio * area) for area in (self.grouping.stuff_area, self.grouping.thing_area))
        grouping = dataclasses.replace(self.grouping, stuff_area=stuff_area, thing_area=thing_area)
        return dataclasses.replace(self, data=self.data.resized(canvas, fitted=False), grouping=grouping)

    def build_model(self, folded=False):
        """The model with its weights. With `folded`, the model has no batch norms."""
        changes = {"instances": False} if self.loss_names == ("semantic", "total") else {}
        return self.model.build(self.num_classes, self.data.crop, folded, changes)

    def main_score(self, scores):
        """The score by which a training ranks its checkpoints: PQ, or mIoU if there is no instance branch."""
        return scores["pq"]["all"]["pq"] if self.instances else scores["miou"]["miou"]

    def training_example(self, record, seed):
        return training_example(record, seed, self.spec, self.data, instances=self.instances)

    def losses(self, model, batch, whole=None):
        """dict of the losses of a train step and their sum 'total', as scalars."""
        del whole  # the losses are means over images, which need no counts
        targets = {name: x for name, x in batch.items() if name != "image"}
        outputs = model(batch["image"], training=True)
        return panoptic_losses(outputs, targets, self.spec, self.loss, backend=self.model.backend)

    def predictions(self, model, inference=Inference()):
        """A function that takes examples and yields (example, prediction), batched over all replicas.

        A prediction is a dict of 'panoptic', 'semantic' and 'instance' at the photo's own size, and of 'score' and
        'dropped'. The function raises InputError, with the photo's name, if `is_whole` or `join` refuses a photo.
        """

        def predict(images, valid_sizes):
            return self.segment(self.maps(model, images, valid_sizes[:, 1], inference))

        def predict_canvases(examples):
            for example, result in replicated(examples):
                yield example, self.on_photo(result, example["valid_size"], example["size"])

        replicated = self.replicated(predict, inference)
        return functools.partial(Tiled.from_task(self), predict_canvases)

    def replicated(self, function, inference):
        """A `DistributedPredictor` of a function of canvases. XLA is used only if all canvases have one size."""
        return DistributedPredictor(function, inference.strategy, compiled=self.scale is None and inference.compiled)

    def example(self, image):
        """An example for `predictions`, from a photo, uint8 [h, w, 3]."""
        canvas, valid_size = preprocess(image, self.canvases)
        return {"image": canvas, "valid_size": valid_size, "size": tf.shape(image)[:2]}

    def serve(self, model, image):
        """The prediction for one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""

        def predict(image):
            placed, valid_size = preprocess(image, self.data.canvases(one=True))
            if IN_FILE.get() and self.scale is not None:  # a file has no assertions; an index beyond the end is refused
                fits = tf.reduce_all((valid_size > 0) & (valid_size <= self.canvas))
                placed = tf.gather(placed[None], tf.where(fits, 0, 1))
            result = self.segment(self.maps(model, placed[None]))
            return self.on_photo({k: v[0] for k, v in result.items()}, valid_size, tf.shape(image)[:2])

        if IN_FILE.get():  # a file has no tiles
            prediction = predict(image)
            return {**prediction, **segment_rows(prediction, self.spec)}
        return self.exported.serve(predict, image)

    def on_photo(self, result, valid_size, size):
        """Maps a prediction from the canvas to the photo's own size; see `photo_prediction`."""
        return photo_prediction(result, valid_size, size, spec=self.spec, config=self.grouping)

    def network(self, model):
        """The function by which inference maps images to output maps: by default the model."""
        return model

    def maps(self, model, images, widths=None, inference=Inference()):
        """The `canvas_maps` for a batch of canvases, float32 [N, H, W, 3]."""
        return canvas_maps(self.network(model), images, widths, inference.scales, flip=inference.flip)

    def segment(self, maps):
        """Applies `postprocess` to the result of `maps`."""
        with tf.name_scope("postprocess"):
            return postprocess(maps, self.spec, self.grouping)


@dataclasses.dataclass(eq=False)
class PanopticTask(DensePrediction):
    """The task of panoptic segmentation with Panoptic-DeepLab; see `DensePrediction`.

    Args:
        multi_scale: scales of the canvas that multi-scale inference averages over, each with its mirror image.
        instances: whether the network has an instance branch. A network for data without things never has this branch.
    """

    models = ("panoptic",)
    configures = DataConfig, Augmentation, TargetConfig, LossConfig, PostprocessConfig

    multi_scale: Scales = (0.5, 0.75, 1, 1.25, 1.5)
    instances: bool = True


@dataclasses.dataclass(eq=False)
class SegmentationTask(DensePrediction):
    """The task of semantic segmentation with sliding-window inference; see `DensePrediction`.

    The windows have the size of the training crop. A training ranks its checkpoints by mIoU.

    Args:
        multi_scale: scales of the canvas that multi-scale inference averages over, each with its mirror image.
        overlap: overlap of neighbouring windows, as a fraction of a window's side; a third in CCNet's code.
    """

    models = "segmentation", "panoptic"
    configures = PanopticTask.configures
    instances = False

    loss: LossConfig = LossConfig(top_k=1.0)
    multi_scale: Scales = (0.75, 1, 1.25, 1.5, 1.75, 2)
    overlap: BelowOne = 1 / 3

    def __post_init__(self):
        super().__post_init__()
        self.settings |= {"window": self.data.crop, "overlap": self.overlap}

    def network(self, model):
        """The function by which inference maps images to output maps: the model on sliding windows."""
        return sliding(model, self.data.crop, self.overlap)
