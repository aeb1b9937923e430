"""Counts, compares and measures models without training them.

%s recipes              the recipes of experiments/: model, steps, batch and canvas
%s recipes RECIPE       the settings that gin bindings may change, with defaults and the recipe's values
%s models               every registered model with its parameters
%s model NAME           of each stage: output, span, heads, parameters without and with attention's batch
                        norms, multiply-adds and activations
%s model NAME --diff=OTHER --batch=1 --height=1024 --width=2048
%s zoo                  public checkpoints, their contents, and the commands that convert and score them
%s attention --model=RUN --image=PHOTO --query=X,Y --output_dir=OUT
                        the attention of a block from a pixel, as pictures
%s view --model=nuclei --html=view.html PHOTO ...
                        a page that shows the attention from any pixel, and the errors; see docs/view.md
%s view --model=RUN --model=OTHER --data_dir=DATA --split=val --html=view.html PHOTO ...
                        two models side by side, with the ground truth of the split's photos
%s page RUN --html=F    a page of a run: losses, scores, pictures, speed, configuration, machine
%s input                images per second of the input pipeline
%s input --gin_file=coco/axial_deeplab_s.gin --data_dir=DATA --step_seconds=0.5 --cores=112
                        also how many hosts, or workers of axial-data-service, a slice needs at this step time
"""

import os

from axial import recipes
from axial.cli import app, flags
from axial.cli.flags import Flag, Flags
from axial.data.files import load_photo
from axial.data.levels import PERCENTILES
from axial.errors import InputError
from axial.io.paths import experiments_dir, output_names
from axial.io.show import print_table, say, working
from axial.io.write import write_json, write_whole
from axial.models.names import check_model_name
from axial.weights.source import run_file

SIDE = Flag(int, "side of the input in pixels; by default 1024 x 2048, for a classifier 224 x 224.", least=1, most=8193)


class Recipes(Flags):
    takes = "[RECIPE]"


def _recipes(given):
    """Lists the recipes, or the settings of one recipe with its values and macros."""
    if not given.arguments:
        print_table(recipes.COLUMNS, (recipe.cells() for recipe in recipes.read_recipes()))
        return
    recipe = recipes.read(given.arguments, whole=False)
    bound = {name: repr(value) for name, value in recipe.bindings.items()}
    rows = [(name, default or "needed", bound.get(name, ""), meaning) for name, default, meaning in recipe.settings()]
    print_table(("setting", "default", given.arguments[0], "what it is"), rows)
    macros = [(name, value) for name, value in bound.items() if "." not in name]
    print_table(("macro", "value"), macros, title='a binding like --gin_binding="STEPS = 100" sets these too')
    if task := recipe.task():
        files = f"--gin_file={given.arguments[0]} --gin_file=tiny/{task.removesuffix('Task').lower()}.gin"
        say(f"one step of a tiny version on a CPU: axial-train {files} --data_dir=DATA --model_dir=RUN")


def _models(_):
    from axial.analysis.model_counts import COLUMNS, read_models

    models = read_models(os.path.join(experiments_dir(), "models.csv"))
    print_table(COLUMNS, (model.cells() for model in models))


def _zoo(_):
    from axial.weights import zoo

    rows = zoo.read_zoo()
    print_table(zoo.COLUMNS, map(zoo.cells, rows))
    for row in rows:
        say(f"{row.name}:", *(f"    {command}" for command in zoo.commands(row)))


# === model ===


class Model(Flags):
    takes = "NAME"
    classes = Flag(int, "number of classes; by default 19 (Cityscapes) or 1000 (ImageNet).", least=1, most=32768)
    diff = Flag(str, "another model to compare with.")
    batch = flags.BATCH.but(meaning="photos in the batch.", default=1)
    height = SIDE
    width = SIDE


def _model(given):
    names = [*given.arguments, *filter(None, [given.diff])]
    for name in names:
        check_model_name(name)
    with working(f"counting {' and '.join(names)}"):
        from axial.analysis.stages import COLUMNS, differences, stages

        tables = [stages(n, given.classes, batch=given.batch, height=given.height, width=given.width) for n in names]
    if given.diff:
        print_table(*differences(names, tables))
        return
    *parts, total = (stage.cells() for stage in tables[0])
    print_table(COLUMNS, parts, [total])


