"""The parameters of every registered model. Counting them takes minutes, so experiments/models.csv keeps them."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal

from axial.io.read import read_rows
from axial.io.show import csv_rows
from axial.io.write import write_text


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a registered model has.

    Attributes:
        model: its name.
        task: what it is for, like 'panoptic'.
        classes: number of classes that it is counted with; pieces of the vocabulary of a translator.
        parameters: trainable numbers without those of batch norms in attention, as the paper counts.
        attention_norms: trainable numbers of these.
    """

    model: str
    task: str
    classes: int
    parameters: int
    attention_norms: int

    def cells(self):
        """The strings of the model's row, in the order of `COLUMNS`."""
        numbers = (self.parameters, self.parameters + self.attention_norms)
        return self.model, self.task, self.classes, *(f"{number / 1e6:.3f} M" for number in numbers)


COLUMNS = ("model", "task", "classes", "parameters", "with attention's batch norms")


def read_models(path):
    """List of the `Counts` of a CSV of `write_models`. Raises InputError."""
    return [row for _, row in read_rows(path, Counts)]


def write_models(path, models):
    """Writes a CSV of `Counts`."""
    write_text(path, csv_rows(Counts, models))


def count(model, canvas, classes=None, arguments=()):
    """(parameters, parameters of attention's batch norms, multiply-adds) of a registered model.

    Args:
        canvas: (height, width) of the image.
        classes: number of classes; by default that of the paper's tables.
        arguments: tuple of pairs (name, value), further arguments of the model.
    """
    from axial.analysis.counts import count_parameters, trace
    from axial.analysis.multiply_adds import count_multiply_adds, total
    from axial.models.registry import find_variant

    built, graph, _ = trace(model, classes or find_variant(model).classes, *canvas, changes=dict(arguments))
    parameters = count_parameters(built)
    return parameters.counted, parameters.attention_norms, total(count_multiply_adds(graph))


def count_models(jobs, progress=lambda done, of, name: None, processes=2):
    """dict from jobs to the results of `count`.

    Args:
        jobs: tuples of arguments of `count`.
        progress: function of the number of models done, the number of all models, and the name of the last one done.
        processes: number of processes that trace in parallel; 1 traces in this process.
    """
    counts = {}
    if processes == 1:
        for job in jobs:
            counts[job] = count(*job)
            progress(len(counts), len(jobs), job[0])
        return counts
    context = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(processes, context, _quiet) as pool:
        futures = {pool.submit(count, *job): job for job in jobs}
        try:
            for future in concurrent.futures.as_completed(futures):
                counts[futures[future]] = future.result()
                progress(len(counts), len(jobs), futures[future][0])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # or it would count the others first
            raise
    return counts


def _quiet():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a traceback
