"""Names of the maps that models return, and of the maps that tasks compute from them on the canvas."""

# The maps that models return.
LOGITS = "logits"  # float32 [N, classes]
SEMANTIC = "semantic_logits"  # float32 [N, h, w, classes]
AUXILIARY = "auxiliary_logits"  # like SEMANTIC, from an earlier layer; in training only
CENTER = "center_heatmap"  # float32 [N, h, w, 1]
OFFSET = "offset_map"  # float32 [N, h, w, 2]: (y, x) from a pixel to the centre of its instance

# Meanings of a map's values, for model cards.
MEANINGS = {
    LOGITS: "class logits; their softmax gives probabilities",
    SEMANTIC: "class logits; the largest is the predicted class",
    CENTER: "heat map of instance centres, 1 at a centre and 0 far away",
    OFFSET: "from a pixel to its instance's centre, (y, x) in pixels of the map",
}

# A task computes these two maps. Post-processing takes them with CENTER and OFFSET.
CLASS = "semantic"  # int32 [N, H, W]
PROBABILITY = "probability"  # float32 [N, H, W, classes]
