"""The programs that a GPU is measured by, in the order of their importance. All compute in mixed_bfloat16.

The name of a program says what it runs, whether it trains or infers, and on how many images:
axial_deeplab_s_train_1_block is a training step on one image that recomputes blocks. pair_65x129 is a training step of
a height and a width layer. A training step computes a plain loss and its gradients; no optimizer is part of it.
"""

import dataclasses

from axial.errors import InputError, nearest


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step or an inference.

    Attributes:
        model: name in the registry; '' for a height and a width layer.
        images: (batch, height, width, channels) of its input.
        training: whether it computes gradients, of all weights and, of layers, of their input.
        recompute: see `ModelConfig`.
    """

    model: str
    images: tuple
    training: bool = True
    recompute: str = "none"

    @property
    def name(self):
        batch, height, width, _ = self.images
        if not self.model:
            return f"pair_{height}x{width}"
        words = [self.model, "train" if self.training else "infer", str(batch)]
        return "_".join(words + ([self.recompute] if self.recompute != "none" else []))


def _models(model, side, batches, training=True, recompute=("none",)):
    return [Program(model, (batch, side, side, 3), training, how) for batch in batches for how in recompute]


PROGRAMS = (
    Program("", (4, 65, 129, 512)),  # stage 4 of Axial-DeepLab-L at 1025x2049
    Program("", (128, 56, 56, 128)),  # stage 2 of Axial-ResNet-L at 224x224
    *_models("axial_deeplab_s", 1025, [1]),
    *_models("axial_deeplab_s", 1025, [1], training=False),
    *_models("axial_resnet_l", 224, [32]),
    *_models("axial_resnet_l", 224, [1, 128], training=False),
    *_models("resnet_101", 224, [32]),
    *_models("resnet_101", 224, [1, 128], training=False),
    *_models("axial_deeplab_s", 1025, [1], recompute=("softmax", "block")),
    *_models("axial_resnet_l", 224, [64, 128]),
    *_models("resnet_101", 224, [64, 128]),
    *_models("axial_deeplab_l", 1025, [1], recompute=("none", "softmax", "block")),
    *_models("axial_deeplab_l", 1025, [1], training=False),
)
QUICK = (  # small ones, which a CPU compiles too
    Program("", (2, 9, 17, 32)),
    *_models("axial_resnet_nano", 33, [2], training=False),
    *_models("axial_resnet_nano", 33, [2], recompute=("none", "block")),
    *_models("axial_deeplab_nano", 65, [1], training=False),
)


def find_programs(names=(), quick=False):
    """The `Program`s with some names, in their own order; all without names. Raises InputError for unknown names."""
    known = {program.name: program for program in (QUICK if quick else PROGRAMS)}
    for name in names:
        if name not in known:
            raise InputError(f"--programs={name}: no such program{nearest(name, known)}: {', '.join(known)}")
    return [program for name, program in known.items() if not names or name in names]
