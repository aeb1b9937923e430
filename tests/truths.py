"""Predictions made from the ground truth of examples. They are perfect, or wrong on purpose."""

import numpy as np

from axial.data.specs import COCO
from axial.tasks.segmentation.input_pipeline import segment_map


def truth_as_prediction(example):
    """The prediction of a perfect network for an example. Crowds and void pixels are void in the panoptic map."""
    segments = segment_map(example).numpy()
    classes, crowd = example["segment/class"].numpy(), example["segment/crowd"].numpy()
    panoptic = np.full(segments.shape, COCO.void)
    instance = np.zeros(segments.shape, np.int32)
    semantic = np.zeros(segments.shape, np.int32)
    for i, category in enumerate(classes):
        mask = segments == i + 1
        semantic[mask] = category
        if not crowd[i]:
            thing = COCO.things[category]
            panoptic[mask] = category * COCO.label_divisor + (i + 1 if thing else 0)
            instance[mask] = i + 1 if thing else 0
    score = np.linspace(0.5, 1, len(classes))
    return {"panoptic": panoptic, "semantic": semantic, "instance": instance, "score": score}


def perfect(examples):
    for example in examples:
        yield example, truth_as_prediction(example)


def shifted(examples):
    """Yields (example, prediction) with every map of a perfect prediction shifted nine pixels to the right."""
    for example, prediction in perfect(examples):
        yield example, {k: np.roll(v, 9, 1) if v.ndim == 2 else v for k, v in prediction.items()}
