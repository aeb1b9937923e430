"""The tasks that axial has. A task of one's own is a subclass of `Task` and an entry of `TASKS`."""

from axial.errors import InputError
from axial.tasks.base import Evaluation
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.panoptic import PanopticTask, SegmentationTask
from axial.tasks.translation.task import TranslationTask

TASKS = [PanopticTask, SegmentationTask, ClassificationTask, DetectionTask, TranslationTask]


def find_evaluation(name: str, where: str) -> Evaluation:
    """The `Evaluation` of a name. Raises InputError, which begins with `where`, if no task has it."""
    known = {task.evaluation.name: task.evaluation for task in TASKS}  # type: ignore[attr-defined]
    if name not in known:
        raise InputError(f"{where}: expected one of {', '.join(known)}, found {name!r}")
    return known[name]
