"""Weights of other public implementations, in and out.

pytorch.py      torch.save's files, read and written without PyTorch
checkpoint.py   TensorFlow's object checkpoints (a prefix, a folder or an archive) and .h5 files of Keras
names.py        their names and axes, and ours
convert.py      one source each: the model that a file holds, every tensor used or named
"""
