"""The verb ops of axial-analyze: what a training step needs and TensorFlow has no TPU kernel for."""

import os
import sys

from absl import flags

from axial.cli import analyze_tpu, app
from axial.cli.analyze_speed import recipe
from axial.cli.checks import check_recipe
from axial.io.show import counted, say, working

FLAGS = flags.FLAGS
REPLICAS = 8  # of the step of a recipe that is not published


def check_ops():
    """Raises InputError for flags that do not go together."""
    app.refuse_without("all", ("only",))
    app.refuse_beside("all", analyze_tpu.OF_RECIPE)


def run_ops(_):
    if not FLAGS.all:
        check_recipe()
    os.environ.setdefault("TPU_LOAD_LIBRARY", "0")  # the list of kernels needs no chip, and a training may hold them
    from axial.tpu_compiler import compile as tpu_compile
    from axial.tpu_compiler import operations as tpu_ops
    from axial.tpu_compiler import table as tpu_table

    tpu_ops.registered()  # refuses another installation before the slow tracing
    if not FLAGS.all:
        _, training, _ = recipe()
        with working(f"{' '.join(FLAGS.gin_file)}: tracing a training step"):
            found = _operations(recipe, max(training.batch // REPLICAS, 1), REPLICAS)
        steps = [_print(" ".join(FLAGS.gin_file), found)]
    else:
        from axial.recipes import experiments_dir

        steps = []
        for leaf in analyze_tpu.named(tpu_table.leaves(experiments_dir()), FLAGS.only):
            for form in tpu_table.FORMS:
                with working(f"{leaf}, {form}: tracing a training step"):
                    found = tpu_compile.alone(operations_of, leaf, form)
                steps.append(_print(f"{leaf}, {form}", found))
                if not found.pallas:
                    break  # without kernels it is the same step
    lacking = len([found for found in steps if found.missing])
    whole = "every operation has a TPU kernel" if not lacking else f"{lacking} with operations without a TPU kernel"
    say(f"training steps: {len(steps)}; {whole}")
    sys.exit(1 if lacking else 0)


def _print(name, found):
    kinds = f"{found.count} operations of {found.kinds} kinds"
    say(f"{name}: {kinds}, {found.pallas} calls of Pallas kernels")
    for kind, nodes in found.missing.items():
        say(f"  no TPU kernel: {kind}, {counted(len(nodes), 'time')}, the first in {nodes[0]}")
    return found


def operations_of(leaf, form):
    """The `tpu_ops.Operations` of a training step of a published recipe."""
    from axial.tpu_compiler import table as tpu_table

    replicas = tpu_table.cores(leaf)
    with analyze_tpu.recipe_of(leaf, form) as build:
        return _operations(build, max(build()[1].batch // replicas, 1), replicas)


def _operations(build, batch, replicas):
    from axial.tpu_compiler import operations as tpu_ops
    from axial.tpu_compiler.compile import DEFAULT_SLICE

    step = analyze_tpu.training_step(build, batch, replicas, DEFAULT_SLICE)
    return tpu_ops.check(tpu_ops.trace(*step), tpu_ops.registered())
