"""Looks into models without training them.

%s models               every registered model with its parameters
%s model NAME           output, span, heads, parameters, multiply-adds and activations of its parts
%s model NAME --diff=OTHER --batch=1 --height=1024 --width=2048
%s tables               the paper's tables beside what our models count to, in some minutes
%s tables --json=F --markdown=F --figure=F.png
%s curves RUN RUN --figure=F.png    losses and scores of training runs side by side
%s benchmark --json=F   our form against the textbook's and ResNet-101, on this machine
%s scaling --figure=F   time and memory of attention over image size and span
%s input                images a second of each stage of the input pipeline
%s tpu --gin_file=coco/axial_deeplab_s.gin --slice=v5e:4x4
                        memory and estimated cycles of a recipe's step, by the TPU's own compiler
%s tpu --layer=258x65   of a training step of one layer, rows x length, beside the textbook's form
"""

import os
import sys

from absl import flags

from axial.cli import app

FLAGS = flags.FLAGS

flags.DEFINE_integer(
    "classes", None, "model, models: classes; by default Cityscapes' 19 or ImageNet's 1000.", lower_bound=1
)
flags.DEFINE_string("diff", None, "model: another model to compare with.")
flags.DEFINE_integer("height", None, "model: of the image; by default 1024, or 224 for a classifier.")
flags.DEFINE_integer("width", None, "model: of the image; by default 2048, or 224 for a classifier.")
flags.DEFINE_string("markdown", None, "tables: new file for a table, or one that holds the table's two comments.")
if __name__ != "__main__":
    flags.DEFINE_integer(
        "batch", None, "model: images, by default 1; tpu: of a device, by default all that fit.", lower_bound=1
    )
    flags.DEFINE_string("json", None, "tables, benchmark, scaling, input: file for every number, in plain units.")
    flags.DEFINE_string("figure", None, "tables: accuracy over size; curves; scaling: time and memory; .png or .jpg.")
    flags.DEFINE_bool("quick", False, "benchmark, scaling, input: fewer works and rounds.")
    flags.DEFINE_multi_string("gin_file", ["sample/overfit.gin"], "tpu, input: the recipe.")
    flags.DEFINE_multi_string("gin_binding", [], "tpu, input: gin bindings over the recipe.")
    flags.DEFINE_string("data_dir", None, "tpu, input: what axial-convert wrote; the sample photos by default.")
    flags.DEFINE_string("slice", "v5e:1x1", "tpu: the slice, like v5e:4x4.")
    flags.DEFINE_string("layer", None, "tpu: rows x length of one layer, in place of a recipe, like 258x65.")
    flags.DEFINE_enum("mode", "train", ["train", "serve"], "tpu: the step that is compiled.")


def _main(arguments):
    from axial.cli import analyze_speed
    from axial.errors import InputError, nearest

    verbs = {
        "models": _models,
        "tables": _tables,
        "benchmark": analyze_speed.run_benchmark,
        "scaling": analyze_speed.run_scaling,
        "input": analyze_speed.run_input,
        "tpu": analyze_speed.run_tpu_layer if FLAGS.layer else analyze_speed.run_tpu,
    }
    if len(arguments) == 1 and arguments[0] in verbs:
        return verbs[arguments[0]]()
    if arguments[:1] == ["curves"]:
        return _curves(arguments[1:])
    if len(arguments) == 2 and arguments[0] == "model":
        return _diff(arguments[1], FLAGS.diff) if FLAGS.diff else _model(arguments[1])
    if arguments[:1] == ["model"]:
        raise InputError("model takes one name; see axial-analyze models")
    known = nearest(arguments[0], ("model", "curves", *verbs)) if arguments else ""
    raise InputError(f"give 'model NAME', 'curves RUN ...' or one of {', '.join(verbs)}{known}")


def _progress(total):
    """A bar on standard error and the function that moves it."""
    from tqdm import tqdm

    bar = tqdm(total=total, unit="model", file=sys.stderr)

    def step(done, of, name):
        bar.total = of
        bar.set_postfix_str(name, refresh=False)
        bar.update(done - bar.n)

    return bar, step


def _console():
    from rich.console import Console

    # Piped into a file, a table keeps its columns.
    return Console(width=None if sys.stdout.isatty() else 200)


def _models():
    from rich.table import Table

    from axial.analysis.tables import count_models
    from axial.models.registry import VARIANTS

    bar, step = _progress(len(VARIANTS))
    counts = count_models([(name, (65, 65), FLAGS.classes) for name in VARIANTS], step)
    bar.close()
    table = Table("model", "parameters", "attention batch norms")
    for name in VARIANTS:
        counted, norms, _ = counts[name, (65, 65), FLAGS.classes]
        table.add_row(name, f"{counted / 1e6:.3f} M", f"{norms / 1e6:.3f} M")
    _console().print(table)


