"""The task of panoptic segmentation: its model, data, losses and predictions, without the training loop."""

import dataclasses
import functools

import tensorflow as tf

from axial.data.preprocess import ScaledCanvas, preprocess
from axial.data.specs import DatasetSpec
from axial.data.streams import decode_photo
from axial.io import schemas
from axial.io.check import Scales, check_arguments
from axial.models.registry import ModelConfig, find_variant
from axial.tasks.base import Task
from axial.tasks.segmentation.canvas_maps import canvas_maps
from axial.tasks.segmentation.evaluation import PANOPTIC
from axial.tasks.segmentation.feed import (
    Augmentation,
    DataConfig,
    segment_map,
    training_dataset,
    training_example,
)
from axial.tasks.segmentation.grouping import PostprocessConfig, check_room, most_centers, of_photo, postprocess
from axial.tasks.segmentation.losses import LossConfig, panoptic_losses
from axial.tasks.segmentation.predictions import CheckpointPredictions
from axial.tasks.segmentation.targets import TargetConfig


class Quality(schemas.Struct):
    pq: float | None


class PanopticQuality(schemas.Struct):
    all: Quality
    things: Quality = Quality(pq=None)
    stuff: Quality = Quality(pq=None)


class MeanIou(schemas.Struct):
    miou: float | None


class BestScores(schemas.Struct):
    """best/scores.json: what `PanopticTask.main_score` compares, and the other main scores."""

    pq: PanopticQuality
    miou: MeanIou
    ap: schemas.AveragePrecision = schemas.AveragePrecision()


