"""Weight names of the public Axial-ResNets and Axial-DeepLabs."""

from axial.layers.batch_norm import BatchNormConfig
from axial.models.base import PublicWeights

SOFTMAX = "softmax ignores the offset of a logit"

# csrhddlam's classifiers. The patterns turn our names into the names in its PyTorch state dict.
CSRHDDLAM = PublicWeights(
    source="csrhddlam",
    names=[
        (r"^backbone/stem/conv/kernel", "conv1.weight"),
        (r"^backbone/stem/norm/", "bn1."),
        (r"^backbone/stage(\d+)_block(\d+)/", lambda match: f"layer{int(match[1]) - 1}.{int(match[2]) - 1}."),
        (r"reduce/conv/kernel", "conv_down.weight"),
        (r"reduce/norm/", "bn1."),
        (r"expand/conv/kernel", "conv_up.weight"),
        (r"expand/norm/", "bn2."),
        (r"shortcut/conv/kernel", "downsample.0.weight"),
        (r"shortcut/norm/", "downsample.1."),
        (r"logits/conv/kernel", "fc.weight"),
        (r"logits/conv/bias", "fc.bias"),
        (r"attention/height/", "hight_block."),
        (r"attention/width/", "width_block."),
        (r"\bkernel$", "qkv_transform.weight"),
        (r"query_table$", "relative"),
        (r"qkv_norm/", "bn_qkv."),
        (r"logit_norm/", "bn_similarity."),
        (r"content_output_norm/", "bn_output."),
        (r"gamma$", "weight"),
        (r"beta$", "bias"),
        (r"moving_mean$", "running_mean"),
        (r"moving_variance$", "running_var"),
    ],
    unused={
        r"flatten_index$": "an index that is computed",
        r"num_batches_tracked$": "a count that inference and training do without",
        r"bn_similarity\.bias$": SOFTMAX,
    },
    models={
        ((1, 2, 4, 1), 0.5): "axial_resnet_26_s",
        ((3, 4, 6, 3), 0.5): "axial_resnet_s",
        ((3, 4, 6, 3), 0.75): "axial_resnet_m",
        ((3, 4, 6, 3), 1.0): "axial_resnet_l",
    },
    arguments=dict(average_pool=True, pixels="torchvision"),
    norm=BatchNormConfig(momentum=0.9, epsilon=1e-5, unbiased=True),
)

# The patterns turn a checkpoint's object paths, or variable names, into our names. Before the patterns apply, leading
# underscores of path components are removed.
DEEPLAB2 = PublicWeights(
    source="deeplab2",
    names=[
        (r":0$|^decoder:[^/]+/", ""),
        (r"^encoder:[^/]+/|^backbone/encoder/", "encoder/"),
        (r"^encoder/stem/(conv|batch_norm)/", r"backbone/stem/conv/\1/"),
        (r"^encoder/stage1/", "backbone/stem/"),
        (r"^encoder/", "backbone/"),
        (r"stage(\d)/block(\d+)/", r"stage\1_block\2/"),
        (r"(block\d+)/conv1_bn_act/", r"\1/reduce/"),
        (r"(block\d+)/conv2_bn_act/", r"\1/middle/"),
        (r"(block\d+)/conv[23]_bn/", r"\1/expand/"),
        (r"stem/conv(\d)_bn(_act)?/", r"stem/conv\1/"),
        (r"(height|width)_axis/", r"\1/"),
        (r"(^|/)qkv_kernel$", r"\1kernel"),
        (r"batch_norm_qkv", "qkv_norm"),
        (r"(query|key|value)_rpe/embeddings$", r"\1_table"),
        (r"aspp/proj_conv_bn_act/", "context/"),
        (r"low_level_conv1/", "project_res3/"),
        (r"low_level_conv2/", "project_res2/"),
        (r"fusion_conv1/conv1_bn_act/", "fuse_res3/"),
        (r"fusion_conv2/conv1_bn_act/", "fuse_res2/"),
        (r"(/conv_block|_without_last_layer)/conv1_bn_act/", "/hidden/"),
        (r"^semantic_last_layer/", "semantic_head/logits/conv/"),
        (r"_head(_last_layer|/final_conv)/", "_head/logits/conv/"),
        (r"depthwise/depthwise_conv/", "depthwise/conv/"),
        (r"instance_center_head/", "center_head/"),
        (r"instance_regression_head/", "offset_head/"),
        (r"/batch_norm/", "/norm/"),
    ],
    unused={
        r"/\.OPTIMIZER_SLOT/|^_?(optimizer|model)/|^(global_step|save_counter)$": "state of its training",
        r"batch_norm_similarity/beta$": SOFTMAX,
    },
    models={(3, 6, 3, 3): "axial_swidernet_1_1_1", (9, 18, 9, 9): "axial_swidernet_1_1_3"},
    norm=BatchNormConfig(momentum=0.99, epsilon=1e-3),  # Keras' defaults
)
# Maps each key of `PanopticDeepLab`'s `channels` to the convolutions with that number of output channels.
DECODERS = {
    "semantic": ["semantic_decoder/fuse_res3/pointwise"],
    "semantic_low": ["semantic_decoder/project_res3", "semantic_decoder/project_res2"],
    "semantic_projection": ["semantic_decoder/context"],
    "semantic_head": ["semantic_head/hidden/pointwise"],
    "instance": ["instance_decoder/fuse_res3/pointwise"],
    "instance_low": ["instance_decoder/project_res3", "instance_decoder/project_res2"],
    "instance_projection": ["instance_decoder/context"],
    "center_head": ["center_head/hidden/pointwise"],
    "offset_head": ["offset_head/hidden/pointwise"],
}