# === attention ===


def _restored(what, data_dir=None, splits=()):
    """(`Task`, folded model) of a run whose attention is shown; see `configuration.restore_run`."""
    app.import_tensorflow()
    from axial.recipes import configuration
    from axial.serving.export import folded_model

    with working(f"building the network of {what} and reading its weights"):
        task, model = configuration.restore_run(what, data_dir=data_dir, splits=splits)
        if task.evaluator.takes != "photo":
            raise InputError(f"{what}: does {task.evaluator.name}; expected a model that takes photos")
        return task, folded_model(task, model)


class Attention(Flags):
    model = flags.MODEL.but(meaning="a run, its checkpoint, or a shipped model.", needed=True, old=("checkpoint",))
    image = Flag(str, "the photo.", path=flags.IN_FILE, needed=True)
    query = Flag(tuple, "x,y: a query pixel; by default the photo's centre.", read=flags.matched(r"(\d+),(\d+)", "x,y"))
    block = Flag(str, "block to draw, like stage4_block1; by default the last block.")
    output_dir = Flag(str, "folder for the pictures.", path=flags.OUT_FOLDER, needed=True)


def _attention(given):
    """Draws each attention layer of a block to a picture, and prints the pictures' paths."""
    photo = load_photo(given.image)
    height, width = photo.shape[:2]
    queries = {}
    for x, y in given.query or [(width // 2, height // 2)]:
        if not (x < width and y < height):
            raise InputError(f"--query={x},{y}: outside of the photo of {width}x{height} pixels")
        queries[f".{x}-{y}" * (len(given.query) > 1)] = (y + 0.5) / height, (x + 0.5) / width
    flags.check_model(given.model)

    import tensorflow as tf

    from axial.analysis import attention_pictures as pictures

    task, model = _restored(given.model)
    if task.spec.levels != PERCENTILES:
        photo = load_photo(given.image, task.spec.levels)
    stem = os.path.join(given.output_dir, os.path.splitext(os.path.basename(given.image))[0])
    layers = pictures.find_layers(model, given.block)
    for path in pictures.draw_block(stem, model, layers, task.example(tf.constant(photo)), queries=queries):
        say(path)


# === view ===


class View(Flags):
    takes = "[PHOTO] ..."
    model = Attention.declared()["model"].but(kind=tuple, old=())
    block = Flag(tuple, "block to show, like stage4_block1; by default the last block of each stage.")
    data_dir = Flag(str, "folder of converted data, whose ground truth is shown.", path=flags.IN_FOLDER)
    split = flags.SPLIT.but(meaning="split of the photos; by default the run's evaluation split.", needs="data_dir")
    html = flags.HTML.but(needed=True)

    def check(self):
        if len(self.model) > 2:
            raise InputError(f"--model: {len(self.model)} models; expected one or two")
        if len(self.split) > 1:
            raise InputError("--split: view takes one split")
        if len(self.arguments) > 8:
            raise InputError(f"{len(self.arguments)} photos; the page shows at most 8")
        if not self.arguments and not self.data_dir:
            raise InputError("name at least one photo, or the --data_dir and --split that have it")

    def look(self):
        super().look()
        for model in self.model:
            if flags.check_model(model).kind == "export":
                raise InputError(f"--model={model}: an export, whose attention cannot be read; give the run")


def _view(given):
    """Writes the page of one or two models and up to eight photos."""
    photos = [] if given.data_dir else list(dict.fromkeys(given.arguments))
    for path in photos:
        load_photo(path)

    from axial.analysis import view

    models = [_viewed(given, what, photos) for what in dict.fromkeys(given.model)]
    for note in {photo["note"] for model in models for photo in model["photos"] if photo["note"]}:
        say(note, error=True)
    if left_out := view.write_view(given.html, models, given.block):
        say(f"without {', '.join(left_out)}, to keep the page small; --block={left_out[-1]} shows a block", error=True)
    say(given.html)


def _viewed(given, what, photos):
    """The `view_model` of a model."""
    import tensorflow as tf

    from axial.analysis import view
    from axial.weights.restore import find_weights

    task, model = _restored(what, data_dir=given.data_dir, splits=given.split)
    with working(f"reading the attention of {what}"):
        if given.data_dir:
            examples = view.split_examples(task, (*given.split, task.data.eval_split)[0], given.arguments)
        else:
            names = output_names([os.path.basename(path) for path in photos], photos)
            examples = {}
            for name, path in zip(names, photos):
                photo = load_photo(path, task.spec.levels)
                examples[name] = {**task.evaluator.example(photo), **task.example(tf.constant(photo))}
        weights = find_weights(what)[-1]
        return view.view_model(what, task, model, examples, block_names=given.block, weights=weights)


# === Runs ===


class Curves(Flags):
    takes = "RUN ..."
    figure = flags.FIGURE.but(needed=True)


def _curves(given):
    paths = list(dict.fromkeys(path.rstrip("/") for path in given.arguments))
    for path in paths:
        run_file(path)

    from axial.analysis.run_page import draw_curves, read_curves

    names = output_names([os.path.basename(path) for path in paths], paths)
    with working(f"drawing the curves of {', '.join(paths)}"):
        runs = dict(zip(names, map(read_curves, paths)))
        write_whole(given.figure, lambda path: draw_curves(runs, path))
    for run, curves in runs.items():
        say(" ".join([run, *(f"{name}={values[-1]:.3g}" for name, (_, values) in sorted(curves.items()))]))


class Page(Flags):
    takes = "RUN"
    html = flags.HTML.but(needed=True)


def _page(given):
    (model_dir,) = given.arguments
    run_file(model_dir)
    with working(f"making the page of {model_dir}"):
        from axial.analysis.run_page import write_page

        write_page(model_dir, given.html)
    say(f"{model_dir}: {given.html}")


# === input ===


def build_recipe(files, bindings, data_dir):
    """Builds (task, training, optimizer) of a recipe. Without `data_dir`, it uses the sample photos."""
    from axial.data.converters.coco import sample_data_dir
    from axial.recipes import configuration

    configuration.load(files, bindings)
    return configuration.build(data_dir=data_dir or sample_data_dir())


class Input(Flags):
    gin_file = flags.GIN_FILE.but(default=("sample/overfit.gin",))
    gin_binding = flags.GIN_BINDING
    data_dir = flags.DATA_DIR
    batch = flags.BATCH
    step_seconds = Flag(float, "seconds of a training step on the slice.", least=1e-6)
    cores = Flag(int, "CPU cores per host or worker; by default this machine's.", least=1)
    json = flags.JSON
    quick = Flag(bool, "measures for a shorter time.", False)


def _input(given):
    recipes.read(given.gin_file, given.gin_binding)
    with working(f"measuring the input pipeline of {' '.join(given.gin_file)}"):
        from axial.analysis import input_speed
        from axial.data.streams import name_damaged_records

        task, training, _ = build_recipe(given.gin_file, given.gin_binding, given.data_dir)
        unit = "tokens" if task.evaluator.takes == "text" else "images"
        with name_damaged_records(task.data_dir, task.data.train_split):
            result = {"pipeline": input_speed.measure(task, given.quick)}
    say(f"pipeline: {result['pipeline']:.1f} {unit}/s")
    if given.step_seconds:
        batch, seconds, cores = given.batch or training.batch, given.step_seconds, given.cores or os.cpu_count()
        demand = input_speed.demand(task, result["pipeline"], batch, step_seconds=seconds, cores=cores)
        say(*input_speed.demand_lines(demand, batch, unit, step_seconds=seconds, cores=cores))
        result["demand"] = demand
    if given.json:
        write_json(given.json, result)


VERBS = {
    "recipes": (Recipes, _recipes),
    "models": (Flags, _models),
    "model": (Model, _model),
    "zoo": (Flags, _zoo),
    "attention": (Attention, _attention),
    "view": (View, _view),
    "curves": (Curves, _curves),
    "page": (Page, _page),
    "input": (Input, _input),
}
# Maps the names of former verbs to the scripts in experiments/ that replace them.
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
    app.run(VERBS, moved=MOVED)
