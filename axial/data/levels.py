"""Scales pixel values of more than 8 bits to levels from 0 to 255."""

import math

import numpy as np
from PIL import Image

PERCENTILES, DEPTH = "percentiles", "depth"
LEVELS = {
    PERCENTILES: "of its n values the sqrt(n) / 4 darkest become 0 and the sqrt(n) / 4 brightest 255, or less in noise",
    DEPTH: "its values are divided by 1, 4, 16, 64 or 256, as its largest value tells",
}
NOISE, NOISE_VALUES = 20, 2**22  # see `eight_bits`
DEEP_DIVISORS = (1, 4, 16, 64, 256)  # see `eight_bits`


def rgb(photo, levels=PERCENTILES):
    """Converts an `io.images.Photo` to an 8-bit RGB image of Pillow, without transparency.

    The rule `levels` scales values of more than 8 bits; see `eight_bits`.
    """
    image = photo.image if photo.deep is None else Image.fromarray(eight_bits(photo.deep, levels))
    # Pillow converts La to RGB only by way of LA.
    return (image.convert("LA") if image.mode == "La" else image).convert("RGB")


def eight_bits(values, levels, band=2**20):
    """Scales values of more than 8 bits to uint8 of the same shape. NaN becomes 0.

    The rule 'percentiles' maps a low percentile of the n finite values to 0 and a high one to 255, and is linear
    between them. sqrt(n) / 4 values are below the low percentile, and as many above the high one. This number is 0.1 %
    of 256x256 pixels, as in QuPath's automatic contrast (its preference autoBrightnessContrastSaturationPercentage),
    and 0.012 % of 2048x2048 pixels, because a nucleus has no more pixels in a larger photo. A high percentile that does
    not depend on n lies in the noise of a large photo with few nuclei: ImageJ saturates 0.35 %, StarDist takes the 1st
    and the 99.8th, Cellpose the 1st and the 99th. A single hot pixel is never a percentile. If both percentiles are
    equal, as on a constant background, the least and the largest value replace them. A constant photo becomes black.
    The range between the two percentiles is widened to at least `NOISE` times the median difference of neighbours in a
    row, over rows with about `NOISE_VALUES` values. Otherwise pure noise would be stretched to bright and dark spots,
    which the model `nuclei` counts by the dozen.

    The rule 'depth', of older versions of axial, divides integers by one of `DEEP_DIVISORS` and multiplies floats up to
    1 by 255. Cameras have 8, 10, 12, 14 or 16 bits, and 16-bit files seldom say which: the rule assumes the least depth
    that holds the largest value. So a 12-bit photo in a 16-bit file does not become nearly black, and a photo that
    fills 16 bits keeps the upper byte of each value.

    Args:
        values: integers or floats of a photo, [h, w] or [h, w, 3].
        levels: the rule, a key of `LEVELS`.
        band: number of values that are converted at a time, because float64 takes more memory.
    """
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)]
    largest = np.max(finite, initial=0)
    divisor = next((divisor for divisor in DEEP_DIVISORS if largest < 256 * divisor), DEEP_DIVISORS[-1])
    low, high, half = 0.0, 255.0 * divisor, 0.0
    if flat.dtype.kind == "f" and largest <= 1:
        high, half = 1.0, 0.5
    extent = high
    if levels == PERCENTILES:
        (low, high), half = _percentiles(finite), 0.5
        extent = max(high - low, NOISE * _difference(values[:: max(1, values.size // NOISE_VALUES)])) or 1
    found = np.empty(flat.shape, np.uint8)
    for start in range(0, flat.size, band):
        part = np.nan_to_num(flat[start : start + band].astype(np.float64), nan=low).clip(low, high)
        found[start : start + band] = (part - low) * 255 / extent + half
    return found.reshape(values.shape)


def _percentiles(values):
    """The low and the high percentile of `values` [n], or the least and largest value if both are equal.

    See `eight_bits`. Reorders `values` in place.
    """
    if not values.size:
        return 0.0, 0.0
    last = values.size - 1
    rank = min(math.isqrt(values.size) // 4 + 1, last // 2)
    places = [0, rank, last - rank, last]
    values.partition(places)
    first, low, high, final = map(float, values[places])
    return (low, high) if low < high else (first, final)


def _difference(rows):
    """Median absolute difference of neighbouring values in the rows; 0 if there are no neighbours."""
    with np.errstate(invalid="ignore"):
        found = np.abs(np.diff(rows.astype(np.float64), axis=1))
    found = found[np.isfinite(found)]
    return np.partition(found, found.size // 2)[found.size // 2] if found.size else 0.0
