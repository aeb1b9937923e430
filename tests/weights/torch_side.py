"""Runs csrhddlam/axial-deeplab in a Python with PyTorch, for test_against_torch.py, which has no PyTorch.

    CSRHDDLAM=CHECKOUT python torch_side.py logits MODEL OUT    OUT/photos.npy -> OUT/net.pth, OUT/logits.npy
    CSRHDDLAM=CHECKOUT python torch_side.py train MODEL OUT     OUT/batches.npz -> OUT/net.pth, OUT/float32.npz, float64

Networks have the random weights of their constructor, except for the scale of each block's last batch norm, which is
0.1. The constructor's 0 stops the gradients of the layers before the scale. With 1, each block would more than double
rounding errors.
"""

import os
import sys

import numpy as np
import torch

sys.path[:0] = [os.path.join(os.environ["CSRHDDLAM"], "lib")]
from models import axialnet  # noqa: E402, I001, of CSRHDDLAM
from utils import cross_entropy_with_label_smoothing  # noqa: E402

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of torchvision, for pixels from 0 to 1
RATE = 0.05 * 8 / 128  # csrhddlam's rate for a batch of 128, scaled to a batch of 8


def photos(images, dtype):
    """Converts images [N, h, w, 3] from -1 to 1 to the input of csrhddlam's networks, normalised [N, 3, h, w]."""
    images = (images.astype(np.float64) + 1) / 2
    return torch.tensor(((images - MEAN) / DEVIATION).transpose(0, 3, 1, 2).copy()).to(dtype)


def logits(model, out):
    """Sets random batch norm parameters and statistics. Writes the network and its logits [photos, classes]."""
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif name.endswith("running_mean") or (value.dim() == 1 and name.endswith("bias")):
            value.normal_(0, 0.1)
        elif value.dim() == 1 and name.endswith("weight"):
            value.mul_(torch.empty_like(value).normal_(1, 0.1))
    torch.save({"net": model.state_dict(), "epoch": 0}, os.path.join(out, "net.pth"))
    images = np.load(os.path.join(out, "photos.npy"))
    with torch.no_grad():
        rows = [model.eval()(photos(image[None], torch.float32)) for image in images]
    np.save(os.path.join(out, "logits.npy"), torch.cat(rows).numpy())


def train(model, out):
    """Writes losses, gradients of step 1, and weights after the first and last step. float64 trains one step."""
    torch.save({"net": model.state_dict(), "epoch": 0}, os.path.join(out, "net.pth"))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with np.load(os.path.join(out, "batches.npz")) as batches:
        images, labels = batches["images"], torch.tensor(batches["labels"])
    for dtype in (torch.float32, torch.float64):
        model.load_state_dict(start)
        model = model.to(dtype).train()
        model.load_state_dict(start)
        optimizer, results, losses = torch.optim.SGD(model.parameters(), RATE), {}, []
        steps = len(images) if dtype == torch.float32 else 1
        for image, label in zip(images[:steps], labels):
            optimizer.zero_grad()
            loss = cross_entropy_with_label_smoothing(model(photos(image, dtype)), label)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == 1:
                results |= {f"gradient/{n}": p.grad.numpy().copy() for n, p in model.named_parameters()}
                results |= {f"first/{n}": v.numpy().copy() for n, v in model.state_dict().items()}
        results |= {f"last/{n}": v.numpy() for n, v in model.state_dict().items()}
        np.savez(os.path.join(out, f"{str(dtype).split('.')[-1]}.npz"), losses=losses, **results)


def main():
    verb, name, out = sys.argv[1:]
    torch.manual_seed(11)
    classes = 1000 if verb == "logits" else 10
    model = getattr(axialnet, name)(num_classes=classes, zero_init_residual=False)
    for name, value in model.state_dict().items():
        if name.startswith("layer") and name.endswith(".bn2.weight"):
            value.fill_(0.1)
    {"logits": logits, "train": train}[verb](model, out)


if __name__ == "__main__":
    main()
