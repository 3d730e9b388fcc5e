"""Configurations as dictionaries: the way there and back, and whatever else a JSON file may hold."""

import copy
import dataclasses
import json
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import foreword as fw
import zoo
from foreword.space import from_dict, resolve
from surroundings import is_one_line, refusal

METHODS = sorted(fw.methods())
settings.register_profile(
    "foreword",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
settings.load_profile("foreword")

LAYERS = st.none() | st.integers(1, 3) | st.lists(st.integers(-3, 2), min_size=1, max_size=3).map(tuple)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def values_of(name, hint, default):
    """Values of a field by its annotation; a text without choices keeps its default."""
    origin, arguments = get_origin(hint), get_args(hint)
    if name == "layers":
        return LAYERS | st.just("upper")
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*(values_of(name, one, default) for one in arguments))
    if hint is type(None):
        return st.none()
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(0, 300)
    if hint is float:
        return st.floats(0, 4, allow_nan=False)
    return st.just(default)


@st.composite
def configurations(draw, name):
    """A method of the registry with any fields that it accepts."""
    method = fw.methods()[name]
    hints = get_type_hints(method)
    fields = {f.name: draw(values_of(f.name, hints[f.name], f.default)) for f in dataclasses.fields(method)}
    error = refusal(lambda: method(**fields))
    assert error is None or is_one_line(error)
    assume(error is None)
    return method(**fields)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=30)
@given(data=st.data())
def test_there_and_back(name, data):
    method = data.draw(configurations(name))
    assert from_dict(json.loads(json.dumps(method.to_dict()))) == method


@pytest.mark.parametrize("name", METHODS)
def test_defaults(name):
    method = fw.methods()[name]()
    assert resolve(name) == method
    assert resolve(method) is method
    assert method.to_dict()["method"] == name == method.name
    assert from_dict({"method": name}) == method == from_dict(method.to_dict())
    assert hash(from_dict(method.to_dict())) == hash(method)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.length = 3


@pytest.mark.parametrize("combine", fw.combines.__all__)
@pytest.mark.parametrize("source", fw.sources.__all__)
def test_points_there_and_back(source, combine):
    made = {}
    for axis, package, name in [("source", fw.sources, source), ("combine", fw.combines, combine)]:
        kind = getattr(package, name)
        made[axis] = kind(**{f.name: 3 for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING})
    point = fw.Point(**made, layers=(0, -1))
    values = json.loads(json.dumps(point.to_dict()))
    assert values["source"]["class"] == source
    assert from_dict(values) == point


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, '"method"'),
        ("prefix-tuning", '"method"'),
        (None, '"method"'),
        ({"method": 3}, '"method"'),
        ({"method": "prefixtuning"}, "did you mean 'prefix-tuning'"),
        ({"method": "prefix-tuning", "lenght": 3}, "no field 'lenght'; it has attention"),
        ({"method": "prefix-tuning", "length": "long"}, "length must be int, not 'long'"),
        ({"method": "prefix-tuning", "length": 2.5}, "length must be int"),
        ({"method": "prefix-tuning", "length": True}, "length must be int"),
        ({"method": "prefix-tuning", "length": -1}, "length must be a positive integer"),
        ({"method": "prefix-tuning", "dropout": float("nan")}, "dropout must be float"),
        ({"method": "prefix-tuning", "layers": [0, "1"]}, "layers must be"),
        ({"method": "prefix-tuning", "reparam": "all"}, "reparam must be"),
        ({"method": "point"}, "source"),
        ({"method": "point", "source": {"class": "Nowhere"}}, "no source 'Nowhere'; there are Direct"),
        ({"method": "point", "source": {"class": "Direct"}}, "length"),
        ({"method": "point", "source": {"class": "Direct", "length": 2}}, "combine"),
        ({"method": "point", "source": {"class": "Direct", "length": 2}, "combine": {"class": "Direct"}}, "no combine"),
    ],
)
def test_what_is_wrong_is_named(values, message):
    with pytest.raises(fw.ForewordError) as error:
        from_dict(values)
    assert is_one_line(error.value)
    assert message in str(error.value)


@settings(max_examples=300)
@given(value=JSON)
def test_no_json_value_raises_another_error(value):
    error = refusal(from_dict, value)
    assert error is None or is_one_line(error)


LLAMA = zoo.make("llama")


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=25)
@given(data=st.data())
def test_no_value_of_a_field_raises_another_error(name, data):
    """A field of the dictionary replaced by any JSON value: refused at once, refused by the model, or right."""
    values = fw.methods()[name]().to_dict()
    field = data.draw(st.sampled_from(sorted(values)))
    values[field] = data.draw(JSON)
    model = copy.deepcopy(LLAMA)
    error = refusal(lambda: fw.attach(model, from_dict(values)))
    if error is not None:
        assert is_one_line(error)
        assert fw.adapters(model) == []
        assert all(parameter.requires_grad for parameter in model.parameters())


@settings(max_examples=120)
@given(data=st.data())
def test_no_adapter_json_raises_another_error(tmp_path, data):
    """A key of adapter.json, at any depth, replaced by any JSON value."""
    if not (tmp_path / "adapter.json").exists():
        fw.attach(copy.deepcopy(LLAMA), fw.PrefixTuning(length=3)).save(tmp_path)
        (tmp_path / "original").write_bytes((tmp_path / "adapter.json").read_bytes())
    config = json.loads((tmp_path / "original").read_text())
    place = config
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    (tmp_path / "adapter.json").write_text(json.dumps(config))
    model = copy.deepcopy(LLAMA)
    error = refusal(fw.load, model, tmp_path)
    if error is not None:
        assert is_one_line(error)
        assert fw.adapters(model) == []


@settings(max_examples=120)
@given(position=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
def test_no_byte_of_the_weights_raises_another_error(tmp_path, position, byte, cut):
    """One byte changed, or everything behind it cut off."""
    if not (tmp_path / "adapter.json").exists():
        fw.attach(copy.deepcopy(LLAMA), fw.PrefixTuning(length=3)).save(tmp_path)
        (weights,) = tmp_path.glob("*.safetensors")
        (tmp_path / "original").write_bytes(weights.read_bytes())
    (weights,) = tmp_path.glob("*.safetensors")
    content = bytearray((tmp_path / "original").read_bytes())
    at = int(position * len(content))
    content[at] = byte
    weights.write_bytes(content[:at] if cut else content)
    model = copy.deepcopy(LLAMA)
    error = refusal(fw.load, model, tmp_path)
    if error is not None:
        assert is_one_line(error)
        assert fw.adapters(model) == []
    else:
        assert not cut
