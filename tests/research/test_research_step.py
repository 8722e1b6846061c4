"""Step 1 as a whole, and the comparison of a tied head with its embedding."""

import json

import pytest
from autoport.analysis.step import make_plan
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.research.step import research, run
from autoport.schema.facts import Checkpoint, Facts
from autoport.step import Options
from autoport.workspace import Workspace
from checkpoints import llama_keys, small_config, write_checkpoint


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "ws" / "vllm_neuron" / "model").mkdir(parents=True)
    (tmp_path / "ws" / "vllm_neuron" / "__init__.py").touch()
    return Workspace.find(tmp_path / "ws")


def test_the_step_writes_what_it_found(tmp_path, workspace):
    source = write_checkpoint(tmp_path / "model", small_config())
    port = Port(workspace, "small", str(source))
    outcome = run(port, Options())
    assert outcome.status == "done"
    assert "LlamaForCausalLM" in outcome.summary
    facts = port.read_state("facts.json", Facts, "research")
    checkpoint = port.read_state("checkpoint.json", Checkpoint, "research")
    assert facts.fields["hidden_size"].value == 64
    assert checkpoint.tensors["lm_head.weight"].shape == (256, 64)
    assert facts.config == small_config()


def test_problems_of_config_and_checkpoint_come_together(tmp_path):
    folder = write_checkpoint(tmp_path, small_config(architectures=[]))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(Refusal) as caught:
        research(str(folder))
    assert {problem.rule for problem in caught.value.problems} == {"CFG-ARCH", "CKPT-HEADER"}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_git_lfs_pointer_is_named(tmp_path, file):
    folder = write_checkpoint(tmp_path, small_config())
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 9876\n")
    with pytest.raises(Refusal) as caught:
        research(str(folder))
    assert [problem.rule for problem in caught.value.problems] == ["SRC-LFS"]
    assert "git lfs pull" in str(caught.value)


def test_one_file_of_a_model_is_not_its_folder(tmp_path):
    folder = write_checkpoint(tmp_path, small_config())
    with pytest.raises(Refusal, match=f"SRC-FILE.*pass the folder that holds it: {folder}"):
        research(str(folder / "config.json"))


def test_a_config_alone_is_researched_and_what_was_not_checked_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_config()))
    facts, checkpoint = research(str(tmp_path))
    assert facts.fields["hidden_size"].value == 64
    assert checkpoint.tensors == {}
    assert any("were not checked" in warning for warning in facts.warnings)
    with pytest.raises(Refusal, match=r"CKPT-NONE.*compute-tp"):
        make_plan("small", facts, checkpoint, Options())


def test_a_checkpoint_without_a_tokenizer_is_pointed_out(tmp_path):
    folder = write_checkpoint(tmp_path, small_config())
    assert any("no tokenizer" in warning for warning in research(str(folder))[0].warnings)
    (folder / "tokenizer.json").write_text("{}")
    assert not any("no tokenizer" in warning for warning in research(str(folder))[0].warnings)


def test_a_refusal_leaves_no_state(tmp_path, workspace):
    folder = write_checkpoint(tmp_path / "model", small_config(vocab_size="x"), llama_keys(small_config()))
    port = Port(workspace, "small", str(folder))
    with pytest.raises(Refusal):
        run(port, Options())
    assert not port.state_dir.exists()


def tied_with_head(tmp_path, head_byte: bytes):
    config = small_config(tie_word_embeddings=True)
    keys = llama_keys(config) | {"lm_head.weight": ("BF16", (256, 64))}
    folder = write_checkpoint(tmp_path, config, keys)
    _, checkpoint = research(str(folder))
    head = checkpoint.tensors["lm_head.weight"]
    with open(folder / head.file, "r+b") as file:
        file.seek(head.offset + head.num_bytes - 1)
        file.write(head_byte)
    return research(str(folder))[0].fields["head_equals_embedding"]


def test_a_head_that_is_the_embedding(tmp_path):
    assert tied_with_head(tmp_path, b"\0").value is True


def test_a_head_that_is_not_the_embedding(tmp_path):
    fact = tied_with_head(tmp_path, b"\1")
    assert fact.value is False
    assert "differ" in fact.source


def test_a_head_of_another_shape_is_not_the_embedding(tmp_path):
    config = small_config(tie_word_embeddings=True)
    write_checkpoint(tmp_path, config, llama_keys(config) | {"lm_head.weight": ("BF16", (257, 64))})
    assert research(str(tmp_path))[0].fields["head_equals_embedding"].value is False


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    import subprocess
    import sys

    folder = write_checkpoint(tmp_path, small_config(rms_norm_eps=...))
    code = (
        "import sys\n"
        "from autoport.research.step import research\n"
        "from autoport.analysis.step import make_plan\n"
        "from autoport.step import Options\n"
        f"make_plan('small', *research({str(folder)!r}), Options())\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_config_is_kept_as_it_was_read(tmp_path):
    config = small_config(extra={"nested": [1, None]})
    write_checkpoint(tmp_path, config)
    assert json.dumps(research(str(tmp_path))[0].config) == json.dumps(config)


@pytest.mark.parametrize(
    ("changes", "keys", "rule", "value"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, {}, "QUANT", "bitsandbytes"),
        ({}, {"model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (128, 64))}, "QUANT", "F8_E4M3"),
        ({"architectures": None}, {}, "CFG-ARCH", "None"),
        ({"architectures": ["LlamaModel"]}, {}, "CFG-ARCH", "LlamaModel"),
        ({"num_key_value_heads": [2, 1]}, {}, "CFG-PER-LAYER", "[2, 1]"),
        (
            {"block_configs": [{"attention": {"no_op": True}}]},
            {},
            "CFG-PER-LAYER",
            "layer 0 has no attention",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, {}, "CFG-LAYER-TYPES", "linear_attention"),
        ({"rope_scaling": {"rope_type": "xyz", "factor": 2.0}}, {}, "SCOPE-ROPE", "xyz"),
        ({"hidden_act": "tanhshrink"}, {}, "SCOPE-ACTIVATION", "tanhshrink"),
        ({"intermediate_size": "128"}, {}, "CFG-TYPE", "'128'"),
    ],
)
def test_a_refusal_has_the_value_its_file_and_a_way_on(tmp_path, changes, keys, rule, value):
    config = small_config(**changes)
    source = write_checkpoint(tmp_path, config, llama_keys(small_config()) | keys)
    with pytest.raises(Refusal) as caught:
        make_plan("small", *research(str(source)), Options())
    problem = next(item for item in caught.value.problems if value in item.found)
    assert problem.rule.startswith(rule)
    assert problem.where.startswith(str(source)) or problem.where == "model.safetensors"
    assert len(problem.next_step) > 10
