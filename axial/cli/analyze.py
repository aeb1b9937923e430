"""Counts, compares and measures models without training them.

%s recipes              the recipes of experiments/: model, steps, batch and canvas
%s recipes RECIPE       what a gin binding may set, with defaults and the recipe's own values
%s recipes --settings   the same without a recipe
%s models               every registered model with its parameters; --classes=N counts them anew (minutes)
%s model NAME           output, span, heads, parameters without and with attention's batch norms,
                        multiply-adds and activations of its parts
%s model NAME --diff=OTHER --batch=1 --height=1024 --width=2048
%s zoo                  public checkpoints, what they hold, and the commands that convert and score them
%s attention --checkpoint=RUN --image=PHOTO --query=X,Y --output_dir=OUT
                        where a block of a model attends from a pixel; --saved_model=EXPORT does it too
%s curves RUN RUN --figure=F.png    losses and scores of training runs side by side
%s page RUN --html=F    one run as a page: losses, scores, pictures, speed, configuration, machine
%s input                images a second of each stage of the input pipeline
%s input --gin_file=coco/axial_deeplab_s.gin --data_dir=DATA --step_seconds=0.5 --cores=112
                        and how many hosts, or workers of axial-data-service, feed a slice whose step takes that long
"""

import os
import sys

from absl import flags

from axial.cli import (
    analyze_attention,
    analyze_speed,
    app,
    pages,
)
from axial.cli.checks import check_page
from axial.io.show import counted, print_table, say, working
from axial.recipes import check_model_name, experiments_dir, model_names
from axial.statements import run_file

FLAGS = flags.FLAGS

flags.DEFINE_integer(
    "classes", None, "classes; by default Cityscapes' 19 or ImageNet's 1000.", lower_bound=1, upper_bound=32768
)
flags.DEFINE_string("diff", None, "another model to compare with.")
flags.DEFINE_integer(
    "height", None, "height of the image; by default 1024, or 224 for a classifier.", lower_bound=1, upper_bound=8193
)
flags.DEFINE_integer(
    "width", None, "width of the image; by default 2048, or 224 for a classifier.", lower_bound=1, upper_bound=8193
)
flags.DEFINE_integer(
    "batch",
    None,
    "images; for input of a step, by default the recipe's.",
    lower_bound=1,
    upper_bound=65536,
)
flags.DEFINE_string("markdown", None, "new file for a table, or one that holds the two comments around the table.")
flags.DEFINE_string("json", None, "file for every number, in plain units.")
flags.DEFINE_string("figure", None, "picture to draw, .png or .jpg.")
flags.DEFINE_string("html", None, "page to write.")
flags.DEFINE_bool("quick", False, "fewer works and rounds.")
flags.DEFINE_multi_string("gin_file", ["sample/overfit.gin"], "the recipe.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the recipe.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote; the sample photos by default.")
flags.DEFINE_string("slice", "v5e:1x1", "the TPU slice, like v5e:4x4.")
flags.DEFINE_bool("settings", False, "all that a gin binding may set, with defaults, in place of the recipes.")
flags.DEFINE_string("csv", None, "table to write.")
flags.DEFINE_float("step_seconds", None, "time of a training step of the slice.", lower_bound=1e-6)
flags.DEFINE_float("cycles", None, "in place of --step_seconds: cycles of a step on a chip of --slice.", lower_bound=1)
flags.DEFINE_integer("cores", None, "CPU cores of a host or worker; by default this machine's.", lower_bound=1)

WITH_NORMS = "with attention's batch norms"  # the paper's tables print parameters without them


def _models(_):
    from axial.analysis.model_counts import COLUMNS, read_models, write_models

    models = (
        _count_models() if FLAGS.csv or FLAGS.classes else read_models(os.path.join(experiments_dir(), "models.csv"))
    )
    if FLAGS.csv:
        write_models(FLAGS.csv, models)
    print_table(COLUMNS, (model.cells() for model in models))


def _check_models():
    """Raises InputError for flags that do not go together."""
    app.refuse_beside("csv", ("classes",))


def _count_models():
    """The `Counts` of every registered model."""
    names = model_names()
    say(f"counting the parameters of {counted(len(names), 'model')}: about 8 minutes of two cores", error=True)

    from axial.analysis.model_counts import Counts, count_models
    from axial.models.registry import find_variant

    jobs = [(name, (65, 65), FLAGS.classes) for name in names]
    counts = pages.counted(lambda step: count_models(jobs, step), len(names))
    found = []
    for name in names:
        variant, (parameters, norms, _) = find_variant(name), counts[name, (65, 65), FLAGS.classes]
        numbers = dict(classes=FLAGS.classes or variant.classes, parameters=parameters, attention_norms=norms)
        found.append(Counts(name, variant.task, **numbers))
    return found


