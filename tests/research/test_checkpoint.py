"""Headers only, checked against the file; everything damaged is refused."""

import json
import shutil

import pytest
from autoport.errors import Refusal
from autoport.research.checkpoint import INDEX_NAME, read_checkpoint
from autoport.research.source import open_source
from checkpoints import llama_keys, real_config, small_config, write_checkpoint, write_safetensors

SMALL = {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}


def read(folder):
    return read_checkpoint(open_source(str(folder)))


def write_header(path, header: bytes, data: int) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * data)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_real_config_is_read_without_its_gigabytes(tmp_path, shards):
    config = real_config("llama-3.2-1b")
    checkpoint = read(write_checkpoint(tmp_path, config, shards=shards))
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in checkpoint.tensors.items()} == llama_keys(
        config
    )
    assert checkpoint.total_bytes == 2_471_628_800
    assert len(checkpoint.files) == shards
    assert checkpoint.bytes_read < 100_000


def test_it_agrees_with_the_safetensors_library(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {
        "x": torch.arange(6.0).reshape(2, 3),
        "y": torch.ones(5, dtype=torch.bfloat16),
        "s": torch.tensor(1),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = read(tmp_path)
    assert {key: tensor.shape for key, tensor in checkpoint.tensors.items()} == {
        "x": (2, 3),
        "y": (5,),
        "s": (),
    }
    x = checkpoint.tensors["x"]
    data = (tmp_path / "model.safetensors").read_bytes()[x.offset : x.offset + x.num_bytes]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_single_file_can_be_named(tmp_path):
    write_safetensors(tmp_path / "weights.safetensors", SMALL)
    assert read(tmp_path / "weights.safetensors").tensors.keys() == SMALL.keys()


def test_files_outside_the_checkpoint_are_noted(tmp_path):
    write_checkpoint(tmp_path, small_config(), SMALL)
    write_safetensors(tmp_path / "consolidated.safetensors", {"other": ("F32", (1,))})
    checkpoint = read(tmp_path)
    assert checkpoint.files == ["model.safetensors"]
    assert "consolidated.safetensors" in checkpoint.notes[0]


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_truncated_shard_is_refused(tmp_path, cut):
    write_checkpoint(tmp_path, small_config(), shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with pytest.raises(Refusal, match="truncated") as caught:
        read(tmp_path)
    assert [problem.rule for problem in caught.value.problems] == ["CKPT-HEADER"]
    assert path.name in str(caught.value)


def test_every_damaged_shard_is_reported_at_once(tmp_path):
    write_checkpoint(tmp_path, small_config(), shards=3)
    for shard in (1, 3):
        (tmp_path / f"model-0000{shard}-of-00003.safetensors").write_bytes(b"abc")
    with pytest.raises(Refusal) as caught:
        read(tmp_path)
    assert len(caught.value.problems) == 2


ENTRY = '"dtype": "F32", "shape": [1], "data_offsets": [0, 4]'


@pytest.mark.parametrize(
    ("header", "data", "found"),
    [
        (b"", 0, "Expecting value"),
        (b"[]", 0, "not an object"),
        (b"\xff\xfe", 0, "decode"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', 4, "lacks"),
        (b'{"a": 3}', 4, "lacks"),
        (b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', 4, "unknown dtype"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', 4, "takes 8 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', 4, "shape [-1]"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', 4, "shape [True]"),
        (b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}', 4, "shape 1"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}', 4, "lacks"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', 8, "a gap or an overlap"),
        (f'{{"a": {{{ENTRY}}}, "b": {{{ENTRY}}}}}'.encode(), 4, "a gap or an overlap"),
        (f'{{"a": {{{ENTRY}}}, "a": {{{ENTRY}}}}}'.encode(), 4, "twice"),
        (f'{{"\\ud800": {{{ENTRY}}}}}'.encode(), 4, "no key of a tensor"),
        (f'{{"a": {{{ENTRY}}}}}'.encode(), 9, "5 bytes after the last tensor"),
        (b'{"a":' * 50_000, 0, "is no header of tensors"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, data, found):
    write_header(tmp_path / "model.safetensors", header, data)
    with pytest.raises(Refusal, match="CKPT-HEADER") as caught:
        read(tmp_path)
    assert found in str(caught.value)


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_a_huge_header_is_not_read(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    source = open_source(str(tmp_path))
    with pytest.raises(Refusal, match="at most 100000000"):
        read_checkpoint(source)
    assert source.bytes_read < 100


def test_an_index_that_names_a_missing_file(tmp_path):
    write_checkpoint(tmp_path, small_config(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(Refusal, match="CKPT-INDEX") as caught:
        read(tmp_path)
    assert "model-00002-of-00003.safetensors" in str(caught.value)


def test_an_index_cannot_point_outside_the_folder(tmp_path):
    folder = tmp_path / "model"
    write_checkpoint(folder, small_config(), SMALL)
    shutil.move(folder / "model.safetensors", tmp_path / "outside.safetensors")
    weight_map = dict.fromkeys(SMALL, "../outside.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Refusal, match="CKPT-INDEX"):
        read(folder)


def test_index_and_files_are_compared_both_ways(tmp_path):
    write_checkpoint(tmp_path, small_config(), SMALL, shards=2)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["ghost"] = index["weight_map"].pop("a")
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(Refusal) as caught:
        read(tmp_path)
    found = [problem.found for problem in caught.value.problems]
    assert len(found) == 2
    assert "ghost" in found[0]
    assert "a is in" in found[1]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_refused(tmp_path, text):
    write_checkpoint(tmp_path, small_config(), SMALL, shards=2)
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(Refusal, match="CKPT-INDEX"):
        read(tmp_path)


def test_a_list_is_no_weight_map(tmp_path):
    write_checkpoint(tmp_path, small_config(), SMALL, shards=2)
    (tmp_path / INDEX_NAME).write_text('{"weight_map": ["a"]}')
    with pytest.raises(Refusal, match="weight_map is not an object of file names"):
        read(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path):
    write_checkpoint(tmp_path, small_config(), shards=2)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(Refusal, match="CKPT-INDEX"):
        read(tmp_path)


def test_pickle_files_are_named_and_not_opened(tmp_path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    source = open_source(str(tmp_path))
    with pytest.raises(Refusal) as caught:
        read_checkpoint(source)
    (problem,) = caught.value.problems
    assert problem.rule == "CKPT-BIN"
    assert "pytorch_model-00001-of-00002.bin" in problem.found
    assert "save_pretrained" in problem.next_step
    assert source.bytes_read == 0


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(Refusal, match="CKPT-NONE"):
        read(tmp_path)


def test_a_key_in_two_shards_is_refused(tmp_path):
    write_checkpoint(tmp_path, small_config(), SMALL, shards=2)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", SMALL)
    with pytest.raises(Refusal) as caught:
        read(tmp_path)
    assert [problem.rule for problem in caught.value.problems] == ["CKPT-DUPLICATE"]
