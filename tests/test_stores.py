"""Files of a checkpoint: one, or shards with their index, as models are published."""

import json

import pytest

torch = pytest.importorskip("torch")

from pytest_fp8.worker.state import checkpoint_stores  # noqa: E402

pytestmark = pytest.mark.slow

TENSORS = {f"layers.{i}.weight": torch.arange(i, i + 64, dtype=torch.bfloat16).reshape(8, 8) for i in range(5)}


def written(folder):
    checkpoint_stores.write_safetensors(TENSORS, folder, {"aliases": "{}"})
    return checkpoint_stores.read_safetensors(folder, torch.device("cpu"))


def same(found):
    return set(found) == set(TENSORS) and all(found[name].equal(value) for name, value in TENSORS.items())


def test_a_small_model_is_one_file(tmp_path):
    assert same(written(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_large_model_is_shards_and_an_index_as_transformers_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_stores, "SHARD_BYTES", 2 * 128)
    assert same(written(tmp_path))
    index = json.loads((tmp_path / checkpoint_stores.INDEX).read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert len(set(index["weight_map"].values())) == 3
    assert checkpoint_stores.dtypes_on_disk(tmp_path, "safetensors") == {"BF16": 5}


def test_a_missing_shard_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_stores, "SHARD_BYTES", 2 * 128)
    written(tmp_path)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint_stores.read_safetensors(tmp_path, torch.device("cpu"))
