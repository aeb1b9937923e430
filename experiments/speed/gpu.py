"""Exports compiled steps for a machine with a GPU and jax alone, and with them run.py, which times and trains them.

%s --export=FOLDER --programs=pair_65x129,axial_deeplab_s_train_1
                        training steps and inferences, without --programs all of them
%s --export=FOLDER --quick
                        small ones, for a CPU
%s --export=FOLDER --gin_file=nuclei/axial_deeplab_nano.gin --data_dir=DATA
                        a recipe's training step and its batches, which run.py trains for any time

All compute in mixed_bfloat16. The name of a program says what it runs, whether it trains or infers, and on how many
images: axial_deeplab_s_train_1_block is a training step on one image that recomputes blocks. pair_65x129 is a training
step of a height and a width layer. A training step computes a plain loss and its gradients; no optimizer is part of it.
"""

import dataclasses
import functools

from axial import statements
from axial.cli import app, flags
from axial.cli.analyze import build_recipe
from axial.cli.flags import Flag, Flags
from axial.errors import InputError, check_installed, nearest
from axial.io.show import counted, say, working
from axial.io.write import make_folder


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


PROGRAMS = (  # the most important first
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
QUICK = (
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


class Export(Flags):
    export = Flag(str, "new folder for programs, which another machine runs.", path=flags.NEW_FOLDER, needed=True)
    programs = Flag(list, "names of programs, in place of all.", (), alone=("gin_file",))
    quick = Flag(bool, "small programs.", False, alone=("gin_file",))
    gin_file = flags.GIN_FILE.but(meaning="the recipe whose training step is exported.")
    gin_binding = flags.GIN_BINDING.but(needs="gin_file")
    data_dir = flags.DATA_DIR.but(needs="gin_file")
    batches = Flag(int, "of photos that are written for a training.", 64, least=1, most=2**16, needs="gin_file")


def _main(given):
    """Writes programs, run.py and programs.json to --export."""
    programs, folder = find_programs(given.programs, given.quick), given.export.rstrip("/")
    if given.gin_file:
        recipe = statements.read(given.gin_file, given.gin_binding)
        if not recipe.value(f"{recipe.task()}.data_dir"):
            given.need("data_dir")
    check_installed("--export wants", "analysis", "jax")

    import gpu_export
    from tpu_compile import alone

    tasks = [(program.name, gpu_export.write_program, (folder, program)) for program in programs]
    if given.gin_file:
        what = f"the training step of {' '.join(given.gin_file)}, {given.batches} batches"
        build = functools.partial(build_recipe, given.gin_file, given.gin_binding, given.data_dir)
        tasks = [(what, gpu_export.write_training, (folder, build, given.batches))]
    make_folder(folder)
    entries = []
    for i, (name, write, arguments) in enumerate(tasks):
        with working(f"{name}: {i + 1} of {len(tasks)}, lowering"):
            entries.append(entry := alone(write, *arguments))
        gpu_export.write_list(folder, entries)  # after each, as all of them take long
        calls = f", custom calls: {', '.join(entry['custom_calls'])}" if entry["custom_calls"] else ""
        size = f"{entry['bytes'] / 2**20:.2f} MiB"
        say(f"{entry['name']}: {counted(len(entry['inputs']), 'input')}, {size}{calls}")
    say(f"on a machine with a GPU and jax: python {folder}/{gpu_export.SCRIPT} --help")


if __name__ == "__main__":
    app.run({"": (Export, _main)})
