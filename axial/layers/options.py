"""Conversion between frozen dataclasses of options and flat dicts.

Each family of layers has a dataclass of options. A model makes it once and passes it down to its layers. Recipes,
`build_model` and saved models name all options of a network in one flat dict. A nested dataclass contributes its own
fields to the dict. The dict stores the field `name` of a nested dataclass under the name of the outer field that holds
the dataclass.
"""

import dataclasses

from axial.io.check import convert_argument, hints_of


def _nested(field, value):
    """dict from the name of each field of a nested dataclass, the value of `field`, to its flat name."""
    return {each.name: field.name if each.name == "name" else each.name for each in dataclasses.fields(value)}


def flatten(options):
    """dict from the flat name of each option to its value.

    Examples:
        >>> from axial.models.axial_deeplab.axial_resnet import AxialResNetOptions
        >>> flatten(AxialResNetOptions(width=0.5))["heads"]
        8
    """
    flat = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            flat |= {_nested(field, value)[name]: inner for name, inner in flatten(value).items()}
        else:
            flat[field.name] = value
    return flat


def replace(options, flat):
    """A copy of the options with the values of a flat dict. Names that are no option are ignored.

    Raises:
        InputError: a value does not have the type or the range of its field.
    """
    changes, hints = {}, hints_of(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = replace(value, {k: flat[v] for k, v in _nested(field, value).items() if v in flat})
        elif field.name in flat:
            changes[field.name] = convert_argument(field.name, flat[field.name], hints[field.name])
    return dataclasses.replace(options, **changes)
