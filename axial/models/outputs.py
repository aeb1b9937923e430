"""The names of the models' maps, and the maps on the canvas: resized, and averaged over windows, scales and mirrors."""

# What models return.
LOGITS = "logits"  # float32 [N, classes]
SEMANTIC = "semantic_logits"  # float32 [N, h, w, classes]
AUXILIARY = "auxiliary_logits"  # the same from an earlier layer, in training alone
CENTER = "center_heatmap"  # float32 [N, h, w, 1]
OFFSET = "offset_map"  # float32 [N, h, w, 2]: (y, x) from a pixel to the centre of its instance

# What a number of each is, for the cards of models.
MEANINGS = {
    LOGITS: "logits of the classes, any number; their softmax are probabilities",
    SEMANTIC: "logits of the classes, any number; the largest is the class",
    CENTER: "heat of instances' centres, 1 at a centre and 0 far away",
    OFFSET: "from a pixel to its instance's centre, (y, x) in input pixels",
}

# What a task computes from them. Post-processing takes these two, CENTER and OFFSET.
CLASS = "semantic"  # int32 [N, H, W]
PROBABILITY = "probability"  # float32 [N, H, W, classes]
