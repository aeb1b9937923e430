"""Counts, compares and measures models without training them.

%s recipes              the recipes of experiments/: model, steps, batch and canvas
%s recipes RECIPE       what a gin binding may set, with defaults and the recipe's own values
%s recipes --settings   the same without a recipe
%s models               every registered model with its parameters; --csv counts them anew (minutes)
%s model NAME           output, span, heads, parameters without and with attention's batch norms,
                        multiply-adds and activations of its parts
%s model NAME --diff=OTHER --batch=1 --height=1024 --width=2048
%s zoo                  public checkpoints, what they hold, and the commands that convert and score them
%s attention --model=RUN --image=PHOTO --query=X,Y --output_dir=OUT
                        where a block of a run or an export attends from a pixel
%s curves RUN RUN --figure=F.png    losses and scores of training runs side by side
%s page RUN --html=F    one run as a page: losses, scores, pictures, speed, configuration, machine
%s input                images a second of each stage of the input pipeline
%s input --gin_file=coco/axial_deeplab_s.gin --data_dir=DATA --step_seconds=0.5 --cores=112
                        and how many hosts, or workers of axial-data-service, feed a slice whose step takes that long
"""

import os
import sys

from axial import recipes
from axial.builders import check_model_name, model_names, read_settings
from axial.cli import app, flags, pages
from axial.cli.analyze_attention import run_attention
from axial.cli.analyze_speed import run_input
from axial.cli.checks import check_page
from axial.cli.flags import Flag, Flags
from axial.io.paths import output_names
from axial.io.show import counted, print_table, say, working
from axial.io.write import write_whole
from axial.statements import experiments_dir, run_file

SIDE = Flag(int, "sides of the image; by default 1024 x 2048, or 224 x 224 for a classifier.", least=1, most=8193)
WITH_NORMS = "with attention's batch norms"  # the paper's tables print parameters without them


class Models(Flags):
    csv = flags.CSV


def _models(given: Models):
    from axial.analysis.model_counts import COLUMNS, read_models, write_models

    models = _count_models() if given.csv else read_models(os.path.join(experiments_dir(), "models.csv"))
    if given.csv:
        write_models(given.csv, models)
    print_table(COLUMNS, (model.cells() for model in models))


def _count_models():
    """The `Counts` of every registered model."""
    from axial.analysis.model_counts import Counts, count_models
    from axial.models.registry import find_variant

    names = model_names()
    say(f"counting the parameters of {counted(len(names), 'model')}: about 8 minutes of two cores", error=True)
    jobs = {name: (name, (65, 65), None) for name in names}
    counts = pages.counted(lambda step: count_models(list(jobs.values()), step), len(names))
    found = []
    for name, variant in zip(names, map(find_variant, names)):
        parameters, norms, _ = counts[jobs[name]]
        found.append(Counts(name, variant.task, variant.classes, parameters=parameters, attention_norms=norms))
    return found


# === recipes ===


class Recipes(Flags):
    takes, most = "[RECIPE]", 1
    settings = Flag(bool, "all that a gin binding may set, with defaults, in place of the recipes.", False)
    csv = flags.CSV


def _recipes(given: Recipes):
    found = recipes.read_recipes()
    if given.csv:
        _count_steps(found, given.csv)
    elif given.arguments or given.settings:
        _print_settings(recipes.find_recipe(found, given.arguments[0]) if given.arguments else None)
    else:
        print_table(recipes.COLUMNS, (recipe.cells() for recipe in found))


def _print_settings(recipe):
    """Prints what a gin binding may set: all of it, or in a recipe with the recipe's values and macros."""
    bound = {name: repr(value) for name, value in recipe.bindings.items()} if recipe else {}
    settings = recipe.settings() if recipe else read_settings()
    rows = [(s.name, s.default or "needed", *([bound.get(s.name, "")] if recipe else []), s.meaning) for s in settings]
    print_table(("setting", "default", *([recipe.path] if recipe else []), "what it is"), rows)
    if recipe:
        macros = [(name, value) for name, value in bound.items() if "." not in name]
        print_table(("macro", "value"), macros, title='a binding like --gin_binding="STEPS = 100" sets these too')


