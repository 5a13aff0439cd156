"""A recipe for Spack. Not built here: put it into a repository of your own, and say what is wrong.

spack repo create ours; mkdir -p ours/packages/py-mpistrat; cp package.py there; spack repo add ours
"""

from spack.package import *


class PyMpistrat(PythonPackage):
    """The programming model of tf.distribute for NumPy on MPI."""

    # No homepage yet: build from a checkout, with `spack dev-build py-mpistrat@main`.
    license("Apache-2.0")
    version("main")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@64:", type="build")
    depends_on("py-numpy@2:", type=("build", "run"))
    depends_on("py-numba@0.60:", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-optree@0.12.1:", type=("build", "run"))
    depends_on("py-xxhash@3:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.5:", type=("build", "run"))
