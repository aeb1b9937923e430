"""Which part of a model a weight or an operation belongs to, by its name."""

import re

REST = "rest"  # what belongs to no part

_PART = re.compile(
    r"(?:^|/)(stage\d|stem|entry|middle|exit|conv\d|\w+_decoder|\w+_head|(?:en|de)coder_\w+|logits"
    r"|\w+_loss|postprocess|resize|optimizer|metrics|gradient_sum)(?:_block\d+|\d+)?(?=/|$)"
)
_SUB = re.compile(r"/(attention|resize|hardest_pixels)(?=/)")


def part_of(name, sub=False):
    """The part that a name belongs to: 'stem', 'stage2', 'semantic_decoder', ..., or `REST`.

    Args:
        name: name of a weight or an operation, with its scopes.
        sub: whether attention, resizing and the choice of the hardest pixels are parts of their own, such as
            'stage2 attention'.
    """
    match = _PART.search(name)
    if not match:
        return REST
    inner = _SUB.search(name, match.end()) if sub else None
    return f"{match[1]} {inner[1]}" if inner else match[1]
