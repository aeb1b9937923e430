"""Measures the objects of a `Result`, and outlines them for other programs.

An object is an instance of a thing, or a detected object with a mask. Its pixels are those that have its 'label' in the
result's label image, so no pixel counts twice. An object that others cover completely has no pixels and is left out.
"""

import numpy as np
from scipy.ndimage import find_objects

from axial.errors import InputError
from axial.io.check import convert_pixel_size

NO_PIXELS = "the network finds no pixels of instances"
# Columns of the shapes, and properties of scikit-image from which they follow.
COLUMNS = (
    "area centre_x centre_y box_x box_y box_width box_height equivalent_diameter eccentricity perimeter solidity "
    "touches_edge"
).split()
_SHAPES = ("area", "centroid", "bbox", "equivalent_diameter_area", "eccentricity", "perimeter", "solidity")


def instances(result):
    """List of the dicts of the objects in `Result.segments`, in the order of their labels.

    Raises:
        InputError: the network predicts no instances, or no masks of them.
    """
    if result.labels is None:
        raise InputError(NO_PIXELS)
    visible = set(np.unique(result.labels).tolist())
    return [segment for segment in result.segments if segment.get("label") in visible]


def masks(result):
    """bool [N, h, w]: the pixels of each object. Raises InputError; see `instances`."""
    labels = np.array([one["label"] for one in instances(result)], result.labels.dtype)
    return result.labels == labels[:, None, None]


def columns(result, pixel_size=None):
    """The columns of `Result.table`: dict from their names to lists of N values. A mean of no value is None.

    Args:
        result: `Result`.
        pixel_size: see `convert_pixel_size`; None for lengths and areas in pixels only.

    Raises:
        InputError: `pixel_size` is not valid; see also `instances`.
    """
    from skimage.measure import regionprops_table

    side, unit = (0.0, "") if pixel_size is None else convert_pixel_size("pixel_size", pixel_size)
    objects, (height, width) = instances(result), result.labels.shape
    shapes = regionprops_table(result.labels, properties=_SHAPES).values()
    area, y, x, top, left, bottom, right, diameter, eccentricity, perimeter, solidity = shapes
    edge = (top == 0) | (left == 0) | (bottom == height) | (right == width)
    box, area = (left, top, right - left, bottom - top), area.astype(int)
    table = {"photo": [result.photo] * len(objects), "id": [one.get("id", one["label"]) for one in objects]}
    table |= {name: [one[name] for one in objects] for name in ("label", "class", "score")}
    table |= zip(COLUMNS, (area, x, y, *box, diameter, eccentricity, perimeter, solidity, edge))
    if unit:
        table[f"area_{unit}2"] = area * side**2
        table |= {f"equivalent_diameter_{unit}": diameter * side, f"perimeter_{unit}": perimeter * side}
    table |= _intensities(result.labels.ravel(), result.stored)
    plain = {name: np.asarray(values, object).tolist() for name, values in table.items()}
    return {name: [None if x != x else x for x in values] for name, values in plain.items()}  # NaN differs from itself


def _intensities(labels, stored):
    """dict of the columns of each channel: the mean and sum of the finite values of each label in `labels`, [h * w]."""
    table, numbers = {}, np.unique(labels[labels > 0])
    for number in range(stored.shape[2]):
        values = stored[..., number].ravel()
        finite = np.isfinite(values)
        count, total = (np.bincount(labels[finite], x, 2**16)[numbers] for x in (None, values[finite]))
        table[f"mean_{number + 1}"] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        table[f"sum_{number + 1}"] = total if values.dtype.kind == "f" else total.astype(int)
    return table


# === Other programs ===


def geojson(result):
    """The objects as a GeoJSON FeatureCollection (RFC 7946), for QuPath 0.4 or later.

    Coordinates are in pixels, from the upper left corner of the photo. Objects are QuPath's detections, which it shows
    by the million. Its annotations are regions that users draw.

    Raises:
        InputError: see `instances`.
    """
    objects, boxes, features = instances(result), find_objects(result.labels), []
    for one in objects:
        box, index = boxes[one["label"] - 1], result.spec.class_of_category[one["category_id"]]
        mask = result.labels[box] == one["label"]
        properties = {
            "objectType": "detection",
            "classification": {"name": one["class"], "color": result.spec.colors[index].tolist()},
            "measurements": {"label": one["label"], "score": one["score"], "area": int(mask.sum())},
        }
        geometry = outline(mask, box[1].start, box[0].start)
        features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    return {"type": "FeatureCollection", "features": features}


def outline(mask, left=0, top=0):
    """The GeoJSON geometry of a mask along the edges of its pixels: a Polygon, or a MultiPolygon if it has parts.

    Pixels that touch at a corner only are separate parts.

    Args:
        mask: bool [h, w] with a pixel.
        left, top: position of the mask's upper left corner.
    """
    import shapely
    from shapely.geometry.polygon import orient

    edges = np.diff(np.pad(mask.astype(np.int8), [(0, 0), (1, 1)]), axis=1)
    (rows, starts), (_, ends) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    runs = shapely.box(starts + left, rows + top, ends + left, rows + top + 1)
    # A normalised ring starts at a corner. Without a tolerance, only points at which it goes straight on are left out.
    polygons = map(orient, shapely.get_parts(shapely.normalize(shapely.union_all(runs)).simplify(0)))
    rings_of_parts = [(polygon.exterior, *polygon.interiors) for polygon in polygons]
    parts = [[np.array(ring.coords, int).tolist() for ring in rings] for rings in rings_of_parts]
    if len(parts) == 1:
        return {"type": "Polygon", "coordinates": parts[0]}
    return {"type": "MultiPolygon", "coordinates": parts}


def detections(result):
    """The `supervision.Detections` of the objects. Raises InputError: supervision is missing; see also `instances`."""
    objects = instances(result)
    try:
        import supervision
    except ImportError:
        raise InputError("detections are objects of a package that is missing: pip install supervision") from None
    x, y, width, height = np.array([one["box"] for one in objects], np.float32).reshape(-1, 4).T
    return supervision.Detections(
        xyxy=np.stack([x, y, x + width, y + height], 1),
        mask=masks(result),
        confidence=np.array([one["score"] for one in objects], np.float32),
        class_id=np.array([result.spec.class_of_category[one["category_id"]] for one in objects], int),
        data={"class_name": np.array([one["class"] for one in objects], str)},
    )
