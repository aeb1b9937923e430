"""Weights: our own files, and conversion from and to other public implementations.

pytorch.py      reads and writes files of torch.save without PyTorch
checkpoint.py   reads TensorFlow's object checkpoints (a prefix, a folder or an archive) and .h5 files of Keras
names.py        maps weight names and axes of other implementations to ours; the tables are in `public_weights.py` of
                each model's folder
convert.py      converts the files of each source, and uses or reports every tensor
interchange.py  reads and writes safetensors files
card.py         writes the model card, README.md of a model's folder
restore.py      finds and restores our weights, and initialises a training from weights; `axial.load` calls it
source.py       finds the model or weights at a path, on the hub or under a name of the zoo; all commands use it
zoo.py          reads experiments/zoo.csv, the list of public checkpoints
"""
