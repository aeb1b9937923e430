"""Counts, compares and measures models without training them.

%s recipes              the recipes of experiments/: model, steps, batch and canvas
%s recipes RECIPE       what a gin binding may set, with defaults and the recipe's own values
%s recipes --settings   the same without a recipe
%s models               every registered model with its parameters; --classes=N counts them anew (minutes)
%s model NAME           output, span, heads, parameters without and with attention's batch norms,
                        multiply-adds and activations of its parts
%s model NAME --diff=OTHER --batch=1 --height=1024 --width=2048
%s tables               the paper's tables beside counts of our models, and what trains each row (minutes)
%s tables --json=F --markdown=F --figure=F.png
%s zoo                  public checkpoints, what they hold, and the commands that convert and score them
%s study --json=F --markdown=F --figure=F.png
                        GFLOPs of the spatial-attention study's tables, counted, beside the published ones, and what
                        trains each row (a minute)
%s attention --checkpoint=RUN --image=PHOTO --query=X,Y --output_dir=OUT
                        where a block of a model attends from a pixel; --saved_model=EXPORT does it too
%s curves RUN RUN --figure=F.png    losses and scores of training runs side by side
%s page RUN --html=F    one run as a page: losses, scores, pictures, speed, configuration, machine
%s benchmark --json=F   our form of attention against the textbook's, and ResNet-101, on this machine
%s benchmark --suite=study
                        each mechanism of the study against a 3x3 convolution and its naive form
%s benchmark --suite=runtime
                        the models of the paper's Table 8, one image at a time
%s input                images a second of each stage of the input pipeline
%s input --gin_file=coco/axial_deeplab_s.gin --data_dir=DATA --step_seconds=0.5 --cores=112
                        and how many hosts, or workers of axial-data-service, feed a slice whose step takes that long
%s tpu --gin_file=coco/axial_deeplab_s.gin --slice=v5e:4x4
                        memory and estimated cycles of a recipe's step, from the TPU's own compiler
%s tpu --parts --json=F    and of each of its parts, beside the least that its bytes and products take
%s tpu --layer=258x65   the same for a training step of one layer, rows x length, beside the textbook's form
%s tpu --suite=study    the same for each mechanism of the study, at the size of a detector's conv4
%s tpu --all --csv=F --markdown=F
                        every published recipe for images on its slice (hours; what the file has is kept)
%s compile --csv=F --markdown=F
                        seconds in which XLA for a CPU and the TPU's compiler compile a step of each recipe
                        (hours; what the file has is kept; --only=coco/axial_deeplab_s takes minutes)
%s ops --gin_file=coco/axial_deeplab_s.gin
                        operations of a recipe's training step without a TPU kernel, on an installation with
                        tensorflow-tpu (scripts/tpu/install.sh); --all is every published recipe (minutes)
%s pod --only=coco/axial_deeplab_s
                        predicted step time and efficiency on 8 to 2048 cores, and what binds
"""

import itertools
import os
import sys

from absl import flags

from axial.cli import (
    analyze_attention,
    analyze_compile,
    analyze_ops,
    analyze_speed,
    analyze_tpu,
    app,
)
from axial.cli.checks import check_page
from axial.io.show import counted, plain, print_table, progress, say, working
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
    "images; for tpu of a device, by default all that fit; for input of a step, by default the recipe's.",
    lower_bound=1,
    upper_bound=65536,
)
flags.DEFINE_string("markdown", None, "new file for a table, or one that holds the two comments around the table.")
flags.DEFINE_string("json", None, "file for every number, in plain units.")
flags.DEFINE_string("figure", None, "picture to draw, .png or .jpg.")
flags.DEFINE_string("html", None, "page to write.")
flags.DEFINE_enum("suite", "axial", ["axial", "study", "runtime"], "what is measured.")
flags.DEFINE_bool("quick", False, "fewer works and rounds.")
flags.DEFINE_multi_string("gin_file", ["sample/overfit.gin"], "the recipe.")
flags.DEFINE_multi_string("gin_binding", [], "gin bindings over the recipe.")
flags.DEFINE_string("data_dir", None, "what axial-convert wrote; the sample photos by default.")
flags.DEFINE_string("slice", "v5e:1x1", "the TPU slice, like v5e:4x4.")
flags.DEFINE_string("layer", None, "rows x length of one layer, in place of a recipe, like 258x65.")
flags.DEFINE_bool("settings", False, "all that a gin binding may set, with defaults, in place of the recipes.")
flags.DEFINE_bool("parts", False, "cycles, bytes and products of each part, beside the least that they take.")
flags.DEFINE_bool("all", False, "every published recipe; tpu adds to the file of --csv what that lacks.")
flags.DEFINE_string("only", "", "recipes whose names have this text.")
flags.DEFINE_string("csv", None, "table of compiled recipes; that of experiments/ for pod.")
flags.DEFINE_float("hop_microseconds", 1.0, "an assumption: from one chip to the next in a sum.", lower_bound=0)
flags.DEFINE_float(
    "host_images", None, "images a second that a host's input gives (axial-analyze input).", lower_bound=1e-6
)
flags.DEFINE_float("step_seconds", None, "time of a training step of the slice.", lower_bound=1e-6)
flags.DEFINE_float("cycles", None, "in place of --step_seconds: cycles of a step on a chip of --slice.", lower_bound=1)
flags.DEFINE_integer("cores", None, "CPU cores of a host or worker; by default this machine's.", lower_bound=1)
flags.DEFINE_enum("mode", "train", ["train", "serve"], "the step that is compiled.")

