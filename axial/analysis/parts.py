"""Maps the name of a weight or an op to a part of the model."""

import re

REST = "rest"  # the part of all other weights and ops

_PART = re.compile(
    r"(?:^|/)(stage\d|stem|entry|middle|exit|conv\d|\w+_decoder|\w+_head|(?:en|de)coder_\w+|logits"
    r"|\w+_loss|postprocess|resize|optimizer|metrics|gradient_sum)(?:_block\d+|\d+)?(?=/|$)"
)
_SUB = re.compile(r"/(attention|resize|hardest_pixels)(?=/)")


def part_of(name, sub=False):
    """The part that a name belongs to: 'stem', 'stage2', 'semantic_decoder', ..., or `REST`.

    Args:
        name: name of a weight or an op, with its scopes.
        sub: whether attention, resizing and the choice of the hardest pixels are separate parts, such as 'stage2
            attention'.
    """
    match = _PART.search(name)
    if not match:
        return REST
    inner = _SUB.search(name, match.end()) if sub else None
    return f"{match[1]} {inner[1]}" if inner else match[1]
