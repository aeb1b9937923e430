"""Looks into models without training them.

%s models               every registered model with its parameters
%s model NAME           parameters of each part of one model
"""

import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_integer("classes", 19, "classes of the semantic head; the paper counts Cityscapes' 19.")


def _main(arguments):
    from axial.errors import InputError, nearest

    if arguments == ["models"]:
        return _models()
    if len(arguments) == 2 and arguments[0] == "model":
        return _model(arguments[1])
    if arguments[:1] == ["model"]:
        raise InputError("model takes one name; see axial-analyze models")
    known = nearest(arguments[0], ("models", "model")) if arguments else ""
    raise InputError(f"give 'models' or 'model NAME'{known}")


def _count(name):
    from axial.analysis.counts import abstract_model, count_parameters

    return count_parameters(abstract_model(name, FLAGS.classes))


def _models():
    from rich.console import Console
    from rich.table import Table

    from axial.models.registry import VARIANTS

    table = Table("model", "parameters", "attention batch norms")
    for name in VARIANTS:
        counts = _count(name)
        table.add_row(name, f"{counts.counted / 1e6:.3f} M", f"{counts.attention_norms / 1e6:.3f} M")
    Console().print(table)


def _model(name):
    from rich.console import Console
    from rich.table import Table

    counts = _count(name)
    table = Table("part", "parameters")
    for part, number in counts.parts.items():
        table.add_row(part, f"{number:,}")
    table.add_section()
    table.add_row("all", f"{counts.counted:,}")
    table.add_row("attention batch norms, apart", f"{counts.attention_norms:,}")
    Console().print(table)


def main():
    app.run(_main, sys.modules[__name__])
