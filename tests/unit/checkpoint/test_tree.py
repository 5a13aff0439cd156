"""Names of variables: the ways to them."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

import mpistrat as ms

Pair = namedtuple("Pair", "left right")


class Layer:
    def __init__(self, w):
        self.w = w
        self.rate = 0.1
        self.sizes = [3, 4]
        self.notes = {"what": "a layer"}


class Model:
    def __init__(self):
        self.layers = [Layer(ms.Variable(1.0)), Layer(ms.Variable(2.0))]
        self.parent = self
        self.strategy = ms.get_strategy()
        self.rng = np.random.default_rng(0)


def variables(root, trees):
    return ms.Checkpoint(root, **trees).variables()


def names(**trees):
    return list(variables(None, trees))


def test_mappings_sequences_and_objects():
    v = ms.Variable(0)
    assert names(a=v) == ["a"]
    assert names(a={"x": v, 3: ms.Variable(1)}) == ["a/3", "a/x"]
    assert names(a=[v, (ms.Variable(1),)]) == ["a/0", "a/1/0"]
    assert names(a=Pair(v, ms.Variable(1))) == ["a/left", "a/right"]
    assert names(a=SimpleNamespace(b=v, c=3)) == ["a/b"]
    assert names(m=Model()) == ["m/layers/0/w", "m/layers/1/w"]
    assert names(a=v, b=None) == ["a"]
    loss = SimpleNamespace(loss=ms.metrics.Mean())
    assert names(m=loss) == ["m/loss/count", "m/loss/total"]


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = ms.Variable(0)


class Named(dict):
    pass


def test_slots_deques_and_attributes_of_containers():
    holder = Layer(ms.Variable(0))
    holder.slotted, holder.queue = Slotted(), deque([ms.Variable(1)])
    assert names(h=holder) == ["h/queue/0", "h/slotted/a", "h/w"]
    named = Named(x=ms.Variable(0))
    named.extra = ms.Variable(1)
    assert names(n=named) == ["n/extra", "n/x"]
    with pytest.raises(ms.StructureError, match="a set of the checkpoint holds variables"):
        names(h=SimpleNamespace(s={ms.Variable(0)}))


class Fresh(Mapping):
    """Makes what it holds when it is asked."""

    def __init__(self):
        self._kept = {name: ms.Variable(0) for name in "abcdef"}

    def __getitem__(self, key):
        return [self._kept[key]]

    def __iter__(self):
        return iter(self._kept)

    def __len__(self):
        return len(self._kept)


def test_containers_that_are_made_when_they_are_asked_for():
    assert {f"m/{name}/0" for name in "abcdef"} <= set(names(m=Fresh()))


def test_it_is_the_variables_that_are_found():
    model = Model()
    found = variables(None, {"m": model})
    assert found["m/layers/1/w"] is model.layers[1].w


def test_a_root_has_names_of_its_own():
    model, v = Model(), ms.Variable(0)
    assert list(variables(model, {"step": v})) == ["layers/0/w", "layers/1/w", "step"]
    assert list(variables({"w": v}, {})) == ["w"]


def test_one_variable_may_have_two_names():
    v = ms.Variable(0)
    assert variables(None, {"a": v, "b": [v]}) == {"a": v, "b/0": v}


def test_a_checkpoint_may_be_in_another(tmp_path):
    """Under the names that TensorFlow 2.18 gives: inner/v."""
    v, w = ms.Variable(1.0), ms.Variable(2.0)
    inner = ms.Checkpoint({"root": w}, v=v, step=4, rates=[0.5])
    outer = ms.Checkpoint(inner=inner, parts=[ms.Checkpoint(v=ms.Variable(3.0))])
    inner.again = inner
    assert list(outer.variables()) == ["inner/root", "inner/v", "parts/0/v"]
    assert list(ms.Checkpoint(ms.Checkpoint(v=v)).variables()) == ["v"]
    path = outer.save(tmp_path / "ckpt")
    inner.step, inner.rates = 5, []
    v.assign(0.0), w.assign(0.0)
    outer.restore(path).assert_consumed()
    assert (inner.step, inner.rates, float(v), float(w)) == (4, [0.5], 1.0, 2.0)


def test_names_do_not_lead_out_of_an_archive():
    v = ms.Variable(0)
    assert names(a={"../x": v}) == ["a/%2E.%2Fx"]
    assert names(a={"..": v}) == ["a/%2E."]
    assert names(a={"\0": v, "ä": ms.Variable(1)}) == ["a/%00", "a/%C3%A4"]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"w": b"3"}, "'a/w' of the checkpoint is b'3' (bytes), which cannot be saved"),
        ([np.array(["x"])], "leaf 'a/0'"),
        (iter("x"), "of the checkpoint is <str"),
        ({"values.json": None, "v": {1, 2}}, "'a/v' of the checkpoint is {1, 2} (set)"),
        (ms.Checkpoint(), "a of the checkpoint (Checkpoint) holds no variable"),
        (ms.Checkpoint(x=b"3"), "'a/x' of the checkpoint is b'3' (bytes), which cannot be saved"),
        (SimpleNamespace(w=3), "a of the checkpoint (SimpleNamespace) holds no variable"),
    ],
)
def test_what_would_not_be_saved_is_told(tree, text):
    with pytest.raises((ms.StructureError, ms.LeafTypeError)) as error:
        variables(None, {"a": tree})
    assert text in str(error.value)


def test_two_variables_with_one_name_are_an_error():
    one, two = ms.Variable(0), ms.Variable(1)
    with pytest.raises(ms.StructureError, match="have the name 'a/1'"):
        variables(None, {"a": {1: one, "1": two}})
    with pytest.raises(ms.StructureError, match="have the name 'w'"):
        variables({"w": one}, {"w": two})
    with pytest.raises(ms.StructureError, match=r"have the name 'values\.json'"):
        variables({"values.json": one}, {})


def test_mappings_to_be_read_only_come_back_as_dicts(tmp_path):
    checkpoint = ms.Checkpoint(config=MappingProxyType({"lr": 0.1, "deep": {"a": 1}}))
    path = checkpoint.save(tmp_path / "c")
    checkpoint.config = MappingProxyType({"lr": 0.2, "deep": {"a": 2}})
    checkpoint.restore(path)
    assert checkpoint.config == {"lr": 0.1, "deep": {"a": 1}}