def _stages(name):
    from axial.analysis.stages import stages
    from axial.models.registry import published_classes

    classes = published_classes(name)
    height, width = (224, 224) if classes == 1000 else (1024, 2048)
    return stages(
        name,
        FLAGS.classes or classes,
        FLAGS.batch or 1,
        height if FLAGS.height is None else FLAGS.height,
        width if FLAGS.width is None else FLAGS.width,
    )


def _model(name):
    from rich.table import Table

    table = Table("part", "output", "span", "heads", "parameters", "multiply-adds", "activations")
    rows = _stages(name)

    def spans(row):
        return ", ".join("all" if s is None else str(s) for s in row.spans)

    for row in rows:
        table.add_row(
            row.part,
            "" if row.output is None else " x ".join(map(str, row.output)),
            spans(row),
            ", ".join(map(str, row.heads)),
            f"{row.params:,}",
            _giga(row.macs),
            _mebi(row.activations),
        )
    table.add_section()
    params, macs, activations = _totals(rows)
    table.add_row("all", "", "", "", f"{params:,}", _giga(macs), _mebi(activations))
    _console().print(table)


def _diff(name, other):
    from rich.table import Table

    ours, theirs = ({row.part: row for row in _stages(n)} for n in (name, other))
    table = Table("part", f"parameters of {name}", other, "multiply-adds", other, "activations", other)
    for part in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(part), theirs.get(part)
        table.add_row(
            part,
            *_pair(a and f"{a.params:,}", b and f"{b.params:,}"),
            *_pair(a and _giga(a.macs), b and _giga(b.macs)),
            *_pair(a and _mebi(a.activations), b and _mebi(b.activations)),
        )
    table.add_section()
    (p, m, n), (q, o, r) = _totals(ours.values()), _totals(theirs.values())
    table.add_row("all", f"{p:,}", f"{q:,}", _giga(m), _giga(o), _mebi(n), _mebi(r))
    table.add_row("difference", "", f"{q - p:+,}", "", f"{(o - m) / 1e9:+.3f} B", "", f"{(r - n) / 2**20:+,.1f} MiB")
    _console().print(table)


def _pair(*texts):
    return ["-" if text is None else text for text in texts]


def _totals(rows):
    return tuple(sum(getattr(row, key) for row in rows) for key in ("params", "macs", "activations"))


def _giga(number):
    return f"{number / 1e9:,.3f} B"


def _mebi(number):
    return f"{number / 2**20:,.1f} MiB"


def _curves(model_dirs):
    from axial.analysis.curves import draw_curves, read_curves
    from axial.data.tfrecord import write_whole
    from axial.errors import InputError

    if not model_dirs or not FLAGS.figure or not FLAGS.figure.endswith((".png", ".jpg")):
        raise InputError("curves takes the folders of one run or more and --figure=FILE.png")
    runs = {os.path.basename(path.rstrip("/")): read_curves(path) for path in model_dirs}
    write_whole(FLAGS.figure, lambda path: draw_curves(runs, path))
    for run, curves in runs.items():
        print(run, *(f"{name}={values[-1]:.3g}" for name, (_, values) in sorted(curves.items())))


def _tables():
    from rich.table import Table

    from axial.analysis import tables
    from axial.data.tfrecord import write_json
    from axial.errors import InputError

    for flag in ("json", "markdown", "figure"):
        folder = os.path.dirname(FLAGS[flag].value or "") or "."
        if not os.path.isdir(folder):
            raise InputError(f"--{flag}={FLAGS[flag].value}: there is no folder {folder}")
    tables.check_outputs(FLAGS.markdown, FLAGS.figure)
    bar, step = _progress(None)
    results = tables.count_rows(progress=step)
    bar.close()
    table = Table(*tables.COLUMNS)
    previous = None
    for result in results:
        if previous not in (None, result.row.table):
            table.add_section()
        previous = result.row.table
        table.add_row(*tables.cells(result))
    _console().print(table)
    if FLAGS.json:
        write_json(FLAGS.json, [result.to_json() for result in results])
    if FLAGS.markdown:
        tables.write_markdown(FLAGS.markdown, results)
    if FLAGS.figure:
        tables.write_figure(FLAGS.figure, results)


def main():
    app.run(_main, sys.modules[__name__])
