"""The package's exceptions, and suggestions for misspelled names."""

import difflib


class InputError(ValueError):
    """Something that the user gave is wrong. The message names it and says what was expected.

    A command prints the message as one line and exits with 2.
    """

    _keras_call_info_injected = True  # so that Keras adds no lines to what a layer's call raises


def nearest(name, known):
    """' (did you mean ...?)' for the nearest of the `known` names, or '' if none is near."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


class Preempted(Exception):
    """Training was asked to stop and has saved a checkpoint. A command exits with 42."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is not finite. The message names the first such tensors."""
