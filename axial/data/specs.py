"""What a data set calls its classes: one frozen `DatasetSpec` decides every count and colour."""

import colorsys
import dataclasses
import functools

import numpy as np

from axial.errors import InputError, nearest


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """The classes of a data set, in the order of the model's outputs.

    Attributes:
        name: of the data set.
        class_names: one each class.
        category_ids: the data set's own number of each class.
        things: for each class whether it is countable.
        label_divisor: a panoptic label is class x label_divisor + instance.
        ignore: the class index of pixels without a label.
    """

    name: str
    class_names: tuple
    category_ids: tuple
    things: tuple
    label_divisor: int = 1000
    ignore: int = 255

    def __post_init__(self):
        if not len(self.class_names) == len(self.category_ids) == len(self.things):
            raise InputError(f"spec {self.name!r}: one name, id and thing flag for each class")
        if len(set(self.category_ids)) < len(self.category_ids):
            raise InputError(f"spec {self.name!r}: category ids must differ from each other")
        if len(self.class_names) > self.ignore:
            raise InputError(f"spec {self.name!r}: at most {self.ignore} classes")

    @property
    def num_classes(self):
        return len(self.class_names)

    @property
    def void(self):
        """The panoptic label of pixels without one."""
        return self.ignore * self.label_divisor

    @functools.cached_property
    def thing_classes(self):
        return tuple(i for i, thing in enumerate(self.things) if thing)

    @functools.cached_property
    def class_of_category(self):
        return {category: i for i, category in enumerate(self.category_ids)}

    @functools.cached_property
    def colors(self):
        """uint8 [num_classes, 3]: hues a golden section apart, stuff paler than things."""
        rows = [
            colorsys.hsv_to_rgb(i * 0.618034 % 1, 0.85 if thing else 0.45, 0.95 if thing else 0.75)
            for i, thing in enumerate(self.things)
        ]
        return np.round(255 * np.array(rows)).astype(np.uint8)

    def to_json(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields):
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def _table(text):
    entries = [entry.strip().split(" ", 1) for entry in text.replace("\n", " ").split(", ")]
    return [(int(number), name) for number, name in entries]


_COCO_THINGS = _table(
    """1 person, 2 bicycle, 3 car, 4 motorcycle, 5 airplane, 6 bus, 7 train, 8 truck, 9 boat, 10 traffic
light, 11 fire hydrant, 13 stop sign, 14 parking meter, 15 bench, 16 bird, 17 cat, 18 dog, 19
horse, 20 sheep, 21 cow, 22 elephant, 23 bear, 24 zebra, 25 giraffe, 27 backpack, 28 umbrella, 31
handbag, 32 tie, 33 suitcase, 34 frisbee, 35 skis, 36 snowboard, 37 sports ball, 38 kite, 39
baseball bat, 40 baseball glove, 41 skateboard, 42 surfboard, 43 tennis racket, 44 bottle, 46 wine
glass, 47 cup, 48 fork, 49 knife, 50 spoon, 51 bowl, 52 banana, 53 apple, 54 sandwich, 55 orange,
56 broccoli, 57 carrot, 58 hot dog, 59 pizza, 60 donut, 61 cake, 62 chair, 63 couch, 64 potted
plant, 65 bed, 67 dining table, 70 toilet, 72 tv, 73 laptop, 74 mouse, 75 remote, 76 keyboard, 77
cell phone, 78 microwave, 79 oven, 80 toaster, 81 sink, 82 refrigerator, 84 book, 85 clock, 86
vase, 87 scissors, 88 teddy bear, 89 hair drier, 90 toothbrush"""
)
_COCO_STUFF = _table(
    """92 banner, 93 blanket, 95 bridge, 100 cardboard, 107 counter, 109 curtain, 112 door-stuff, 118
floor-wood, 119 flower, 122 fruit, 125 gravel, 128 house, 130 light, 133 mirror-stuff, 138 net,
141 pillow, 144 platform, 145 playingfield, 147 railroad, 148 river, 149 road, 151 roof, 154 sand,
155 sea, 156 shelf, 159 snow, 161 stairs, 166 tent, 168 towel, 171 wall-brick, 175 wall-stone, 176
wall-tile, 177 wall-wood, 178 water-other, 180 window-blind, 181 window-other, 184 tree-merged,
185 fence-merged, 186 ceiling-merged, 187 sky-other-merged, 188 cabinet-merged, 189 table-merged,
190 floor-other-merged, 191 pavement-merged, 192 mountain-merged, 193 grass-merged, 194
dirt-merged, 195 paper-merged, 196 food-other-merged, 197 building-other-merged, 198 rock-merged,
199 wall-other-merged, 200 rug-merged"""
)

COCO = DatasetSpec(
    name="coco",
    class_names=tuple(name for _, name in _COCO_THINGS + _COCO_STUFF),
    category_ids=tuple(number for number, _ in _COCO_THINGS + _COCO_STUFF),
    things=(True,) * len(_COCO_THINGS) + (False,) * len(_COCO_STUFF),
)

SPECS = {spec.name: spec for spec in (COCO,)}


def get_spec(name):
    """The published spec of that name, or InputError with the nearest."""
    if name not in SPECS:
        raise InputError(f"no data set is called {name!r}{nearest(name, SPECS)}: {', '.join(SPECS)}")
    return SPECS[name]
