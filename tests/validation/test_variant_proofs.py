"""Variants of ports, proven on twins that are stored in their format, and red for what reads it wrongly."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from autoport.codegen.add_variant import declare
from autoport.codegen.add_variant import run as add_variant
from autoport.codegen.generate import render_package
from autoport.codegen.render import render
from autoport.errors import Refusal
from autoport.package_workspace import PackageWorkspace
from autoport.port import run_step
from autoport.port_state import Port
from autoport.schema.facts import Facts
from autoport.schema.plan import Plan
from autoport.schema.proof import Proof
from autoport.step import Options
from autoport.validation.quantize import quantize, restore, store
from autoport.validation.twin import build
from autoport.validation.variant_proof import run
from autoport.workspace import Workspace
from test_expert_proofs import CONFIGS, SMALL
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
GPT_OSS = SMALL | CONFIGS["gpt_oss"] | {"model_type": "gpt_oss"}


def ported(folder: Path, config: dict, out_of_tree: bool = False) -> Port:
    source = build(config, folder / "source", seed=1)
    root = folder / "workspace"
    workspace = PackageWorkspace.open(root, "subject", None) if out_of_tree else Workspace.create(root)
    port = Port(workspace, "subject", str(source))
    for step in ("research", "analyze", "generate"):
        run_step(port, step, Options(dry_run=True))
    return port


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    port = ported(folder, LLAMA)
    for variant in (declare("fp8"), declare("fp8_block"), declare("int8", platforms=("trn3",))):
        add_variant(port, variant)
    yield port
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    port = ported(tmp_path_factory.mktemp("package"), LLAMA, out_of_tree=True)
    add_variant(port, declare("fp8"))
    yield port
    shutil.rmtree(port.workspace.root)


@pytest.fixture(scope="module")
def by_hand(llama: Port, tmp_path_factory):
    """The same port as models in the plugin are written: `load_weights` alone knows the checkpoint's keys."""
    root = shutil.copytree(llama.workspace.root, tmp_path_factory.mktemp("by_hand") / "workspace")
    port = Port(Workspace.find(root), "subject")
    folder = port.workspace.model_dir("subject")
    model = folder / "model.py"
    model.write_text(model.read_text().replace("weight_mappings", "_keys"))
    for left in (
        *folder.glob("model_*.py"),
        folder / "quantized_weights.py",
        port.state_dir / "variants.json",
    ):
        left.unlink()
    factory = folder / "factory.py"
    factory.write_text(
        render_package(port.read_state("plan.json", Plan, "analyze"), "vllm_neuron")["factory.py"]
    )
    add_variant(port, declare("int8"))
    yield port
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    port = ported(folder, GPT_OSS)
    add_variant(port, declare("mxfp4", default_on=("trn3",)))
    yield port
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "variant", "tp_size"),
    [("package", "fp8", 1), ("llama", "fp8_block", 2), ("by_hand", "int8", 2), ("gpt_oss", "mxfp4", 2)],
)
def test_a_quantized_variant_is_proven(request, name: str, variant: str, tp_size: int) -> None:
    port: Port = request.getfixturevalue(name)
    outcome = run(port, variant, [tp_size])
    proof: Proof = outcome.data
    assert outcome.status == "done", outcome.summary
    assert [run.dtype for run in proof.runs] == ["float32", "bfloat16"]
    assert f"{variant} changes the reference's logits by" in outcome.summary
    assert port.has_state(f"proof_{variant}.json")


def test_a_checkpoint_that_is_quantized_is_ported_with_its_variant(gpt_oss: Port, tmp_path: Path) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    assert quantize(Path(gpt_oss.source), "mxfp4", quantized, plain)
    shutil.rmtree(plain)
    port = Port(Workspace.create(tmp_path / "workspace"), "subject", str(quantized))
    options = Options(dry_run=True, tp_sizes=[1])
    for step in ("research", "analyze", "generate"):
        run_step(port, step, options)
    folder, other = port.workspace.model_dir("subject"), gpt_oss.workspace.model_dir("subject")
    for name in ("model.py", "config.py", "model_mxfp4.py"):
        assert (folder / name).read_text() == (other / name).read_text()
    assert "stored as mxfp4" in " ".join(port.read_state("facts.json", Facts, "research").warnings)
    result = run_step(port, "prove", options)
    assert result.status == "done", result.summary
    assert "; mxfp4: equals GptOssForCausalLM" in result.summary
    (folder / "model_mxfp4.py").write_text((folder / "model_mxfp4.py").read_text().replace("- 127", "- 126"))
    result = run_step(port, "prove", options)
    assert (result.status, "; mxfp4: red at TP 1" in result.summary) == ("red", True), result.summary


