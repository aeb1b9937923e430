"""The tasks that axial has. A task of one's own is a subclass of `Task` and an entry of `TASKS`."""

from axial.errors import InputError
from axial.io.read import LARGEST_JSON, read_file
from axial.tasks.classification.task import ClassificationTask
from axial.tasks.detection.task import DetectionTask
from axial.tasks.segmentation.panoptic import PanopticTask
from axial.tasks.segmentation.semantic import SegmentationTask
from axial.tasks.translation.task import TranslationTask

TASKS = [PanopticTask, SegmentationTask, ClassificationTask, DetectionTask, TranslationTask]


def find_evaluation(name, where):
    """The `Evaluation` of a name. Raises InputError, which begins with `where`, if no task has it."""
    known = {task.evaluation.name: task.evaluation for task in TASKS}
    if name not in known:
        raise InputError(f"{where}: expected one of {', '.join(known)}, found {name!r}")
    return known[name]


def evaluation_of_results(path):
    """The `Evaluation` whose results another program wrote to a JSON."""
    is_list = read_file(path, LARGEST_JSON).lstrip()[:1] == b"["
    readers = [task.evaluation for task in TASKS if task.evaluation.reader]
    return next(evaluation for evaluation in readers if evaluation.reader.reads_list == is_list)
