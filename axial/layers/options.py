"""Options: a frozen dataclass for each family of layers, made once and handed down whole.

A recipe, `build_model` and a file of a model name all options of a network in one flat dict. These functions lead from
such a dict to the dataclasses and back. A field that is itself a dataclass stands in the flat dict by its own fields;
a field `name` of it stands there by the name of the field that holds it.
"""

import dataclasses

from axial.io.check import convert_argument, hints_of


def _nested(field, value):
    """The flat names of the fields of a nested dataclass, as a dict from its own names."""
    return {each.name: field.name if each.name == "name" else each.name for each in dataclasses.fields(value)}


def flatten(options):
    """dict of all options by their flat names.

    Example:
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
    """The options with those that a flat dict names replaced. Names of other options are left alone.

    Raises:
        InputError: a value has not the type or range of its field.
    """
    changes, hints = {}, hints_of(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = replace(value, {k: flat[v] for k, v in _nested(field, value).items() if v in flat})
        elif field.name in flat:
            changes[field.name] = convert_argument(field.name, flat[field.name], hints[field.name])
    return dataclasses.replace(options, **changes)
