"""Maps the name of a weight or an op to a part of the model."""

import re

REST = "rest"  # the part of all other weights and ops

_PART = re.compile(
    r"(?:^|/)(stage\d|stem|entry|middle|exit|conv\d|\w+_decoder|\w+_head|(?:en|de)coder_\w+|logits"
    r"|\w+_loss|postprocess|resize|optimizer|metrics|gradient_sum)(?:_block\d+|\d+)?(?=/|$)"
)


def part_of(name):
    """The part that a weight or an op belongs to, by its name with its scopes: 'stem', 'stage2', ..., or `REST`."""
    match = _PART.search(name)
    return match[1] if match else REST
