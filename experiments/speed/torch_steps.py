"""Runs one step of csrhddlam/axial-deeplab for each line of standard input, in a Python with PyTorch, for peers.py.

    CSRHDDLAM=CHECKOUT python torch_steps.py WORK SIZE

After each step it prints the largest number of bytes of memory that it has held.
"""

import json
import os
import sys


def resident(name):
    """Returns this process's memory in bytes: 'VmRSS' is what it holds now, 'VmHWM' the most that it has held."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def make_step(work, size):
    """Returns a function that runs the step of `benchmark.make_step(work, 'ours')`. `size` is [N, h, w, channels]."""
    import torch

    sys.path[:0] = [os.path.join(os.environ["CSRHDDLAM"], "lib")]
    from models import axialnet

    torch.set_num_threads(os.cpu_count())
    images, height, width, channels = size
    x = torch.randn(images, channels, height, width)
    is_layer, training = work.startswith("layer"), "train" in work
    if is_layer:
        sides = (height, False), (width, True)
        pair = [axialnet.AxialAttention(channels, channels, 8, side, width=is_width) for side, is_width in sides]
        model = torch.nn.Sequential(*pair)
    else:
        model = axialnet.axial50l()
    model.train(training)
    x.requires_grad_(is_layer and training)

    def train():
        model.zero_grad()
        model(x).square().mean().backward()

    @torch.no_grad()
    def infer():
        model(x)

    return train if training else infer


if __name__ == "__main__":
    step = make_step(sys.argv[1], json.loads(sys.argv[2]))
    for _ in sys.stdin:
        step()
        print(resident("VmHWM"), flush=True)
