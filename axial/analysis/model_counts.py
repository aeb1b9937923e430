"""Reads the parameters of every registered model from experiments/models.csv: counting them takes minutes."""

import dataclasses

from axial.io.read import read_rows

COLUMNS = ("model", "task", "classes", "parameters", "with attention's batch norms")


@dataclasses.dataclass(frozen=True)
class Counts:
    """The size of a registered model.

    Attributes:
        model: name of the model.
        task: task of the model, such as 'panoptic'.
        classes: number of classes of the counted model; for a translator, the size of the vocabulary.
        parameters: number of trainable parameters without attention's batch norms, as the paper counts.
        attention_norms: number of trainable parameters of attention's batch norms.
    """

    model: str
    task: str
    classes: int
    parameters: int
    attention_norms: int

    def cells(self):
        """Strings of the model's row, in the order of `COLUMNS`."""
        numbers = (self.parameters, self.parameters + self.attention_norms)
        return self.model, self.task, self.classes, *(f"{number / 1e6:.3f} M" for number in numbers)


def read_models(path):
    """List of `Counts` from a CSV that `experiments/paper/counts.py` writes. Raises InputError."""
    return [row for _, row in read_rows(path, Counts)]
