"""Compares training steps of the study's plain networks with training steps of the same models in tf-models-official.

Translation: axial's base Transformer with plain attention (type 1000, sinusoids), and `Seq2SeqTransformer`.
Detection: axial's Mask R-CNN with ResNet-50 and FPN, and the model of `MaskRCNNTask`. The docstring of benchmark.py
describes the measurements.
"""

import numpy as np
import tensorflow as tf
from official.nlp.modeling.models import seq2seq_transformer
from official.vision.configs import maskrcnn as official_config
from official.vision.ops.anchor import build_anchor_generator
from official.vision.tasks.maskrcnn import MaskRCNNTask

from axial.data.converters.coco import sample_data_dir
from axial.models.faster_rcnn.anchors import ANCHOR_SIZE, LEVELS, RATIOS
from axial.models.outputs import LOGITS
from axial.models.registry import ModelConfig, build_model
from axial.tasks.detection.input_pipeline import DetectionData
from axial.tasks.detection.task import DetectionTask
from benchmark import measure, over

WORDS, SENTENCES, TOKENS = 16384, 16, 64  # vocabulary size; batch size; padded length of sources and targets
SIDE, PHOTOS = 512, 1  # side of the detector's canvas; batch size
PLAIN = dict(encoder="1000", decoder="1000", memory="1000", positions="sinusoid")


def translation_steps():
    """Returns {'ours', 'theirs'}: functions that run a training step of a Transformer and wait for the result."""
    rng = np.random.default_rng(0)
    source, target = (tf.constant(rng.integers(3, WORDS, [SENTENCES, TOKENS]), tf.int32) for _ in range(2))
    ours = build_model("transformer_base", WORDS, **PLAIN)
    dropout = dict(dropout_rate=0.1, norm_first=False)
    theirs = seq2seq_transformer.Seq2SeqTransformer(
        vocab_size=WORDS,
        dropout_rate=0.1,
        encoder_layer=seq2seq_transformer.TransformerEncoder(**dropout),
        decoder_layer=seq2seq_transformer.TransformerDecoder(**dropout),
    )

    def loss(logits):
        labels = tf.one_hot(target, WORDS, 0.9, 0.1 / WORDS)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32)))

    return {
        "ours": _step(ours, lambda: loss(ours({"source": source, "target": target}, training=True)[LOGITS])),
        "theirs": _step(theirs, lambda: loss(theirs({"inputs": source, "targets": target}, training=True))),
    }


def detection_steps():
    """Returns {'ours', 'theirs'}: functions that run a training step of Mask R-CNN on a sample photo and wait."""
    data = DetectionData("train2017", "val2017", (SIDE, SIDE), (SIDE, SIDE))
    # The official configuration trains every weight, and updates all moving statistics.
    free = ModelConfig("mask_rcnn_resnet_50", arguments=dict(frozen_stages=-1))
    task = DetectionTask(free, data, sample_data_dir())
    batch = next(iter(task.train_dataset(PHOTOS, seed=0)))
    model = task.build_model()
    other = _official_detector(task.num_classes)
    network = other.build_model()
    labels = {
        "rpn_score_targets": {level: batch[f"anchor_scores/{level}"] for level in map(str, LEVELS)},
        "rpn_box_targets": {level: batch[f"anchor_boxes/{level}"] for level in map(str, LEVELS)},
    }
    boxes = build_anchor_generator(
        min_level=LEVELS[0], max_level=LEVELS[-1], num_scales=1, aspect_ratios=RATIOS, anchor_size=ANCHOR_SIZE
    )((SIDE, SIDE))
    boxes = {level: tf.tile(places[None], [PHOTOS, 1, 1, 1]) for level, places in boxes.items()}

    def loss():
        outputs = network(
            batch["image"],
            image_shape=tf.cast(batch["valid_size"], tf.float32),
            anchor_boxes=boxes,
            gt_boxes=batch["boxes"],
            gt_classes=batch["classes"],
            gt_masks=batch["masks"],
            training=True,
        )
        return other.build_losses(outputs, labels)["total_loss"]

    return {"ours": _step(model, lambda: task.losses(model, batch)["total"]), "theirs": _step(network, loss)}


def _official_detector(classes):
    """Returns the official task with the pyramid levels, anchors and head sizes of axial's model."""
    config = official_config.maskrcnn_resnetfpn_coco().task
    config.model.num_classes, config.model.input_size = classes + 1, [SIDE, SIDE, 3]
    config.model.min_level, config.model.max_level = LEVELS[0], LEVELS[-1]
    config.model.anchor.anchor_size, config.model.anchor.aspect_ratios = ANCHOR_SIZE, list(RATIOS)
    config.model.detection_head.num_convs, config.model.detection_head.num_fcs = 0, 2
    return MaskRCNNTask(config)


def _step(model, loss_of):
    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of()
        gradients = tape.gradient(loss, model.trainable_variables)
        return [loss, *(tf.convert_to_tensor(g) for g in gradients if g is not None)]

    return lambda: float(step()[0])


def benchmark():
    """Returns (works, ratios) of axial's and the official network of each task; see `benchmark.benchmark`."""
    works, ratios = {}, {}
    for name, make in (("translation", translation_steps), ("detection", detection_steps)):
        steps = make()
        works[name] = measure(steps, steps.get, 7)
        ratios[f"{name}_speed_over_official"] = over(works, name, "theirs", "ours")
    return works, ratios
