"""The tasks of segmentation: their models, data, losses and predictions, without the training loop.

A `PanopticTask` tells the instances of things. A `SegmentationTask` names the class of each pixel, by windows that
slide over a photo, as the spatial-attention study has it.
"""

import dataclasses
import functools

import tensorflow as tf

from axial.data.preprocess import SCALE, preprocess
from axial.errors import InputError
from axial.io import schemas
from axial.io.check import BelowOne, Scales
from axial.models.registry import find_variant
from axial.tasks.base import DistributedPredictor, Inference, Task
from axial.tasks.segmentation.canvas_maps import canvas_maps, sliding
from axial.tasks.segmentation.evaluator import PANOPTIC
from axial.tasks.segmentation.grouping import PostprocessConfig, photo_prediction, postprocess
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
    """best/scores.json: what `main_score` compares, and the other main scores."""

    pq: PanopticQuality
    miou: MeanIou
    ap: schemas.AveragePrecision = schemas.AveragePrecision()


@dataclasses.dataclass(eq=False)
class DensePrediction(Task):
    """What both tasks of segmentation share: networks of maps on a canvas.

    Args:
        model: `ModelConfig`.
        data: `DataConfig`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        spec: `DatasetSpec`; by default the one that the training split was converted under.
        loss: `LossConfig`.
        grouping: `PostprocessConfig`.
        one_canvas: whether photos at their own scale all go on the largest canvas, as those of an export do.

    Attributes:
        canvases: what `preprocess` puts photos on.

    Raises:
        InputError: no such data.
    """

    evaluator = PANOPTIC
    best_scores = BestScores
    trained_by = ("loss", "instances")
    served = (
        ("panoptic", "int32", "[h, w]", "class x label_divisor + instance, of each pixel of the photo"),
        ("semantic", "int32", "[h, w]", "class index of each pixel"),
        ("instance", "int32", "[h, w]", "0 for none, i for the i-th row of score"),
        ("score", "float32", "[K]", "confidence of each instance, 0 to 1"),
        ("dropped", "int32", "[]", "objects that the photo has beyond those that the grouping can find"),
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

    def build_model(self, folded=False):
        """The model with its weights. With `folded` it has no batch norms."""
        changes = {"instances": False} if self.loss_names == ("semantic", "total") else {}
        return self.model.build(self.num_classes, self.data.crop, folded, changes)

    def main_score(self, scores):
        """The number by which checkpoints are compared: PQ, or mIoU without an instance branch."""
        return scores["pq"]["all"]["pq"] if self.instances else scores["miou"]["miou"]

    def training_example(self, record, seed):
        return training_example(record, seed, self.spec, self.data, instances=self.instances)

    def losses(self, model, batch, whole=None):
        """dict of the losses of a training step and their sum 'total', as scalars."""
        del whole  # the losses are means over the images
        targets = {name: x for name, x in batch.items() if name != "image"}
        outputs = model(batch["image"], training=True)
        return panoptic_losses(outputs, targets, self.spec, self.loss, backend=self.model.backend)

    def predictions(self, model, inference=Inference()):
        """A function of examples that yields (example, prediction), batched over all replicas.

        A prediction is a dict of 'panoptic', 'semantic' and 'instance' at the photo's own size, of 'score' and of
        'dropped'. The function raises InputError, which names the photo, for one that `is_whole` or `join` refuses.
        """

        def predict(images, valid_sizes):
            return self.segment(self.maps(model, images, valid_sizes[:, 1], inference))

        def predict_canvases(examples):
            for example, result in replicated(examples):
                yield example, self.on_photo(result, example["valid_size"], example["size"])

        replicated = self.replicated(predict, inference)
        return functools.partial(Tiled.from_task(self), predict_canvases)

    def replicated(self, function, inference):
        """A `DistributedPredictor` of a function of canvases. XLA compiles it where all canvases have one size."""
        return DistributedPredictor(function, inference.strategy, compiled=self.scale is None and inference.compiled)

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        canvas, valid_size = preprocess(image, self.canvases)
        return {"image": canvas, "valid_size": valid_size, "size": tf.shape(image)[:2]}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        placed, valid_size = preprocess(image, self.data.canvases(one=True))
        if self.scale is not None:  # for who calls the export without `Predictor`, which makes tiles
            fits = tf.reduce_all((valid_size > 0) & (valid_size <= self.canvas))
            text = f"times {self.scale:g}, the photo has no pixel or is larger than the canvas {self.canvas}"
            with tf.control_dependencies([tf.debugging.Assert(fits, [text])]):
                placed = tf.identity(placed)
        result = self.segment(self.maps(model, placed[None]))
        return self.on_photo({k: v[0] for k, v in result.items()}, valid_size, tf.shape(image)[:2])

    def on_photo(self, result, valid_size, size):
        """A prediction on the canvas at the photo's own size."""
        return photo_prediction(result, valid_size, size, spec=self.spec, config=self.grouping)

    def network(self, model):
        """The function from images to maps that inference runs: here the model itself."""
        return model

    def maps(self, model, images, widths=None, inference=Inference()):
        """`canvas_maps` of a batch of canvases, float32 [N, H, W, 3]."""
        return canvas_maps(self.network(model), images, widths, inference.scales, flip=inference.flip)

    def segment(self, maps):
        """`postprocess` of the maps from `maps`."""
        with tf.name_scope("postprocess"):
            return postprocess(maps, self.spec, self.grouping)


@dataclasses.dataclass(eq=False)
class PanopticTask(DensePrediction):
    """What a trainer, an evaluator and an exporter need to know of Panoptic-DeepLab; see `DensePrediction`.

    Args:
        multi_scale: scales of the canvas that multi-scale inference averages over, each with its mirror image.
        instances: whether there is an instance branch. Data without things never has one.
    """

    models = ("panoptic",)
    configures = DataConfig, Augmentation, TargetConfig, LossConfig, PostprocessConfig

    multi_scale: Scales = (0.5, 0.75, 1, 1.25, 1.5)
    instances: bool = True


@dataclasses.dataclass(eq=False)
class SegmentationTask(DensePrediction):
    """What a trainer, an evaluator and an exporter need to know of a network that only names the class of each pixel.

    It is a `DensePrediction` without instances, whose network sees windows of the training crop's size. Checkpoints
    are compared by mIoU.

    Args:
        multi_scale: scales of the canvas that multi-scale inference averages over, each with its mirror image.
        overlap: share of a window that the next one covers again; a third in CCNet's code.
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
        """The function from images to maps that inference runs: the model on windows."""
        return sliding(model, self.data.crop, self.overlap)


def segment_each(task, model, images):
    """The segmentations of a large batch of canvases: after the network, images are processed one by one.

    Maps on the canvas have all classes in float32: 133 classes of 1025x1025 pixels are 0.56 GB an image. Raises
    InputError for another task.
    """
    if not isinstance(task, DensePrediction):
        raise InputError(f"--mode=serve: {task.model.name} gives no segments; it compiles models for segmentation")

    def segment_image(inputs):
        image, outputs = tf.nest.map_structure(lambda x: x[None], inputs)
        return {name: x[0] for name, x in task.segment(canvas_maps(lambda _: outputs, image)).items()}

    batch = images, task.network(model)(images)
    first = segment_image(tf.nest.map_structure(lambda x: x[0], batch))  # for its shapes alone
    return tf.map_fn(segment_image, batch, fn_output_signature=tf.nest.map_structure(tf.TensorSpec.from_tensor, first))