class PanopticTask(Task):
    """What a trainer, an evaluator and an exporter need to know of Panoptic-DeepLab.

    Args:
        model: `ModelConfig`.
        data: `DataConfig`.
        data_dir: folder of the converted data set. If it lacks both splits of `data`, the only ones whose names begin
            with train and with val take their places.
        loss: `LossConfig`.
        grouping: `PostprocessConfig`.
        multi_scale: scales of the canvas that multi-scale inference averages over, each with its mirror image.
        instances: whether there is an instance branch. Data without things never has one.
        spec: `DatasetSpec`; by default the one that the training split was converted under.

    Raises:
        InputError: no such data; a grouping that finds more instances than the labels have room for.
    """

    evaluation = PANOPTIC
    models, labels = ("panoptic",), "panoptic"
    configures = DataConfig, Augmentation, TargetConfig, LossConfig, PostprocessConfig
    best_scores = BestScores
    batches = staticmethod(training_dataset)
    trained_by = ("loss", "instances")
    served = (
        ("panoptic", "int32", "[h, w]", "class x label_divisor + instance, of each pixel of the photo"),
        ("semantic", "int32", "[h, w]", "class index of each pixel"),
        ("instance", "int32", "[h, w]", "0 for none, i for the i-th row of score"),
        ("score", "float32", "[K]", "confidence of each instance, 0 to 1"),
        ("dropped", "int32", "[]", "objects that the photo has beyond those that the grouping can find"),
    )
    one_canvas = False  # whether photos at their own scale all go on the largest canvas, as a network in a file has it

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        data_dir: str,
        loss: LossConfig = LossConfig(),
        grouping: PostprocessConfig = PostprocessConfig(),
        multi_scale: Scales = (0.5, 0.75, 1, 1.25, 1.5),
        instances: bool = True,
        spec: DatasetSpec | None = None,
    ):
        super().__init__(model, data, data_dir, spec)
        self.loss, self.grouping, self.multi_scale = loss, grouping, multi_scale
        check_arguments(self)
        check_room(self.spec, grouping)
        self.canvas, self.crop, self.photo_scale = tuple(data.canvas), data.crop, data.photo_scale
        self.instances = instances and any(self.spec.things)
        self.targets = {"instances": self.instances}
        self._changes, branches = {}, ("center", "offset")
        if find_variant(model.name).task == "segmentation":
            branches = ("auxiliary",)
        elif not self.instances:
            self._changes, branches = {"instances": False}, ()
        self.loss_names = ("semantic", *branches, "total")

    @property
    def canvases(self):
        """What `preprocess` puts photos on: the canvas that they are fitted to, or a `ScaledCanvas`."""
        if self.photo_scale is None:
            return self.canvas
        scaled = ScaledCanvas.within(self.canvas, self.photo_scale, self.data.tile_overlap)
        return scaled.alone if self.one_canvas else scaled

    def build_model(self, folded=False):
        """The model with its weights. With `folded` it has no batch norms."""
        return self.model.build(self.num_classes, self.data.crop, folded=folded, **self._changes)

    def main_score(self, scores):
        """The number by which checkpoints are compared: PQ, or mIoU without an instance branch."""
        return scores["pq"]["all"]["pq"] if self.instances else scores["miou"]["miou"]

    def losses(self, model, batch, whole=None):
        """dict of the losses of a training step and their sum 'total', as scalars."""
        del whole  # the losses are means over the images
        targets = {name: x for name, x in batch.items() if name != "image"}
        outputs = model(batch["image"], training=True)
        return panoptic_losses(outputs, targets, self.spec, self.loss, backend=self.model.backend)

    def feed_stages(self):
        about = dict(seed=tf.constant([0, 1], tf.int64), spec=self.spec, data=self.data, instances=self.instances)
        example = functools.partial(training_example, **about)
        return {"decode photo": decode_photo, "decode segments": segment_map, "decode, augment, targets": example}

    def predictions(self, model, strategy=None, **looks):
        """A function of examples that yields each with the model's prediction; see `CheckpointPredictions`."""
        return CheckpointPredictions(self, model, strategy, **looks)

    def example(self, image):
        """A photo, uint8 [h, w, 3], as `predictions` takes it."""
        canvas, content = preprocess(image, self.canvases)
        return {"image": canvas, "content": content, "size": tf.shape(image)[:2], "photo": image}

    def serve(self, model, image):
        """The prediction of one photo, uint8 [h, w, 3], as an export returns it; see `Server`."""
        canvas = self.canvas if self.photo_scale is None else self.canvases.alone
        placed, content = preprocess(image, canvas)
        if self.photo_scale is not None:  # for who calls the export without `Predictor`, which makes tiles
            fits = tf.reduce_all((content > 0) & (content <= self.canvas))
            text = f"times {self.photo_scale:g}, the photo has no pixel or is larger than the canvas {self.canvas}"
            with tf.control_dependencies([tf.debugging.Assert(fits, [text])]):
                placed = tf.identity(placed)
        result = self.segment(self.maps(model, placed[None]))
        size = tf.shape(image)[:2]
        return of_photo({k: v[0] for k, v in result.items()}, content, size, spec=self.spec, config=self.grouping)

    def about(self):
        """What joining the tiles of a photo takes, where photos keep their own scale."""
        if self.photo_scale is None:
            return {}
        knobs = {name: getattr(self.grouping, name) for name in ("stuff_area", "thing_area")}
        knobs |= {"pieces": self.grouping.pieces or "", "tile_overlap": self.canvases.overlap}
        return {"photo_scale": self.photo_scale, "instances": self.instances, **knobs}

    def settings(self):
        """What predictions depend on beside the weights and the canvas, for JSON."""
        found = {"grouping": dataclasses.asdict(self.grouping), "instances": self.instances}
        if self.photo_scale is not None:
            found |= {"photo_scale": self.photo_scale, "tile_overlap": self.canvases.overlap}
        return found

    def network(self, model):
        """The function from images to maps that inference runs: here the model itself."""
        return model

    def maps(self, model, images, widths=None, scales=(1.0,), flip=False):
        """`canvas_maps` of a batch of canvases, float32 [N, H, W, 3]."""
        return canvas_maps(self.network(model), images, widths, scales, flip=flip)

    def segment(self, maps, grouping=None):
        """`postprocess` of the maps from `maps`, by default with the task's own grouping."""
        with tf.name_scope("postprocess"):
            return postprocess(maps, self.spec, grouping or self.grouping)

    def segments(self, model, images):
        """`segment` of `maps`, for large batches: after the network, images are processed one by one.

        Maps on the canvas have all classes in float32: 133 classes of 1025x1025 pixels are 0.56 GB an image.
        """
        outputs = self.network(model)(images)
        of_map = tf.TensorSpec(images.shape[1:3], tf.int32)
        of_center = tf.TensorSpec([most_centers(of_map.shape, self.grouping, self.spec)], tf.float32)

        def of_image(inputs):
            image, outputs = tf.nest.map_structure(lambda x: x[None], inputs)
            return {name: x[0] for name, x in self.segment(canvas_maps(lambda _: outputs, image)).items()}

        signature = {"semantic": of_map, "instance": of_map, "panoptic": of_map}
        signature |= {"center_score": of_center, "score": of_center, "dropped": tf.TensorSpec([], tf.int32)}
        return tf.map_fn(of_image, (images, outputs), fn_output_signature=signature)
