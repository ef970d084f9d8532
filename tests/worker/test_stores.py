"""Files of a checkpoint, digests of tensors, and tensors on their way to the host."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from pytest_fp8.worker import tensors as t  # noqa: E402
from pytest_fp8.worker.checkpoint import stores  # noqa: E402
from pytest_fp8.worker.tensors import digests  # noqa: E402

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


def test_containers_and_their_keys_come_back_as_they_were(tmp_path):
    given = {"a": [1, (2.5, None, "b")], "b": {3: 4}, "m": Counter({30: 1, 60: 2}), "type": torch.bfloat16}
    assert stores.data_of(given) == given
    stores.write(tmp_path, "dcp", {}, given)
    found = stores.read(tmp_path, "dcp", torch.device("cpu"))[1]
    assert found == given
    assert type(found["m"]) is Counter


def test_what_is_no_data_is_told_from_what_is():
    assert stores.data_of({"a": {1}, "b": [object()], "c": torch.nn.Parameter(torch.ones(1)), "d": [[1]]}) == {
        "d": [[1]]
    }
    assert dict(stores.leaves("x", {"a": [torch.float32, 2.5]})) == {"x.a[0]": torch.float32, "x.a[1]": 2.5}


def test_a_class_that_is_not_declared_safe_is_not_loaded(tmp_path):
    stores.write(tmp_path, "dcp", {}, {"a": [tmp_path]})
    with pytest.raises(Exception, match="Weights only load failed"):
        stores.read(tmp_path, "dcp", torch.device("cpu"))


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
def test_what_goes_through_a_small_buffer_is_the_same_to_the_bit(dtype, monkeypatch):
    monkeypatch.setattr(t, "STAGE_BYTES", 64)
    plain = [(3 * torch.randn(shape)).to(dtype) for shape in ((), (0,), (1,), (3,), (64,), (5, 7), (3, 0, 2))]
    odd = [plain[5].t(), plain[0].expand(5), plain[4][::2], plain[4][1:]]
    given = {str(index): value for index, value in enumerate([*plain, *odd])}
    found = t.on_host(given, device="cpu")
    for name, value in given.items():
        assert found[name] is not value
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].float().equal(value.float())