WITH_NORMS = "with attention's batch norms"  # the paper's tables print parameters without them


def _progress(total):
    """A progress bar on standard error, and the function that advances it."""
    bar = progress(total=total, unit="model")

    def step(done, of, name):
        bar.total = of
        bar.set_postfix_str(plain(name), refresh=False)
        bar.update(done - bar.n)

    return bar, step


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

    from axial.analysis.model_counts import Counts
    from axial.models.registry import find_variant
    from axial.paper.tables import count_models

    bar, step = _progress(len(names))
    counts = count_models([(name, (65, 65), FLAGS.classes) for name in names], step)
    bar.close()
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
    bar, step = _progress(len(models))
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


# === curves, tables, zoo ===


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

    from axial.analysis.run_page import write_page

    write_page(model_dirs[0], html)
    say(f"{model_dirs[0]}: {FLAGS.html}")


def _counted(count, total=None):
    """count(progress), behind a bar."""
    bar, step = _progress(total)
    results = count(step)
    bar.close()
    return results


def _write_page(page, module, results):
    """Writes --json and --markdown of a page of a module of `axial.paper`."""
    from axial.io.write import write_block, write_json

    if FLAGS.json:
        write_json(FLAGS.json, [result.to_json() for result in results])
    if FLAGS.markdown:
        write_block(FLAGS.markdown, page, module.markdown(results))


def _publish(page, module, results):
    """Says how far results agree with the published ones and what trains them, and writes the page."""
    say(*module.agreement(results))
    for commands, names in module.commands(results).items():
        say(f"{'; '.join(dict.fromkeys(names))}:", *(f"    {command}" for command in commands))
    _write_page(page, module, results)
    if FLAGS.figure:
        module.write_figure(FLAGS.figure, results)


def _tables(_):
    say("counting the models of the paper's tables: minutes", error=True)
    from axial.paper import tables

    results = _counted(lambda step: tables.count_rows(progress=step))
    groups = itertools.groupby(results, lambda result: result.row.table)
    print_table(tables.COLUMNS, *(list(map(tables.cells, of_table)) for _, of_table in groups))
    _publish("tables", tables, results)


def _zoo(_):
    say("counting the models of the public checkpoints: minutes", error=True)

    from axial.paper import zoo

    entries = zoo.read_zoo(os.path.join(experiments_dir(), "zoo.csv"))
    entries = _counted(lambda step: zoo.counted(entries, step), len(entries))
    print_table(zoo.COLUMNS, map(zoo.cells, entries))
    for entry in entries:
        say(f"{entry.row.checkpoint}, {entry.row.data}:", *(f"    {command}" for command in entry.commands))
    _write_page("zoo", zoo, entries)


def _study(_):
    say("counting the settings of the spatial-attention study: a minute", error=True)

    from axial.paper import study, study_systems

    scores = study_systems.read_scores(os.path.join(experiments_dir(), "study.csv"))
    results = _counted(lambda step: study.rows(scores, step))
    print_table(study.COLUMNS, map(study.cells, results))
    _publish("study", study, results)


_DEMAND = ("batch", "step_seconds", "cycles", "slice", "cores")
VERBS = {
    "recipes": app.Verb(_recipes, ("settings", "csv"), takes="RECIPE"),
    "models": app.Verb(_models, ("classes", "csv"), check=_check_models),
    "model": app.Verb(_model, ("classes", "diff", "batch", "height", "width"), takes="NAME"),
    "tables": app.Verb(_tables, ("json", "markdown", "figure"), check=check_page("tables")),
    "zoo": app.Verb(_zoo, ("json", "markdown"), check=check_page("zoo")),
    "study": app.Verb(_study, ("json", "markdown", "figure"), check=check_page("study")),
    "attention": app.Verb(
        analyze_attention.run_attention, ("checkpoint", "saved_model", "image", "query", "block", "output_dir")
    ),
    "curves": app.Verb(_curves, ("figure",), takes="RUN ..."),
    "page": app.Verb(_page, ("html",), takes="RUN"),
    "benchmark": app.Verb(analyze_speed.run_benchmark, ("suite", "json", "quick")),
    "input": app.Verb(analyze_speed.run_input, (*analyze_tpu.OF_RECIPE, *_DEMAND, "json", "quick")),
    "tpu": app.Verb(
        analyze_tpu.run_tpu,
        (*analyze_tpu.OF_STEP, *analyze_tpu.OF_TABLE, "slice", "layer", "suite", "json", "all"),
        check=analyze_tpu.check_tpu,
    ),
    "compile": app.Verb(
        analyze_compile.run_compile, ("only", "csv", "markdown", "slice"), check=analyze_compile.check_compile
    ),
    "ops": app.Verb(analyze_ops.run_ops, (*analyze_tpu.OF_RECIPE, "all", "only"), check=analyze_ops.check_ops),
    "pod": app.Verb(analyze_tpu.run_pod, ("csv", "only", "hop_microseconds", "host_images", "json")),
}


# What was a verb or a suite before and is a script now.
MOVED = {name: f"experiments/speed/{name.split('=')[-1]}.py" for name in ("gpu", "scaling", "--suite=systems")}
MOVED["spans"] = "experiments/paper/spans.py"


def main():
    app.run_verbs(VERBS, sys.modules[__name__], moved=MOVED)
