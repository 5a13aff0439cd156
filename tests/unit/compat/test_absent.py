"""Names that are refused: they exist, and using one says why and what to use."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.compat.absent import REFUSED, get_refused


def at(path):
    """What a path below mpistrat leads to, through the public names."""
    return functools.reduce(getattr, path.split("."), ms)


@pytest.mark.parametrize("path", REFUSED)
def test_it_is_there_and_says_why_and_what_instead(path):
    found, row = at(path), REFUSED[path]
    assert found is get_refused(path)
    assert f"{found.__module__}.{found.__qualname__}" == f"mpistrat.{path}"
    assert isinstance(found, type) is not row.is_function
    assert row.reason in found.__doc__
    with pytest.raises(ms.RefusedError) as error:
        found("any", thing=1)
    assert str(error.value) == f"mpistrat.{path} is refused: {row.reason}. {row.replacement}"
    assert isinstance(error.value, NotImplementedError)


@pytest.mark.parametrize(
    "path", [f"{path}.{name}" for path, row in REFUSED.items() for name in row.static_methods]
)
def test_methods_of_the_class_are_refused_too(path):
    with pytest.raises(ms.RefusedError, match="is refused"):
        at(path)("grpc", "localhost:1")


@pytest.mark.parametrize("path", [path for path, row in REFUSED.items() if not row.is_function])
def test_asking_for_the_type_is_no_use(path):
    cls = at(path)
    assert not isinstance(ms, cls)

    class Mine(cls):
        pass

    with pytest.raises(ms.RefusedError, match=path.rpartition(".")[2]):
        Mine()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("experimental.ParameterServerStrategy", "ParameterServerStrategy"),
        ("experimental.coordinator.ClusterCoordinator", "coordinator.ClusterCoordinator"),
        ("experimental.coordinator.RemoteValue", "coordinator.RemoteValue"),
    ],
)
def test_other_names_of_the_same(one, other):
    assert at(one) is at(other)


def test_the_names_of_tf_distribute():
    assert tf.distribute.Server is ms.Server
    assert tf.distribute.coordinator.ClusterCoordinator is ms.coordinator.ClusterCoordinator
    assert tf.distribute.ParameterServerStrategy is ms.ParameterServerStrategy
    assert tf.distribute.experimental.partitioners is ms.experimental.partitioners
    assert tf.train.ClusterSpec is ms.cluster_resolver.ClusterSpec


def test_what_is_no_row():
    with pytest.raises(KeyError):
        get_refused("MirroredStrategy")


MODULES = (
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental.coordinator",
    "experimental.partitioners",
    "experimental.rpc",
)


@pytest.mark.parametrize("ask", ["import mpistrat.{0}", "import mpistrat; mpistrat.{0}"])
def test_public_modules_are_found_both_ways_and_start_nothing(ask):
    lines = [ask.format(module) for module in MODULES]
    lines += ["import sys", "print(*sorted(sys.modules))"]
    code = "\n".join(lines)
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(got.stdout.split())
    assert {f"mpistrat.{module}" for module in MODULES} <= loaded
    assert not loaded & {"mpi4py.MPI", "numba", "kubernetes", "googleapiclient"}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_module_is_there(module):
    found = at(module)
    for name in found.__all__:
        assert getattr(found, name).__doc__
