"""The task of semantic segmentation by windows that slide over a photo, as the spatial-attention study has it."""

from axial.data.specs import DatasetSpec
from axial.io.check import BelowOne, Scales, check_arguments
from axial.models.registry import ModelConfig
from axial.tasks.segmentation.canvas_maps import sliding
from axial.tasks.segmentation.feed import DataConfig
from axial.tasks.segmentation.losses import LossConfig
from axial.tasks.segmentation.panoptic import PanopticTask


class SegmentationTask(PanopticTask):
    """What a trainer, an evaluator and an exporter need to know of a network that only names the class of each pixel.

    It is a `PanopticTask` without instances, whose network sees windows of the training crop's size. Checkpoints are
    compared by mIoU.

    Args:
        model, data, data_dir, multi_scale, spec: see `PanopticTask`.
        loss: `LossConfig`.
        overlap: share of a window that the next one covers again; a third in CCNet's code.
    """

    models = "segmentation", "panoptic"

    def __init__(
        self,
        model: ModelConfig,
        data: DataConfig,
        data_dir: str,
        loss: LossConfig = LossConfig(top_k=1.0),
        multi_scale: Scales = (0.75, 1, 1.25, 1.5, 1.75, 2),
        overlap: BelowOne = 1 / 3,
        spec: DatasetSpec | None = None,
    ):
        super().__init__(model, data, data_dir, loss, multi_scale=multi_scale, instances=False, spec=spec)
        self.overlap = overlap
        check_arguments(self)

    def network(self, model):
        """The function from images to maps that inference runs: the model on windows."""
        return sliding(model, self.data.crop, self.overlap)

    def settings(self):
        """What predictions depend on beside the weights and the canvas, for JSON."""
        return {**super().settings(), "window": self.data.crop, "overlap": self.overlap}
