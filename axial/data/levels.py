"""How values of more than 8 bits become levels from 0 to 255."""

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
    """A `io.images.Photo` as an image of RGB of 8 bits, without transparency. Deeper values become 8 by `levels`.

    See `eight_bits`.
    """
    image = photo.image if photo.deep is None else Image.fromarray(eight_bits(photo.deep, levels))
    # Pillow has no other way from La to RGB.
    return (image.convert("LA") if image.mode == "La" else image).convert("RGB")


def eight_bits(values, levels, band=2**20):
    """Numbers of more than 8 bits as levels from 0 to 255: uint8, of the shape of `values`. NaN becomes 0.

    Args:
        values: integers or floats of a photo, [h, w] or [h, w, 3].
        levels: of `LEVELS`. With 'percentiles', a linear function takes a low percentile of the n finite values to 0
            and a high one to 255: those that sqrt(n) / 4 values lie beyond. This is 0.1 % of 256x256 pixels, as in
            QuPath's automatic contrast (its preference autoBrightnessContrastSaturationPercentage), and 0.012 % of
            2048x2048, where a nucleus has no more pixels. ImageJ saturates 0.35 %, StarDist takes the 1st and the
            99.8th, Cellpose the 1st and the 99th, which leave few nuclei of a large photo among the noise. One hot
            pixel has no say in a photo of any size. Where both percentiles are one number, as on a constant ground, the
            extremes take their places. A constant photo becomes black. Noise alone is not stretched to bright and dark
            spots, of which the model `nuclei` counts dozens: the range is at least `NOISE` times the median difference
            of neighbours in a row, in as many rows as have about `NOISE_VALUES` values. With 'depth', which older
            versions of axial have, integers are divided by one of `DEEP_DIVISORS`, and floats up to 1 are shares of
            255. Cameras have 8, 10, 12, 14 or 16 bits, and files of 16 bits seldom say which: the depth is the least of
            these that the largest value fits. Then a photo of 12 bits in a file of 16 is not nearly black, and one
            whose values fill 16 bits gives its upper bytes.
        band: how many numbers are converted at a time, as they take more memory in float64.
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
    """The low and the high percentile of numbers, or their extremes where these are the same; see `eight_bits`.

    The numbers change their order.
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
    """The median difference of neighbouring values in rows, 0 where there are none."""
    with np.errstate(invalid="ignore"):
        found = np.abs(np.diff(rows.astype(np.float64), axis=1))
    found = found[np.isfinite(found)]
    return np.partition(found, found.size // 2)[found.size // 2] if found.size else 0.0