# === recipes ===


def _recipes(arguments):
    from axial import recipes
    from axial.errors import InputError

    if len(arguments) > 1:
        raise InputError("recipes takes the name of one recipe, or none")
    found = recipes.read_recipes(recipes.experiments_dir())
    if FLAGS.csv:
        _count_steps(found)
    elif arguments or FLAGS.settings:
        _print_settings(recipes.find_recipe(found, arguments[0]) if arguments else None)
    else:
        print_table(recipes.COLUMNS, (recipe.cells() for recipe in found))


def _print_settings(recipe):
    """Prints what a gin binding may set: all of it, or in a recipe with the recipe's values and macros."""
    from axial import recipes

    bound = recipe.bindings if recipe else {}
    settings = recipes.settings_of(recipe) if recipe else recipes.read_settings()
    rows = [(s.name, s.default or "needed", *([bound.get(s.name, "")] if recipe else []), s.meaning) for s in settings]
    print_table(("setting", "default", *([recipe.path] if recipe else []), "what it is"), rows)
    if recipe:
        macros = [(name, value) for name, value in bound.items() if "." not in name]
        print_table(("macro", "value"), macros, title='a binding like --gin_binding="STEPS = 100" sets these too')


def _count_steps(found):
    """Writes what one photo takes in the model of each recipe, which `step_cost` reads."""
    say("counting the work of a step of the recipes' models: minutes", error=True)

    from axial.analysis import step_cost
    from axial.models.registry import find_variant

    models = {recipe.model: recipe.canvas for recipe in reversed(found) if recipe.canvas}
    models = {name: canvas for name, canvas in models.items() if find_variant(name).task in step_cost.COUNTED}
    bar, step = pages.progress_bar(len(models))
    steps = []
    for name, canvas in sorted(models.items()):
        steps.append(step_cost.count(name, canvas))
        step(len(steps), len(models), name)
        step_cost.write_steps(FLAGS.csv, steps)
    bar.close()


# === model ===


def _model(arguments):
    from axial.errors import InputError

    if len(arguments) != 1:
        raise InputError("model takes one name; axial-analyze models lists them")
    for name in filter(None, (*arguments, FLAGS.diff)):
        check_model_name(name)
    with working(f"counting {' and '.join(filter(None, (*arguments, FLAGS.diff)))}"):
        stages = {name: _stages(name) for name in filter(None, (*arguments, FLAGS.diff))}
    if FLAGS.diff:
        _print_difference(stages, arguments[0], FLAGS.diff)
    else:
        _print_stages(stages[arguments[0]])


def _stages(name):
    from axial.analysis.stages import stages
    from axial.models.registry import find_variant

    classes = find_variant(name).classes
    height, width = (224, 224) if classes == 1000 else (1024, 2048)
    return stages(
        name,
        FLAGS.classes or classes,
        batch=FLAGS.batch or 1,
        height=FLAGS.height or height,
        width=FLAGS.width or width,
    )


def _print_stages(rows):
    header = ("part", "output", "span", "heads", "parameters", WITH_NORMS, "multiply-adds", "activations")
    cells = [
        (
            row.part,
            "" if row.output is None else " x ".join(map(str, row.output)),
            ", ".join("all" if span is None else str(span) for span in row.spans),
            ", ".join(map(str, row.heads)),
            *_figures(row),
        )
        for row in rows
    ]
    print_table(header, cells, [("all", "", "", "", *_figures(_total(rows)))])


def _print_difference(stages, name, other):
    ours, theirs = ({row.part: row for row in stages[n]} for n in (name, other))
    header = ("part", f"parameters of {name}", other, WITH_NORMS, other, "multiply-adds", other, "activations", other)

    def line(part, own, of_other):
        return part, *(text for pair in zip(_figures(own), _figures(of_other)) for text in pair)

    rows = [line(part, ours.get(part), theirs.get(part)) for part in dict.fromkeys([*ours, *theirs])]
    total, of_other = _total(ours.values()), _total(theirs.values())
    change = (
        f"{of_other.params - total.params:+,}",
        f"{of_other.params + of_other.norms - total.params - total.norms:+,}",
        f"{(of_other.macs - total.macs) / 1e9:+.3f} B",
        f"{(of_other.activations - total.activations) / 2**20:+,.1f} MiB",
    )
    difference = ("difference", *(text for one in change for text in ("", one)))
    print_table(header, rows, [line("all", total, of_other), difference])