def broken(port: Port, module: str, change: Callable[[str], str]) -> str:
    """Verdict of the variant when its file is changed."""
    path = port.workspace.model_dir("subject") / f"{module}.py"
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    try:
        outcome = run(port, module.removeprefix("model_"), [1])
    finally:
        path.write_text(text)
    assert outcome.status == "red"
    return outcome.summary


def test_faults_of_reading_are_red(llama: Port, gpt_oss: Port) -> None:
    assert "prefill" in broken(
        llama, "model_fp8_block", lambda text: text.replace(".float() * self", ".float() * 1.01 * self")
    )
    no_scales = broken(llama, "model_int8", lambda text: text.replace('"_scale")', '"_scales")'))
    assert "torch.int8 and have no scales" in no_scales
    assert "prefill" in broken(
        gpt_oss,
        "model_mxfp4",
        lambda text: text.replace("(blocks & 0x0F, blocks >> 4)", "(blocks >> 4, blocks & 0x0F)"),
    )


def test_the_selected_implementation_is_the_one_that_is_proven(llama: Port) -> None:
    factory = llama.workspace.model_dir("subject") / "factory.py"
    text = factory.read_text()
    factory.write_text(text.replace("from .model_fp8 import", "from .model_int8 import"))
    try:
        assert "the factory selects model_int8.py, not model_fp8.py" in run(llama, "fp8", [1]).summary
    finally:
        factory.write_text(text)


def test_what_cannot_be_proven(llama: Port) -> None:
    with pytest.raises(Refusal, match="VAR-UNKNOWN"):
        run(llama, "mxfp4", [1])
    add_variant(llama, declare("mxfp4"))
    with pytest.raises(Refusal, match="PROOF-FORMAT"):
        run(llama, "mxfp4", [1])


@pytest.mark.parametrize(
    ("name", "key", "shape", "limit"),
    [
        ("fp8", "model.layers.0.mlp.up_proj.weight", (64, 96), 2**-4),
        ("fp8_block", "model.layers.0.mlp.up_proj.weight", (72, 100), 2**-4),
        ("int8", "model.layers.0.mlp.up_proj.weight", (64, 96), 0.5 / 127),
        ("mxfp4", "model.layers.0.mlp.experts.down_proj", (2, 64, 48), 2**-2),
    ],
)
def test_stored_values_are_near_the_original_ones(
    name: str, key: str, shape: tuple[int, ...], limit: float
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    error = (restore(name, key, store(name, key, weight)) - weight).abs()
    # fp8 rounds by half the last bit of each value; the others by a share of the largest: int8 by half a step,
    # FP4 by all that is between 6 and 8.
    scale = weight.abs().clamp(min=0.1) if "fp8" in name else weight.abs().amax()
    assert 0 < (error / scale).max() <= limit


def test_blocks_are_read_as_transformers_reads_them() -> None:
    """The view that the generated module has, on shards too, and the values that the reference gets."""
    key, weight = "model.layers.0.mlp.up_proj.weight", torch.randn(64, 96)
    parts = store("fp8_block", key, weight)
    values = restore("fp8_block", key, parts)
    dequantize = Fp8Dequantize(None)._dequantize_one
    assert torch.equal(values, dequantize(parts[key], parts[f"{key}_scale_inv"], torch.float32))
    weight = torch.randn(72, 100)  # the last blocks are cut off
    parts = store("fp8_block", key, weight)
    values = restore("fp8_block", key, parts)
    namespace: dict = {"torch": torch, "Any": Any, "Tensor": torch.Tensor}
    exec(render("variant/block_scaled.j2"), namespace)

    class Slice:
        """As safetensors' lazy slices."""

        def __init__(self, tensor: torch.Tensor):
            self.tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self.tensor.shape)

        def __getitem__(self, index: Any) -> torch.Tensor:
            return self.tensor[index]

    view = namespace["BlockScaledWeight"](Slice(parts[key]), Slice(parts[f"{key}_scale_inv"]))
    indices = [..., slice(7, 41), (slice(None), slice(30, 95)), (slice(3, 5), slice(15, 17)), [1, 70, 16], 20]
    for index in indices:
        assert torch.equal(view[index], values[index])
    with pytest.raises(ValueError, match="no block whose side is a power of two is 7 times in 72"):
        namespace["BlockScaledWeight"](Slice(parts[key]), Slice(torch.ones(7, 7)))
    with pytest.raises(ValueError, match=r"scales of shape \[5\]"):
        namespace["BlockScaledWeight"](Slice(parts[key]), Slice(torch.ones(5)))
