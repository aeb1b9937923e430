"""Weight names of the public ResNets."""

from axial.layers.batch_norm import BatchNormConfig
from axial.models.base import PublicWeights

# The patterns turn the layer names of tf_keras.applications' ResNets, version 1, into our names.
KERAS = PublicWeights(
    source="keras_applications",
    names=[
        (r"^predictions/", "logits/conv/"),
        (r"^conv1_(conv|bn)/", r"backbone/stem/\1/"),
        (r"^conv([2-5])_block(\d+)_", r"backbone/stage\1_block\2/"),
        *((f"/{number}_", f"/{layer}/") for number, layer in enumerate(("shortcut", "reduce", "middle", "expand"))),
        (r"/bn/", "/norm/"),
    ],
    models={(3, 4, 6, 3): "resnet_50", (3, 4, 23, 3): "resnet_101", (3, 8, 36, 3): "resnet_152"},
    arguments=dict(stride_first=True, pixels="caffe"),
    norm=BatchNormConfig(momentum=0.99, epsilon=1.001e-5, unbiased=True),
)
