"""Counts the parameters, multiply-adds and activation bytes of each part of a model."""

import collections
import dataclasses

from axial.analysis.counts import count_parameters, trace
from axial.analysis.multiply_adds import activation_bytes, count_multiply_adds
from axial.analysis.parts import REST, part_of
from axial.layers.attention.layer import Attention
from axial.models.registry import find_variant

# The Axial-DeepLab paper's tables print parameters without attention's batch norms.
FIGURES = "parameters", "with attention's batch norms", "multiply-adds", "activations"
FORMS = "{:,}", "{:,}", "{:,.3f} B", "{:,.1f} MiB"
COLUMNS = ("part", "output", "span", "heads", *FIGURES)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        part: name of the part; see `part_of`.
        params: parameters; see `ParameterCount.counted`.
        norms: parameters of batch norms inside attention, which `params` leaves out as the paper's tables do.
        macs: multiply-adds.
        activations: bytes of the outputs of its ops; see `activation_bytes`.
        output: shape of its last output, or None.
        spans, heads: distinct spans and heads of its attention layers. None stands for the whole axis.
    """

    part: str
    params: int
    norms: int
    macs: int
    activations: int
    output: tuple | None = None
    spans: tuple = ()
    heads: tuple = ()

    def numbers(self):
        """Parameters without and with attention's batch norms, multiply-adds and activations in units of `FORMS`."""
        return self.params, self.params + self.norms, self.macs / 1e9, self.activations / 2**20

    def cells(self):
        """Strings of the stage's row, in the order of `COLUMNS`."""
        output, heads = " x ".join(map(str, self.output or ())), ", ".join(map(str, self.heads))
        spans = ", ".join("all" if span is None else str(span) for span in self.spans)
        return self.part, output, spans, heads, *self.figures()

    def figures(self):
        """Strings of the stage's numbers, in the order of `FIGURES`."""
        return [form.format(number) for form, number in zip(FORMS, self.numbers())]


def stages(name, num_classes=None, *, batch=1, height=None, width=None):
    """List of the `Stage`s of a registered model on images [batch, height, width, 3]. The last, 'all', is their sum.

    The classes are by default Cityscapes' or ImageNet's, and the sides 1024 x 2048 or, for 1000 classes, 224 x 224.
    """
    classes = find_variant(name).classes
    sides = (224, 224) if classes == 1000 else (1024, 2048)
    model, graph, images = trace(name, num_classes or classes, height or sides[0], width or sides[1], batch=batch)
    counted = count_parameters(model)
    params = counted.parts

    def part_with_weights(op):
        name = part_of(op)
        return name if name in params else REST

    macs = collections.Counter()
    for product in count_multiply_adds(graph):
        macs[part_with_weights(product.name)] += product.needed
    activations = activation_bytes(graph, [images], part_with_weights)
    outputs, spans, heads = {}, collections.defaultdict(dict), collections.defaultdict(dict)
    for op in graph.get_operations():
        for tensor in op.outputs:
            if tensor.dtype.is_floating and tensor.shape.rank in (2, 4) and tensor.shape[0] == batch:
                outputs[part_with_weights(op.name)] = tuple(tensor.shape)
    for layer in model.submodules:
        if isinstance(layer, Attention):
            part = part_of(layer.kernel.name)
            options = layer.spec.options
            spans[part][options.span] = heads[part][options.heads] = True
    table, numbers = [], []
    for part in (*params, REST):
        norms = counted.norm_parts.get(part, 0)
        numbers.append((params.get(part, 0), norms, round(macs[part]), activations.get(part, 0)))
        output = outputs.get(part) if part != REST else None
        table.append(Stage(part, *numbers[-1], output=output, spans=tuple(spans[part]), heads=tuple(heads[part])))
    return [*table, Stage("all", *map(sum, zip(*numbers)))]


def differences(names, tables):
    """(header, rows of the parts, last rows) of a table that compares two models by the results of `stages`."""
    header = ["part", f"parameters of {names[0]}", names[1]]
    header += [text for figure in FIGURES[1:] for text in (figure, names[1])]
    ours, theirs = ({stage.part: stage.figures() for stage in stages} for stages in tables)
    none, rows = ["-"] * len(FORMS), {}
    for part in {**ours, **theirs}:
        rows[part] = [text for pair in zip(ours.get(part, none), theirs.get(part, none)) for text in pair]
    changes = [b - a for a, b in zip(tables[0][-1].numbers(), tables[1][-1].numbers())]
    changes = [form.replace(":", ":+").format(change) for form, change in zip(FORMS, changes)]
    last = [("all", *rows.pop("all")), ("difference", *(text for change in changes for text in ("", change)))]
    return header, [(part, *row) for part, row in rows.items()], last
