"""The verb compile of axial-analyze: how long training steps take to trace and to compile."""

from absl import flags

from axial.chips import replicas_of
from axial.cli import analyze_tpu, app
from axial.cli.checks import check_page
from axial.io.show import say, working

FLAGS = flags.FLAGS


def check_compile():
    """Raises InputError for a slice of several devices, or none, and a --markdown without room for the table."""
    from axial.errors import InputError

    check_page("compile")()
    if replicas_of(FLAGS.slice) != 1:
        raise InputError(f"--slice={FLAGS.slice}: expected one device, like v5e:1x1")


def run_compile(_):
    from axial.errors import check_installed
    from axial.io.write import write_block
    from axial.recipes import experiments_dir
    from axial.tpu_compiler import compile as tpu_compile
    from axial.tpu_compiler import seconds
    from axial.tpu_compiler import table as tpu_table

    path, compilers = app.flag("csv"), (tpu_compile.CPU, FLAGS.slice)
    leaves = analyze_tpu.named(tpu_table.leaves(experiments_dir()), FLAGS.only)
    keys = [(leaf, compiler) for leaf in leaves for compiler in compilers]
    if not set(keys) <= seconds.read(path).keys():
        check_installed("axial-analyze compile wants", "analysis", "jax", "libtpu")

    def measured(*key):
        with working(" ".join(key)):
            return seconds.measure(lowered, *key)

    rows = seconds.complete(path, keys, measured)
    table = seconds.markdown(rows)
    say(*table.splitlines())
    if FLAGS.markdown:
        write_block(FLAGS.markdown, "compile", table)


def lowered(leaf, compiler):
    """`seconds.lower` of a recipe's step."""
    from axial.tpu_compiler import seconds
    from axial.tpu_compiler import table as tpu_table

    app.silence_xla()
    with analyze_tpu.recipe_of(leaf, "recipe") as build:
        batch = max(build()[1].batch // tpu_table.cores(leaf), 1)
        return seconds.lower(*analyze_tpu.training_step(build, batch, 1, compiler), compiler, batch)
