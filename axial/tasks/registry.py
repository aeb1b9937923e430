"""The registry of tasks. To add a task, write a subclass of `Task` and append it to `TASKS`."""

from axial.errors import InputError
from axial.tasks.base import Evaluator
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.panoptic import PanopticTask, SegmentationTask
from axial.tasks.translation.task import TranslationTask

TASKS = [PanopticTask, SegmentationTask, ClassificationTask, DetectionTask, TranslationTask]


def find_evaluator(name: str, where: str) -> Evaluator:
    """The `Evaluator` called `name`. Raises InputError if there is none. The message begins with `where`."""
    evaluators = {task.evaluator.name: task.evaluator for task in TASKS}  # type: ignore[attr-defined]
    if name not in evaluators:
        raise InputError(f"{where}: expected one of {', '.join(evaluators)}, found {name!r}")
    return evaluators[name]
