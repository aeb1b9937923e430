"""The parameters of every registered model. Counting them takes minutes, so experiments/models.csv keeps them."""

import dataclasses

from axial.io.read import read_rows

COLUMNS = ("model", "task", "classes", "parameters", "with attention's batch norms")


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


def read_models(path):
    """List of the `Counts` of a CSV that `experiments/paper/counts.py` writes. Raises InputError."""
    return [row for _, row in read_rows(path, Counts)]
