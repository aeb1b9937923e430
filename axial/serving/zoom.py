"""Predicts photos of another magnification: scales each photo so that its objects get the training objects' size.

The zoom of a photo is the factor that scales its height and width. The model then applies its own scale too.
"""

import math

import numpy as np
from PIL import Image

from axial.data.objects import diameters
from axial.data.preprocess import LEAST_TILE, full_size
from axial.errors import InputError
from axial.io.check import AUTO, convert_diameter
from axial.io.images import LARGEST_PIXELS

# `AUTO` first tries the zoom FIRST, which leaves a 16th of the pixels. It tries at most TRIES zooms of LEAST to MOST.
FIRST, LEAST, MOST, TRIES = 0.25, 0.125, 2.0, 5
NEAR = 1.25  # two zooms with a smaller ratio count as equal, as the scales of training crops vary more
MOST_PIXELS = 2**24  # largest size of a scaled photo that `AUTO` tries


class Zoomed:
    """A predictor for photos whose objects differ in size, in pixels, from the training's objects.

    Args:
        predictor: `Predictor`.
        diameter: median diameter of the photos' objects in pixels, or `AUTO` to search each photo's zoom by predictions
            at several zooms.

    Raises:
        InputError: the diameter is not valid, or the model does not store the size of its training's objects.
    """

    def __init__(self, predictor, diameter):
        self._diameter = convert_diameter("diameter", diameter)
        self.spec, self.evaluator, self.objects = predictor.spec, predictor.evaluator, predictor.objects
        self._predictor = predictor
        if not self.objects:
            raise InputError(
                f"diameter={diameter}: the model does {self.evaluator.name} and does not tell the size of its "
                "training's objects, as it has no objects.json; if it scales all photos by one factor, run the "
                "axial-train command of its run again, and export it again"
            )

    def __call__(self, image):
        """The prediction of a photo, uint8 [h, w, 3], at the photo's own size, with its zoom as 'zoom'.

        Raises:
            InputError: the scaled photo has no pixel or too many pixels.
        """
        if self._diameter == AUTO:
            return self._searched(image)
        return self._at(image, self.objects.diameter[1] / self._diameter)[0]

    def _searched(self, image):
        """The prediction whose objects' median diameter is nearest to the training's.

        The size of the objects at one zoom gives the next zoom. If there are no objects, the next zoom is twice as
        large. The first zoom is small, because a network may cut an object that is larger than the training's objects
        into pieces as large as the training's objects.
        """
        size, target, tries = image.shape[:2], self.objects.diameter[1], []
        least = min(1.0, max(LEAST, LEAST_TILE / min(size)))
        most = max(least, min(MOST, math.sqrt(MOST_PIXELS / math.prod(size))))
        zoom = max(FIRST, least)
        for _ in range(TRIES):
            prediction, width = self._at(image, zoom)
            tries.append((abs(math.log(width / target)) if width else math.inf, prediction))
            next_zoom = min(max(zoom * target / width if width else 2 * zoom, least), most)
            if max(next_zoom / zoom, zoom / next_zoom) < NEAR:
                break
            zoom = next_zoom
        return min(tries, key=lambda attempt: attempt[0])[1]

    def predictions(self, examples):
        """Iterator of (example, prediction) for evaluation examples."""
        return ((example, self(np.asarray(self.evaluator.given(example)))) for example in examples)

    def _at(self, image, zoom):
        """(prediction at the photo's own size, median object diameter in the scaled photo or None without objects)."""
        size = image.shape[:2]
        scaled = tuple(round(side * zoom) for side in size)
        if not 0 < math.prod(scaled) <= LARGEST_PIXELS:
            raise InputError(
                f"{size[1]}x{size[0]} pixels become {scaled[1]}x{scaled[0]} at the zoom {zoom:.3g}; expected 1 to "
                f"{LARGEST_PIXELS}"
            )
        image = image if scaled == size else Image.fromarray(image).resize(scaled[::-1], Image.Resampling.BILINEAR)
        prediction = self._predictor(np.asarray(image))
        labels, areas = np.unique(prediction["panoptic"], return_counts=True)
        areas = areas[np.isin(labels // self.spec.label_divisor, self.spec.thing_classes)]
        full = {name: np.asarray(value) for name, value in full_size(prediction, scaled, size).items()}
        return {**full, "zoom": round(zoom, 4)}, float(np.median(diameters(areas))) if len(areas) else None
