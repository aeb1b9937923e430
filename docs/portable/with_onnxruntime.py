"""Lists the segments of a photo: python with_onnxruntime.py MODEL/model.onnx PHOTO. Needs onnxruntime and pillow."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1])
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
photo = np.asarray(Image.open(sys.argv[2]).convert("RGB"))  # uint8 [h, w, 3]
outputs = dict(zip([x.name for x in session.get_outputs()], session.run(None, {"image": photo})))
for i, label in enumerate(outputs["segment"]):
    pixels, box = np.count_nonzero(outputs["panoptic"] == label), outputs["segment_box"][i]
    print(label, names[outputs["segment_class"][i]], f"{outputs['segment_score'][i]:.3f}", pixels, *box)