def _total(rows):
    """A `Stage` with the sums of several."""
    from axial.analysis.stages import Stage

    sums = {key: sum(getattr(row, key) for row in rows) for key in ("params", "norms", "macs", "activations")}
    return Stage("all", None, (), (), **sums)


def _figures(row):
    """Parameters without and with attention's batch norms, multiply-adds and activations of a `Stage`; '-' for None."""
    if row is None:
        return "-", "-", "-", "-"
    macs, activations = f"{row.macs / 1e9:,.3f} B", f"{row.activations / 2**20:,.1f} MiB"
    return f"{row.params:,}", f"{row.params + row.norms:,}", macs, activations


# === curves, page, zoo ===


def _curves(model_dirs):
    from axial.errors import InputError

    if not model_dirs or not FLAGS.figure:
        raise InputError("curves takes the folders of one run or more and --figure=FILE.png")
    paths = list(dict.fromkeys(path.rstrip("/") for path in model_dirs))
    for path in paths:
        run_file(path)

    from axial.analysis.curves import draw_curves, read_curves
    from axial.io.paths import output_names
    from axial.io.write import write_whole

    names = output_names([os.path.basename(path) for path in paths], paths)
    with working(f"drawing the curves of {', '.join(paths)}"):
        runs = dict(zip(names, map(read_curves, paths)))
        write_whole(FLAGS.figure, lambda path: draw_curves(runs, path))
    for run, curves in runs.items():
        say(" ".join([run, *(f"{name}={values[-1]:.3g}" for name, (_, values) in sorted(curves.items()))]))


def _page(model_dirs):
    from axial.errors import InputError

    if len(model_dirs) != 1:
        raise InputError("page takes the folder of one run and --html=FILE.html")
    html = app.flag("html")
    run_file(model_dirs[0])

    with working(f"making the page of {model_dirs[0]}"):
        from axial.analysis.run_page import write_page

        write_page(model_dirs[0], html)
    say(f"{model_dirs[0]}: {FLAGS.html}")


def _zoo(_):
    say("counting the models of the public checkpoints: minutes", error=True)

    from axial.analysis import zoo

    entries = zoo.read_zoo(os.path.join(experiments_dir(), "zoo.csv"))
    entries = pages.counted(lambda step: zoo.counted(entries, step), len(entries))
    print_table(zoo.COLUMNS, map(zoo.cells, entries))
    for entry in entries:
        say(f"{entry.row.checkpoint}, {entry.row.data}:", *(f"    {command}" for command in entry.commands))
    pages.write_page("zoo", entries, zoo.markdown)


_DEMAND = ("batch", "step_seconds", "cycles", "slice", "cores")
VERBS = {
    "recipes": app.Verb(_recipes, ("settings", "csv"), takes="RECIPE"),
    "models": app.Verb(_models, ("classes", "csv"), check=_check_models),
    "model": app.Verb(_model, ("classes", "diff", "batch", "height", "width"), takes="NAME"),
    "zoo": app.Verb(_zoo, ("json", "markdown"), check=check_page("zoo")),
    "attention": app.Verb(
        analyze_attention.run_attention, ("checkpoint", "saved_model", "image", "query", "block", "output_dir")
    ),
    "curves": app.Verb(_curves, ("figure",), takes="RUN ..."),
    "page": app.Verb(_page, ("html",), takes="RUN"),
    "input": app.Verb(analyze_speed.run_input, ("gin_file", "gin_binding", "data_dir", *_DEMAND, "json", "quick")),
}


# What was a verb before and is a script now.
_FOLDERS = {
    "paper": ("spans", "study", "tables"),
    "speed": ("benchmark", "gpu"),
    "tpu": ("ops", "pod", "tpu"),
}
MOVED = {name: f"experiments/{folder}/{name}.py" for folder, names in _FOLDERS.items() for name in names}
MOVED["compile"] = "experiments/tpu/seconds.py"
MOVED["scaling"] = "experiments/speed/benchmark.py --suite=scaling"


def main():
    app.run_verbs(VERBS, sys.modules[__name__], moved=MOVED)
