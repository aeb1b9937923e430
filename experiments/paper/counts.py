"""Counts the parameters and multiply-adds in the tables of experiments/ that axial reads (minutes for each table).

%s models      models.csv: the parameters of every registered model
%s steps       steps.csv: the multiply-adds and activation bytes of one example, for the model of each recipe
%s zoo         the counts in zoo.csv, and ZOO.md
"""

import concurrent.futures
import multiprocessing
import os
import signal

import msgspec

from axial.analysis.counts import count_parameters, trace
from axial.analysis.model_counts import Counts
from axial.analysis.multiply_adds import activation_bytes, count_multiply_adds, total
from axial.analysis.step_cost import Step
from axial.cli import app
from axial.cli.flags import Flags
from axial.io import show
from axial.io.paths import experiments_dir, inside
from axial.io.write import write_text
from axial.models.registry import VARIANTS, find_variant
from axial.recipes import read_recipes
from axial.weights import zoo
from axial.weights.convert import PUBLIC
from axial.weights.interchange import read_safetensors
from axial.weights.source import SHIPPED_DIR
from axial.weights.zoo import SHIPPED
from pages import csv_rows, link, write_block

COUNTED_TASKS = ("panoptic", "segmentation", "classification")  # tasks whose models take one photo of a fixed size


def count(model, canvas, classes=None, arguments=()):
    """Returns (parameters, parameters of the batch norms inside attention, multiply-adds) of a registered model.

    Args:
        canvas: (height, width) of the image.
        classes: number of classes; by default `Variant.classes`.
        arguments: tuple of pairs (name, value) of additional arguments of the model.
    """
    built, graph, _ = trace(model, classes or find_variant(model).classes, *canvas, changes=dict(arguments))
    parameters = count_parameters(built)
    return parameters.counted, parameters.attention_norms, total(count_multiply_adds(graph))


def count_models(jobs, processes=2):
    """Runs `count` for each job and shows a progress bar. Returns a dict from each job to its result.

    Args:
        jobs: list of tuples, the positional arguments of `count`. All tuples have the same length.
        processes: number of processes that trace in parallel; 1 traces in this process.
    """
    context = multiprocessing.get_context("spawn")  # TensorFlow does not work in a forked process
    with concurrent.futures.ProcessPoolExecutor(processes, context, _quiet) as pool:
        results = (map if processes == 1 else pool.map)(count, *zip(*jobs))
        return dict(zip(jobs, show.progress(results, total=len(jobs), unit="model")))


def _quiet():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a traceback


# === The tables ===


def count_variants(names, processes=2):
    """Returns the list of the `Counts` of the registered models with these names."""
    counts = count_models([(name, (65, 65)) for name in names], processes)
    variants = {name: find_variant(name) for name in names}
    return [Counts(name, v.task, v.classes, *counts[name, (65, 65)][:2]) for name, v in variants.items()]


def count_step(model, canvas):
    """Returns the `Step` of a registered model, counted from its traced graph."""
    _, graph, images = trace(model, find_variant(model).classes, *canvas)
    written = activation_bytes(graph, [images], lambda name: "all")
    return Step(model, "x".join(map(str, canvas)), total(count_multiply_adds(graph)), sum(written.values()))


def count_checkpoint(row):
    """Returns (trainable parameters, multiply-adds), as strings, of the network whose weights a `ZooRow` lists."""
    height, width = map(int, row.photo.split("x"))
    classes, arguments = find_variant(row.model).classes, PUBLIC[row.source].arguments if row.source in PUBLIC else {}
    if row.source == SHIPPED:
        file = inside(os.path.dirname(os.path.dirname(SHIPPED_DIR)), row.file, f"file of {row.checkpoint}")
        classes = read_safetensors(file)[0].num_classes
    model, graph, _ = trace(row.model, classes, height, width, changes=arguments)
    products, module = count_multiply_adds(graph), model
    if row.holds == "backbone":
        products, module = [p for p in products if "/backbone/" in f"/{p.name}"], model.backbone
    return str(sum(w.shape.num_elements() for w in module.trainable_weights)), str(total(products))


def zoo_markdown(rows):
    """Returns the zoo as a Markdown table, followed by the commands of each checkpoint."""
    cells = []
    for row in rows:
        values = dict(zip(zoo.COLUMNS, zoo.cells(row)))
        values["name"], values["model"] = show.code(values["name"]), show.code(values["model"])
        values["published"] = link(values["published"], row.published_at)
        name, told = os.path.basename(row.file), values["file"].removeprefix(row.file)
        address = f"../{row.file}" if row.source == SHIPPED else row.file  # relative to experiments/
        values["file"] = show.Markdown(link(name, address) + show.markdown(told))
        cells.append(values.values())
    lines = show.markdown_table(zoo.COLUMNS, cells)
    for row in rows:
        lines += ["", f"{show.code(row.name)}:", ""]
        for command in zoo.commands(row):
            lines += show.broken(command)
    return "\n".join(lines)


# === The command ===


class Counting(Flags):
    """No flags."""


def _path(name):
    return os.path.join(experiments_dir(), name)


def _models(_):
    write_text(_path("models.csv"), csv_rows(Counts, count_variants(VARIANTS)))


def _steps(_):
    models = {recipe.model: recipe.canvas for recipe in reversed(read_recipes()) if recipe.canvas}
    models = {name: models[name] for name in sorted(models) if find_variant(name).task in COUNTED_TASKS}
    steps = [count_step(name, canvas) for name, canvas in show.progress(models.items(), unit="model")]
    write_text(_path("steps.csv"), csv_rows(Step, steps))


def _zoo(_):
    rows, counts = [], {}
    for row in show.progress(zoo.read_zoo(), unit="checkpoint"):
        key = row.model, row.holds, row.photo
        if key not in counts:
            counts[key] = count_checkpoint(row)
        rows.append(msgspec.structs.replace(row, params=counts[key][0], macs=counts[key][1]))
    write_text(_path("zoo.csv"), show.csv_text([zoo.ZooRow.__struct_fields__, *map(msgspec.structs.astuple, rows)]))
    write_block(_path("ZOO.md"), "zoo", zoo_markdown(rows))


if __name__ == "__main__":
    app.run({"models": (Counting, _models), "steps": (Counting, _steps), "zoo": (Counting, _zoo)})
