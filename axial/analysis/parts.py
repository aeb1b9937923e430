"""Which part of a model a weight or an operation belongs to, by its name."""

import re

REST = "rest"  # what belongs to no part: pooling between parts, upsampling, losses, the optimizer

_PART = re.compile(
    r"(?:^|/)(stage\d|stem|entry|middle|exit|conv\d|\w+_decoder|\w+_head|(?:en|de)coder_\w+|logits)"
    r"(?:_block\d+|\d+)?(?=/|$)"
)


def part_of(name, attention=False):
    """The part that a name belongs to: 'stem', 'stage2', 'semantic_decoder', ..., or `REST`.

    Args:
        name: name of a weight or an operation, with its scopes.
        attention: whether attention layers are parts of their own, such as 'stage2 attention'.
    """
    found = _PART.search(name)
    if not found:
        return REST
    return f"{found[1]} attention" if attention and "/attention/" in name[found.end() :] else found[1]
