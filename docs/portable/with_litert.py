"""Lists the segments of a photo: python with_litert.py MODEL/model.tflite PHOTO. Needs ai-edge-litert and pillow."""

import json
import sys
import zipfile

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from PIL import Image

run = Interpreter(sys.argv[1]).get_signature_runner()
names = json.loads(zipfile.ZipFile(sys.argv[1]).read("axial.json"))["class_names"]
photo = np.asarray(Image.open(sys.argv[2]).convert("RGB"))  # uint8 [h, w, 3]
outputs = run(image=photo)
for i, label in enumerate(outputs["segment"]):
    pixels, box = np.count_nonzero(outputs["panoptic"] == label), outputs["segment_box"][i]
    print(label, names[outputs["segment_class"][i]], f"{outputs['segment_score'][i]:.3f}", pixels, *box)