def _count_steps(found, path):
    """Writes what one photo takes in the model of each recipe, which `step_cost` reads."""
    say("counting the work of a step of the recipes' models: minutes", error=True)

    from axial.analysis import step_cost
    from axial.models.registry import find_variant

    models = {recipe.model: recipe.canvas for recipe in reversed(found) if recipe.canvas}
    models = {name: canvas for name, canvas in models.items() if find_variant(name).task in step_cost.COUNTED}
    steps = []

    def count(step):
        for name, canvas in sorted(models.items()):
            steps.append(step_cost.count(name, canvas))
            step(len(steps), len(models), name)
            step_cost.write_steps(path, steps)

    pages.counted(count, len(models))


# === model ===


class Model(Flags):
    takes, least, most = "NAME", 1, 1
    classes = Flag(int, "classes; by default Cityscapes' 19 or ImageNet's 1000.", least=1, most=32768)
    diff = Flag(str, "another model to compare with.")
    batch = flags.BATCH
    height = SIDE
    width = SIDE


def _model(given: Model):
    names = [*given.arguments, *filter(None, [given.diff])]
    for name in names:
        check_model_name(name)
    with working(f"counting {' and '.join(names)}"):
        stages = [_stages(name, given) for name in names]
    if given.diff:
        _print_difference(*names, *stages)
    else:
        _print_stages(*stages)


def _stages(name, given):
    from axial.analysis.stages import stages
    from axial.models.registry import find_variant

    classes = find_variant(name).classes
    height, width = (224, 224) if classes == 1000 else (1024, 2048)
    size = dict(height=given.height or height, width=given.width or width)
    return stages(name, given.classes or classes, batch=given.batch or 1, **size)


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


def _print_difference(name, other, ours, theirs):
    header = ("part", f"parameters of {name}", other, WITH_NORMS, other, "multiply-adds", other, "activations", other)
    total, of_other = _total(ours), _total(theirs)
    ours, theirs = ({row.part: row for row in rows} for rows in (ours, theirs))

    def line(part, own, of_other):
        return part, *(text for pair in zip(_figures(own), _figures(of_other)) for text in pair)

    rows = [line(part, ours.get(part), theirs.get(part)) for part in dict.fromkeys([*ours, *theirs])]
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


class Curves(Flags):
    takes, least = "RUN ...", 1
    figure = flags.FIGURE.but(needed=True)


def _curves(given: Curves):
    paths = list(dict.fromkeys(path.rstrip("/") for path in given.arguments))
    for path in paths:
        run_file(path)

    from axial.analysis.curves import draw_curves, read_curves

    names = output_names([os.path.basename(path) for path in paths], paths)
    with working(f"drawing the curves of {', '.join(paths)}"):
        runs = dict(zip(names, map(read_curves, paths)))
        write_whole(given.figure, lambda path: draw_curves(runs, path))
    for run, curves in runs.items():
        say(" ".join([run, *(f"{name}={values[-1]:.3g}" for name, (_, values) in sorted(curves.items()))]))


class Page(Flags):
    takes, least, most = "RUN", 1, 1
    html = flags.HTML.but(needed=True)


def _page(given: Page):
    (model_dir,) = given.arguments
    run_file(model_dir)
    with working(f"making the page of {model_dir}"):
        from axial.analysis.run_page import write_page

        write_page(model_dir, given.html)
    say(f"{model_dir}: {given.html}")


class Zoo(Flags):
    json = flags.JSON
    markdown = flags.MARKDOWN


def _zoo(given: Zoo):
    check_page("zoo")
    say("counting the models of the public checkpoints: minutes", error=True)

    from axial.analysis import zoo

    entries = zoo.read_zoo(os.path.join(experiments_dir(), "zoo.csv"))
    entries = pages.counted(lambda step: zoo.counted(entries, step), len(entries))
    print_table(zoo.COLUMNS, map(zoo.cells, entries))
    for entry in entries:
        say(f"{entry.row.checkpoint}, {entry.row.data}:", *(f"    {command}" for command in entry.commands))
    pages.write_page("zoo", entries, zoo.markdown)


VERBS = {
    "recipes": _recipes,
    "models": _models,
    "model": _model,
    "zoo": _zoo,
    "attention": run_attention,
    "curves": _curves,
    "page": _page,
    "input": run_input,
}
# What was a verb before and is a script now.
MOVED = {
    "benchmark": "speed/benchmark.py",
    "compile": "tpu/seconds.py",
    "gpu": "speed/gpu.py",
    "ops": "tpu/tpu.py",
    "pod": "tpu/pod.py",
    "scaling": "speed/benchmark.py --suite=scaling",
    "study": "paper/study.py",
    "tables": "paper/tables.py",
    "tpu": "tpu/tpu.py",
}


def main():
    app.run(VERBS, sys.modules[__name__], moved=MOVED)
