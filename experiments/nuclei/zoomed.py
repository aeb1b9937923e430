"""Resizes the photos and labels of a split in the layout of `axial-convert folder`, to change the magnification.

    python experiments/nuclei/zoomed.py NUCLEI/test ZOOMED/test 2

Photos are interpolated bilinearly, with antialiasing. Labels are resized by nearest neighbour.
"""

import pathlib
import sys

from PIL import Image

FILTERS = {"photos": Image.Resampling.BILINEAR, "semantic": Image.Resampling.NEAREST}
FILTERS["instance"] = FILTERS["panoptic"] = FILTERS["semantic"]


def main(source, target, zoom):
    for path in sorted(pathlib.Path(source).glob("*/*")):
        if path.parent.name in FILTERS:
            image = Image.open(path)
            size = [max(round(side * float(zoom)), 1) for side in image.size]
            output = pathlib.Path(target, path.parent.name, path.name)
            output.parent.mkdir(parents=True, exist_ok=True)
            image.resize(size, FILTERS[path.parent.name]).save(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
