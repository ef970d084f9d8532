"""Files of a checkpoint, digests of tensors, and tensors on their way to the host."""

import json
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from pytest_fp8.worker.checkpoint import stores  # noqa: E402
from pytest_fp8.worker.tensors import digests  # noqa: E402
from pytest_fp8.worker.training import host_copies  # noqa: E402
from pytest_fp8.worker.training.seed_values import SeedValues  # noqa: E402

pytestmark = pytest.mark.slow

TENSORS = {f"layers.{i}.weight": torch.arange(i, i + 64, dtype=torch.bfloat16).reshape(8, 8) for i in range(5)}


@pytest.mark.parametrize(("store", "dtype"), [("safetensors", "BF16"), ("dcp", "bfloat16")])
def test_tensors_and_what_is_none_come_back(tmp_path, store, dtype):
    given = {**TENSORS, "count": torch.tensor(3), "shared": TENSORS["layers.0.weight"][2:4]}
    stores.write(tmp_path, store, given, {"a": [1, None, torch.tensor(7)]})
    found, tree = stores.read(tmp_path, store, torch.device("cpu"))
    assert tree == {"a": [1, None, torch.tensor(7)]}
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in given.items()}
    assert stores.dtypes_on_disk(tmp_path, store)["layers.3.weight"] == dtype


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        stores.write(tmp_path / "new", "dcp", TENSORS, {"a": object()})
    assert not (tmp_path / "new").exists()


def test_containers_and_their_keys_come_back_as_they_were():
    milestones = Counter({30: 1, 60: 2})
    given = {"a": [1, (2.5, None, "b")], 3: {"x": torch.ones(2)}, "m": milestones, "type": torch.bfloat16}
    leaves = {}
    pack = json.loads(json.dumps(stores.packed("", given, leaves)))
    found = stores.unpacked(pack, leaves)
    assert found[3].pop("x") is given[3].pop("x")
    assert found == given
    assert type(found["m"]) is Counter


def test_different_contents_have_different_leaves():
    def of(value):
        leaves = {}
        stores.packed("x", value, leaves)
        return leaves

    assert of({"a": [1, 2.5, None, "b"]}) == of({"a": (1, 2.5, None, "b")})
    assert of({"a": [1]}) != of({"a": [2]}) != of({"b": [2]})
    assert list(of({"a": [torch.ones(2)]})) == ["x.a[0]"]


class Foreign(torch.Tensor):
    """A tensor class that no library has declared safe to load."""

    def __tensor_flatten__(self):
        return ["part"], None


def test_a_class_that_is_not_declared_safe_is_not_loaded():
    value = torch.zeros(2).as_subclass(Foreign)
    value.part = torch.zeros(2)
    leaves = {}
    pack = stores.packed("w", value, leaves)
    with pytest.raises(stores.UnstorableStateError, match=r"test_stores\.Foreign"):
        stores.unpacked(pack, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.bfloat16], ids=str)
def test_digests_tell_values_signs_and_places_apart(dtype):
    value = (torch.tensor([1 + 2j, 3 + 4j]) if dtype.is_complex else torch.tensor([1.0, 3.0])).to(dtype)
    given = {"one": value, "same": value.conj().conj().clone(), "negated": -value, "turned": value.flip(0)}
    more = {"conjugate": value.conj()} if dtype.is_complex else {}
    found = digests(given | more)
    assert found["one"] == found["same"]
    assert len(set(found.values())) == 3 + len(more)


DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (64,), (5, 7), (3, 0, 2)], ids=str)
def test_what_goes_through_a_small_buffer_is_the_same_to_the_bit(dtype, shape):
    value = (3 * torch.randn(shape)).to(dtype)
    odd = value[::2] if value.dim() else value.expand(5)
    for given in (value, value.t() if value.dim() == 2 else value, odd, value.reshape(-1)[1:]):
        found = host_copies.staged(given, torch.empty(64, dtype=torch.uint8))
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert found.float().equal(given.float())


def test_what_is_on_the_host_is_not_copied():
    assert all(value is TENSORS[name] for name, value in host_copies.on_host(TENSORS).items())


class Wrapped(torch.Tensor):
    """What DTensors and torchao's weights are: a class of their own."""


def test_plain_tensors_and_parameters_of_the_device_are_copied_and_no_others():
    wrapped, weight = torch.ones(3).as_subclass(Wrapped), torch.nn.Parameter(torch.ones(2, 3))
    given = {**TENSORS, "weight": weight, "wrapped": wrapped}
    found = host_copies.on_host(given, device="cpu")
    assert found["wrapped"] is wrapped
    assert all(
        value is not given[name] and value.equal(given[name]) for name, value in found.items() if name != "wrapped"
    )
    assert found["weight"].data_ptr() != weight.data_ptr()


TABLE = torch.ones(2, 3)


def odd_model():
    """A model with all that a user's may have: tied, strided, expanded, negated, of other classes and layouts."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 5))
    model[1].weight = torch.nn.Parameter(model[0].weight.t())
    model.register_parameter("tied", model[0].bias)
    both = torch.randn(4, 2).bfloat16()
    model.register_parameter("column", torch.nn.Parameter(both[:, 0]))
    model.register_parameter("single", torch.nn.Parameter(both[:1, 0]))
    for name, value in {
        "one": torch.ones(()).bfloat16().expand(6),
        "turn": torch.randn(3, dtype=torch.complex64),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "wrapped": torch.ones(3).as_subclass(Wrapped),
        "sparse": torch.eye(3).to_sparse(),
        "none": torch.empty(0, 3),
        "count": torch.arange(3),
        "shared": TABLE,
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    }.items():
        model.register_buffer(name, value)
    return model


def test_the_values_of_a_model_come_to_the_host_and_it_keeps_its_own(monkeypatch):
    monkeypatch.setattr(host_copies, "STAGE_BYTES", 64)
    model = odd_model()
    given = SeedValues.of(model)
    found = given.on_host(device="cpu")
    assert found.parameters["tied"] is found.parameters["0.bias"]
    assert model.shared is TABLE
    assert found.buffers["shared"] is not TABLE
    for before, after in ((given.parameters, found.parameters), (given.buffers, found.buffers)):
        assert before.keys() == after.keys()
        for name, value in before.items():
            same = [each.dequantize() if each.is_quantized else each.to_dense() for each in (value, after[name])]
            assert same[0].equal(same[1]), name
    assert all(value.data_ptr() != given.parameters[name].data_ptr() for name, value in found.parameters.items())


@pytest.mark.parametrize(("ranks", "most", "staged"), [(1, 1000, True), (2, 1000, False), (1, 100, False)])
def test_what_dcp_writes_is_copied_first_where_one_rank_writes_it_all_and_it_fits(
    tmp_path, monkeypatch, ranks, most, staged
):
    copied = []
    monkeypatch.setattr(stores, "on_host", lambda entries: copied.append(len(entries)) or entries)
    monkeypatch.setattr(stores, "MOST_ON_HOST", most)
    monkeypatch.setattr(stores, "ranks", lambda: ranks)
    monkeypatch.setattr("torch.distributed.checkpoint.save", lambda *_, **__: None)
    stores.write(tmp_path, "dcp", TENSORS, None)
    assert copied == ([5] if staged else [])
