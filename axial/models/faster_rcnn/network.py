"""Faster R-CNN with a feature pyramid, and Mask R-CNN, on any backbone.

Proposals, feature crops (RoIAlign) and non-maximum suppression are layers of tf-models-official. The pyramid, the heads
and the sampling are ours and follow mmdetection, the code of the study (Zhu et al., ICCV 2019). The heads of
tf-models-official have batch norms, and the heads of the study have none.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import tensorflow as tf
import tf_keras as keras

from axial.data.preprocess import IN_FILE
from axial.errors import InputError
from axial.layers import device, random
from axial.layers.configured import Layer
from axial.layers.conv import Conv, make_logits, subsample
from axial.models.base import Network, NetworkOptions
from axial.models.faster_rcnn.anchors import LEVELS, RATIOS, anchors, choose, match

CODE_WEIGHTS = [10.0, 10.0, 5.0, 5.0]  # of box codes (y, x, height, width), as in mmdetection and tf-models-official
OVERLAP = {"proposals": 0.7, "detections": 0.5}  # IoU above which suppression removes the lower-scored box
LEAST_SCORE = 0.05  # smallest score of a detection
OBJECT = 0.5  # least IoU of a proposal with its object; a proposal with a smaller IoU is background
SAMPLED_OBJECTS = 0.25  # largest fraction of positives among the sampled boxes
MASK_CROP, BOX_CROP = 14, 7  # sides of RoIAlign's crops


class Pyramid(Layer):
    """Feature pyramid (Lin et al., CVPR 2017): dict 'res2' .. 'res5' -> dict '2' .. '6' of maps, `filters` channels.

    Level 6 has every second pixel of level 5.
    """

    def __init__(self, filters, name=None):
        super().__init__(name=name)
        self.levels = LEVELS[:-1]
        conv = functools.partial(Conv, filters, norm=None, relu=False, kernel_initializer="glorot_uniform")
        self.lateral = [conv(kernel=1, name=f"lateral{level}") for level in self.levels]
        self.output_convs = [conv(kernel=3, name=f"output{level}") for level in self.levels]

    def call(self, features):
        maps = [conv(features[f"res{level}"]) for level, conv in zip(self.levels, self.lateral)]
        for i in reversed(range(len(maps) - 1)):
            above = maps[i + 1]
            above = tf.repeat(tf.repeat(above, 2, 1), 2, 2)[:, : maps[i].shape[1], : maps[i].shape[2]]
            maps[i] += above
        outputs = {str(level): conv(x) for level, conv, x in zip(self.levels, self.output_convs, maps)}
        return outputs | {str(LEVELS[-1]): subsample(outputs[str(self.levels[-1])], 2, 2)}


class ProposalHead(Layer):
    """Scores and box codes of the A anchors at each position: two dicts of float32 maps, with A and 4 A channels."""

    def __init__(self, filters, name=None):
        super().__init__(name=name)
        normal = keras.initializers.RandomNormal(stddev=0.01)
        self.hidden = Conv(filters, 3, None, kernel_initializer=normal, name="hidden")
        self.scores = _make_logits(self, len(RATIOS), "scores")
        self.codes = _make_logits(self, 4 * len(RATIOS), "codes")

    def call(self, pyramid):
        hidden = {level: self.hidden(x) for level, x in pyramid.items()}
        return tuple({level: head(x) for level, x in hidden.items()} for head in (self.scores, self.codes))


class BoxHead(Layer):
    """Two dense layers with `width` channels on a box's crop, then class logits and a box code for each class.

    Shapes: [N, boxes, side, side, C] -> float32 [N, boxes, 1 + classes], float32 [N, boxes, 4 (1 + classes)].
    """

    def __init__(self, width, num_classes, name=None):
        super().__init__(name=name)
        linear = functools.partial(Conv, width, 1, None, kernel_initializer="glorot_uniform")
        self.hidden = [linear(name=f"hidden{i}") for i in (1, 2)]
        self.classes = _make_logits(self, 1 + num_classes, "classes")
        self.codes = _make_logits(self, 4 * (1 + num_classes), "codes", 0.001)

    def call(self, x):
        _, boxes, height, width, channels = x.shape
        x = tf.reshape(x, [-1, boxes, 1, height * width * channels])
        for layer in self.hidden:
            x = layer(x)
        return tf.squeeze(self.classes(x), 2), tf.squeeze(self.codes(x), 2)


class MaskHead(Layer):
    """Four 3x3 convolutions, upsampling by 2, then a mask for each class (He et al., ICCV 2017, Fig. 4).

    Shapes: [N, boxes, side, side, C] and classes int [N, boxes] -> float32 logits [N, boxes, 2 side, 2 side].
    """

    def __init__(self, filters, num_classes, name=None):
        super().__init__(name=name)
        self.hidden = [Conv(filters, 3, None, name=f"hidden{i}") for i in range(1, 5)]
        self.double = Conv(4 * filters, 1, None, name="double")  # equals a transposed 2x2 convolution, stride 2
        self.masks = _make_logits(self, 1 + num_classes, "masks")

    def call(self, x, classes):
        _, boxes, side, _, channels = x.shape
        x = tf.reshape(x, [-1, side, side, channels])
        for layer in self.hidden:
            x = layer(x)
        masks = self.masks(tf.nn.depth_to_space(self.double(x), 2))
        masks = tf.reshape(masks, [-1, boxes, 2 * side, 2 * side, masks.shape[-1]])
        return tf.einsum("nbhwc,nbc->nbhw", masks, tf.one_hot(classes, masks.shape[-1], dtype=masks.dtype))


def _make_logits(layer, filters, name, deviation=0.01):
    return make_logits(layer, filters, name, keras.initializers.RandomNormal(stddev=deviation))


@dataclasses.dataclass(frozen=True)
class FasterRCNNOptions(NetworkOptions):
    """Options of `FasterRCNN`.

    Attributes:
        pyramid_width: channels of the pyramid and of the proposal and mask heads.
        head_width: channels of the box head's two layers.
        pre_nms, proposals: number of boxes of each level before non-maximum suppression, and of each photo after
            non-maximum suppression. Each is a pair (for training, for evaluation).
        sampled: number of boxes of a photo that train the box head.
        detections: largest number of objects that are detected in a photo.
        masks: whether to predict masks.
        frozen_stages: number of stages that are frozen together with the stem: 0 freezes the stem only, -1 nothing.
    """

    pyramid_width: int = 256
    head_width: int = 1024
    pre_nms: tuple[int, int] = (2000, 1000)
    proposals: tuple[int, int] = (2000, 1000)
    sampled: int = 512
    detections: int = 100
    masks: bool = False
    frozen_stages: int = -1


class FasterRCNN(Network):
    """Backbone, pyramid, proposals, and a head that classifies and refines each proposal; with `masks`, a mask head.

    Args:
        backbone: layer that returns the dict of maps 'res1' .. 'res5', with output stride 32.
        num_classes: number of thing classes.
        norm: `BatchNormConfig` of the backbone, or None for a folded backbone.
        options: `FasterRCNNOptions`.

    Shapes: images [N, h, w, 3], from -1 to 1 -> dict of 'box' float32 [N, detections, 4],
        corners (y, x, y, x) in pixels, 'score' float32 [N, detections], 'class' int32 [N, detections] from 1 to
        num_classes, 'count' int32 [N], and with masks 'mask' float32 [N, detections, 28, 28] of probabilities.

    Raises:
        InputError: the output stride is not 32, or the backbone has fewer stages than are frozen.
    """

    task, title, hub = "detection", "detection", "object-detection"
    classes = 80  # of COCO's things

    defaults = FasterRCNNOptions()
    side_step = 64  # the pyramid's largest stride

    def __init__(self, backbone, num_classes, norm, options=defaults, name="faster_rcnn"):
        from official.vision.modeling.layers import roi_generator

        super().__init__(backbone, num_classes, norm, options, name=name)
        if backbone.output_stride != 32:
            raise InputError(f"output_stride must be 32 for a feature pyramid: got {backbone.output_stride}")
        if not -1 <= options.frozen_stages <= len(backbone.stages):
            raise InputError(f"frozen_stages must be from -1 to {len(backbone.stages)}: got {options.frozen_stages}")
        for stage in [[backbone.stem], *backbone.stages][: options.frozen_stages + 1]:
            for layer in stage:
                layer.trainable = False
        self.pyramid = Pyramid(options.pyramid_width, name="pyramid")
        self.proposal_head = ProposalHead(options.pyramid_width, name="proposal_head")
        self.box_head = BoxHead(options.head_width, num_classes, name="box_head")
        if options.masks:
            self.mask_head = MaskHead(options.pyramid_width, num_classes, name="mask_head")
        self._propose = roi_generator.MultilevelROIGenerator(
            options.pre_nms[0],
            num_proposals=options.proposals[0],
            nms_iou_threshold=OVERLAP["proposals"],
            test_pre_nms_top_k=options.pre_nms[1],
            test_num_proposals=options.proposals[1],
            test_nms_iou_threshold=OVERLAP["proposals"],
            dtype="float32",  # like all layers that compute with pixel coordinates
        )

    def call(self, images, valid_size=None, truth=None, training=False):
        """Detections; with `truth`, the outputs and targets of the losses.

        Args:
            images: float32 [N, h, w, 3].
            valid_size: int32 [N, 2], (height, width) of each photo on its canvas; by default the size of the canvas.
            truth: ground truth, a dict of 'boxes' and 'classes', and of 'masks' if the model has masks. Boxes of an
                object whose mask is -1 are not sampled for masks.
            training: whether the batch norms are in training mode.

        Returns:
            dict. With `truth` it has 'anchor_scores' and 'anchor_codes' (dicts of each level's map), 'logits' and
            'codes', and their targets 'classes' (see `_sample`) and 'code_targets'. With masks it also has
            'mask_logits', 'mask_classes' and 'mask_targets'.

        Raises:
            InputError: the size of the images is not static.
        """
        if None in images.shape[1:3]:
            raise InputError(f"Faster R-CNN needs static sizes: got {images.shape}")
        if valid_size is None:
            valid_size = tf.tile(tf.constant([images.shape[1:3].as_list()]), [tf.shape(images)[0], 1])
        valid_size = tf.cast(valid_size, tf.float32)
        images = _padded(images)
        pyramid = self.pyramid(self.backbone(images, training=training and self.trainable))
        scores, codes = self.proposal_head(pyramid)
        copies = [tf.shape(images)[0], 1, 1, 1]
        anchor_boxes = {level: tf.tile(x[None], copies) for level, x in anchors(images.shape[1:3]).items()}
        visible = {level: _on_photo(x, 2 ** int(level), valid_size) for level, x in _float32(scores).items()}
        with _suppression():
            proposals, _ = self._propose(_float32(codes), visible, anchor_boxes, valid_size, training=truth is not None)
        proposals = tf.stop_gradient(proposals)
        crops = {level: tf.cast(pyramid[level], tf.float32) for level in sorted(pyramid)[:-1]}
        if truth is None:
            return self._detect(crops, proposals, valid_size)
        return {"anchor_scores": scores, "anchor_codes": codes, **self._training_outputs(crops, proposals, truth)}

    def _crops(self, maps, boxes, side):
        """Crops of the maps at the boxes, [N, boxes, side, side, C]."""
        from official.vision.modeling.layers import roi_aligner

        crops = roi_aligner.MultilevelROIAligner(side, dtype="float32")(maps, boxes)
        return tf.cast(tf.reshape(crops, [-1, boxes.shape[1], side, side, maps["2"].shape[-1]]), self.compute_dtype)

    def _detect(self, maps, proposals, valid_size):
        """Detections of each image."""
        from official.vision.modeling.layers import detection_generator

        logits, codes = self.box_head(self._crops(maps, proposals, BOX_CROP))
        detect = detection_generator.DetectionGenerator(
            pre_nms_score_threshold=LEAST_SCORE,
            nms_iou_threshold=OVERLAP["detections"],
            max_num_detections=self.options.detections,
            # one op on a CPU, or a loop of ops that any device has
            nms_version="batched" if device.on_cpu() and not IN_FILE.get() else "v2",
            dtype="float32",
        )
        with _suppression():
            boxes = _float32(codes), _float32(logits), proposals, valid_size
            detections = detect(*boxes, regression_weights=CODE_WEIGHTS)
        classes = tf.cast(detections["detection_classes"], tf.int32)
        result = {"box": detections["detection_boxes"], "score": detections["detection_scores"], "class": classes}
        result["count"] = tf.cast(detections["num_detections"], tf.int32)
        if self.options.masks:
            result["mask"] = tf.sigmoid(self.mask_head(self._crops(maps, result["box"], MASK_CROP), classes))
        return result

    def _sample(self, proposals, truth):
        """Samples the boxes that train the box head. A resumed run samples the same; see `axial.layers.random`.

        The candidates are the proposals with a positive area and the ground truth's boxes (mmdetection's RandomSampler
        with add_gt_as_proposals).

        Returns:
            float32 [N, sampled, 4], the boxes; int32 [N, sampled], the indices of their objects; and int32
            [N, sampled], their classes: 0 is background, and -1 marks unused rows where candidates are too few.
        """
        from official.vision.ops import iou_similarity

        true, classes = truth["boxes"], truth["classes"]  # padding rows overlap nothing
        empty = tf.reduce_any(proposals[..., 2:] <= proposals[..., :2], -1, keepdims=True)
        matched, positive, negative = match(iou_similarity.IouSimilarity()(proposals, true, empty), OBJECT, OBJECT)
        boxes = tf.concat([proposals, true], 1)
        matched = tf.concat([matched, tf.zeros_like(classes) + tf.range(classes.shape[1])], 1)
        positive = tf.concat([positive, classes > 0], 1)
        negative = tf.concat([negative, tf.zeros_like(classes, tf.bool)], 1)
        draw = random.uniform(tf.shape(positive))
        chosen = choose(positive, negative, self.options.sampled, draw, positive_fraction=SAMPLED_OBJECTS)
        kinds = tf.where(positive, tf.gather(classes, matched, batch_dims=1), 0)
        kinds = tf.where(chosen, kinds, -1)
        order = tf.math.top_k(tf.cast(chosen, tf.int32), self.options.sampled)[1]
        return tuple(tf.gather(x, order, batch_dims=1) for x in (boxes, matched, kinds))

    def _training_outputs(self, maps, proposals, truth):
        """Outputs of the heads for sampled boxes, and their targets."""
        from official.vision.modeling.layers import mask_sampler
        from official.vision.ops import box_ops

        boxes, indices, classes = self._sample(proposals, truth)
        matched = tf.gather(truth["boxes"], indices, batch_dims=1)
        targets = box_ops.encode_boxes(matched, boxes, weights=CODE_WEIGHTS)
        targets = tf.where((classes > 0)[..., None], targets, 0.0)
        logits, codes = self.box_head(self._crops(maps, boxes, BOX_CROP))
        result = {"logits": logits, "codes": codes, "classes": classes}
        result["code_targets"] = tf.stop_gradient(targets)
        if self.options.masks:
            has_mask = truth["masks"][..., 0, 0] >= 0  # [N, boxes]; an object without a mask has -1
            masked = tf.where(tf.gather(has_mask, indices, batch_dims=1), classes, 0)
            count = int(self.options.sampled * SAMPLED_OBJECTS)
            sampler = mask_sampler.MaskSampler(2 * MASK_CROP, count, dtype="float32")
            boxes, classes, masks = sampler(boxes, matched, masked, indices, gt_masks=truth["masks"])
            result["mask_logits"] = self.mask_head(self._crops(maps, boxes, MASK_CROP), classes)
            result |= {"mask_classes": classes, "mask_targets": tf.stop_gradient(masks)}
        return result


def _suppression():
    """A context in which a graph for a file has the formats' own op for suppression, not tf-models-official's loops."""
    from official.vision.ops import nms

    def suppress(scores, boxes, max_output_size, iou_threshold):
        kept, count = tf.raw_ops.NonMaxSuppressionV4(
            boxes=boxes[0],
            scores=scores[0],
            max_output_size=max_output_size,
            iou_threshold=iou_threshold,
            score_threshold=0.0,
            pad_to_max_output_size=True,
        )
        real = tf.range(max_output_size) < count
        scores = tf.where(real, tf.gather(scores[0], kept), 0.0)
        return scores[None], tf.where(real[:, None], tf.gather(boxes[0], kept), 0.0)[None]

    patch = mock.patch.object(nms, "sorted_non_max_suppression_padded", suppress)
    return patch if IN_FILE.get() else contextlib.nullcontext()


def _float32(maps):
    """A head's outputs as float32, which tf-models-official's layers take."""
    return tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), maps)


def _on_photo(scores, stride, valid_size):
    """Sets scores [N, h, w, A] outside of the valid region, `valid_size` float [N, 2], to the lowest number.

    Training ignores these scores, and mmdetection's maps end at the photo's border.
    """
    rows, columns = (stride * tf.range(float(n)) < valid_size[:, i, None] for i, n in enumerate(scores.shape[1:3]))
    return tf.where((rows[:, :, None] & columns[:, None])[..., None], scores, scores.dtype.min)


def _padded(images):
    """Pads images with zeros, below and on the right, to multiples of the largest stride."""
    below, right = (-side % 2 ** LEVELS[-1] for side in images.shape[1:3])
    return tf.pad(images, [[0, 0], [0, below], [0, right], [0, 0]])
