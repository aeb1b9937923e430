"""Weights of other public implementations, in and out, and of ours for others.

pytorch.py      torch.save's files, read and written without PyTorch
checkpoint.py   TensorFlow's object checkpoints (a prefix, a folder or an archive) and .h5 files of Keras
names.py        their names and axes, and ours; `public_weights.py` of a model's home has the tables
convert.py      one source each: the model that a file holds, every tensor used or named
interchange.py  safetensors files
card.py         README.md of a model's folder, a model card with a YAML head
restore.py      finds weights of ours, restores them, and starts a training from them; `axial.load` is over it
source.py       what lies at a path or under a shipped model's name: asked once, for everyone
"""
