import io
import re
import shutil
from pathlib import Path

import autoport.diagnose as diagnose_module
import pytest
import torch
from autoport.cli import app
from autoport.cli.diagnose import describe
from autoport.diagnose import Catalogue, Diagnosis, add_places, diagnose, load_catalogue
from autoport.errors import Refusal
from autoport.port_state import Port
from autoport.resources import references_dir, simulator_dir
from autoport.review.checklist import load_checklists
from autoport.review.step import review_port, subject_of
from autoport.workspace import Workspace
from typer.testing import CliRunner

CATALOGUE = load_catalogue()
NOVA = Path(__file__).parent / "review" / "ports" / "nova"

# Lines as the plugin, the compiler, vLLM, torch or the simulator print them.
EXAMPLES = {
    "META-TENSOR": ["NotImplementedError: Cannot copy out of meta tensor; no data!"],
    "META-MODULE": [
        "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() "
        "instead of torch.nn.Module.to() when moving module from meta to a different device."
    ],
    "BIAS-SHAPE": [
        "AssertionError: Bias shape must be [1, I], got (3072,)",
        "AssertionError: rmsnorm_X_gamma shape must be [1, H], got (4096,)",
        "ValueError: router_bias shape must be (64,), got (1, 64)",
    ],
    "COPY-FROM": ["NotImplementedError: unimplemented _copy_from xla:0 neuron:3"],
    "ITEM": [
        "RuntimeError: Unsupported Tensor.item() call",
        "torch._dynamo.exc.Unsupported: Graph break from `Tensor.item()`, consider setting:",
    ],
    "DATA-BRANCH": [
        "torch._dynamo.exc.Unsupported: Data-dependent branching",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode: Could not guard on Eq(u0, 1)",
    ],
    "DATA-SHAPE": ["torch._dynamo.exc.Unsupported: Dynamic shape operator"],
    "RECOMPILE": ["RuntimeError: Detected recompile when torch.compile stance is 'fail_on_recompile'."],
    "CHECKPOINT-KEYS": [
        "RuntimeError: Checkpoint key(s) not found for parameter 'lm_head.weight': ['lm_head.weight']."
    ],
    "NOT-LOADED": [
        "RuntimeError: no weights for [], no parameter for ['model.layers.0.self_attn.q_norm.weight']"
    ],
    "LM-HEAD-BIAS": ["    size mismatch for lm_head.bias: copying a param with shape torch.Size([51200])"],
    "REGISTRY": ["AttributeError: type object 'PhiMoEForCausalLM' has no attribute 'from_configs'"],
    "DEGENERATE": [
        "Generated: ' the the the the the the the the'",
        "'text': 'Paris, Paris, Paris, Paris, Paris, Paris'",
    ],
    "PROMPT-LENGTH": ["ValueError: Prompt Length (T) must be > world_size (W) for SP."],
    "KV-LAYER": ["KeyError: 'layers.0.self_attn'"],
    "DEVICE-MIX": [
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices"
    ],
    "OUTPUT-FORM": ["ValueError: forward must return token ids [2], got (2, 256)"],
    "ROW-BIAS-DTYPE": ["NotImplementedError: bias of a RowParallelLinear must be float32 when tp_size > 1"],
    "UNSUPPORTED-CONFIG": [
        "vllm_neuron.model.yi.config.UnsupportedConfigError: LlamaForCausalLM does not support x"
    ],
    "SAFETENSORS": ["safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"],
    "GROUP-SIZES": [
        "RuntimeError: NEFF Warmup failed with status 1006",
        "[ERROR] DGE scatter/gather out-of-bound access on queue 3",
    ],
    "WORKER-KILLED": [
        "ERROR [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down"
    ],
    "SHARED-MEMORY": [
        "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 240 MiB required, 4 MiB free."
    ],
    "LOAD-MEMORY": ["Out of memory: Killed process 4711 (VLLM::Worker)", "terminate called: std::bad_alloc"],
    "COMPILE-MEMORY": [
        "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient memory.",
        "TimeoutError: compilation of graph 3 timed out after 1200 s",
    ],
    "EP-OFF": ["AssertionError: neuron ep_tp group is not initialized"],
    "DEVICE-MEMORY": ["ERROR TDRV nrt_tensor_allocate status=4"],
    "EFA": ["RuntimeError: No EFA device found for core 12"],
    "COMPILE-CACHE": [
        "ERROR: [NLA001] JSON parse error",
        "FileNotFoundError: [Errno 2] No such file or directory: '/var/tmp/x/graph.neff'",
    ],
    "NO-DEVICE": ["error HW-NEURON: no Neuron device on this machine (/dev/neuron*)."],
    "EAGER": ["AssertionError: Eager mode on Neuron is not yet supported"],
    "WRONG-SIMULATOR": [
        "RuntimeError: vllm_neuron was imported from the workspace /w; put the simulator first"
    ],
    "TABLE-DTYPE": ["AssertionError: active_blocks_table must be int32, got torch.int64"],
    "TABLE-PER-HEAD": ["AssertionError: A block table per head must hold block id * kv_heads + head"],
    "CONTEXT-128": ["ValueError: s_prior must be a multiple of 128, got 96"],
    "HEAD-DIM": ["ValueError: head_dim must be at most 128, got 256"],
    "HIDDEN-256": ["AssertionError: H / 128 must be divisible by 2 for the QKV decode kernel, got 384"],
    "QKV-SHAPE": ["AssertionError: W_qkv.shape[1] must be a multiple of head_dim, got 100"],
    "ROPE-SHAPE": ["AssertionError: cos shape must be [D / 2, B, S], got (1, 4, 64)"],
    "CACHE-SHAPE": ["AssertionError: kv_cache_update_idx shape must be [B, S_tkg], got (4,)"],
    "SEGMENT": ["ValueError: The query length must equal kv_segment_size, got 256"],
    "EXPERT-SHAPE": ["ValueError: expert weights must be [E, H, 2, I] and [E, I, H], got (8, 64, 128)"],
    "NOT-SIMULATED": [
        "AttributeError: vllm_neuron.functional.moe_x exists in the plugin but not in the simulator"
    ],
    "ENGINE-CONFIG": [
        "ValueError: the vLLM Neuron simulator refuses this configuration: speculative_config is not simulated"
    ],
    "REQUEST-SAMPLING": [
        "VLLMValidationError: sampling on the device would ignore seed; set additional_config.neuron_config",
        "VLLMValidationError: prompt_logprobs is not supported on Neuron (parameter=prompt_logprobs)",
    ],
    "BUCKETS": ["ValueError: num_seqs_buckets must end at max_num_seqs 8, got [1, 2, 4]"],
    "NO-BLOCK": ["RuntimeError: the KV cache has no free block; raise num_blocks"],
    "FP8-SEGMENTED": ["NotImplementedError: Segmented prefill with an FP8 KV cache needs fp8_packed_kv"],
    "WARMUP": ["RuntimeError: Model warmup failed for prefill bucket 512"],
    "ENGINE": ["RuntimeError: Engine core initialization failed. See root cause above."],
}


def read(text: str) -> Diagnosis:
    return diagnose(io.BytesIO(text.encode()), CATALOGUE)


def ids(diagnosis: Diagnosis) -> list[str]:
    return [match.failure.id for match in diagnosis.matches]


def test_every_known_failure_has_an_example():
    assert {failure.id for failure in CATALOGUE.failures} == set(EXAMPLES)


@pytest.mark.parametrize(("failure", "line"), [(f, line) for f, lines in EXAMPLES.items() for line in lines])
def test_a_known_line_is_recognised(failure: str, line: str):
    assert ids(read(f"INFO starting\n{line}\nINFO done\n")) == [failure]


@pytest.mark.parametrize(
    "line",
    [
        "INFO weights loaded in 3.1 s, 12 of 12 shards",
        "Generated: 'The capital of France is Paris, and the river of Paris is the Seine.'",
        "output: tensor([0, 0, 0, 0, 0, 0, 0, 0])",
        "FileNotFoundError: [Errno 2] No such file or directory: 'config.json'",
        "INFO compilation of graph 3 took 40 s",
        "AssertionError: neuron lm_head group is not initialized",
    ],
)
def test_an_innocent_line_is_not(line: str):
    diagnosis = read(line)
    assert ids(diagnosis) == []
    assert diagnosis.go_on_at


def test_the_first_failure_in_time_comes_first_and_wrappers_last():
    log = "\n".join(
        [
            "Engine core initialization failed",
            "x",
            EXAMPLES["TABLE-DTYPE"][0],
            EXAMPLES["META-TENSOR"][0],
            EXAMPLES["TABLE-DTYPE"][0],
        ]
    )
    diagnosis = read(log)
    found = [(match.failure.id, match.line, match.count) for match in diagnosis.matches]
    assert found == [("TABLE-DTYPE", 3, 2), ("META-TENSOR", 4, 1), ("ENGINE", 1, 1)]
    assert diagnosis.lines == 5


def test_only_wrappers_is_not_a_diagnosis():
    diagnosis = read("Engine core initialization failed\n")
    assert ids(diagnosis) == ["ENGINE"]
    assert diagnosis.go_on_at == "references/troubleshooting.md#nothing-recognised-in-the-log"


def test_an_unknown_log_points_at_the_page_for_what_it_mentions():
    assert read("proof: R-ratio 4.2 over the limit").go_on_at.endswith("#a-red-proof")
    assert read("").lines == 0


def test_pages_and_rules_exist():
    anchors = set()
    for line in (references_dir() / "troubleshooting.md").read_text().splitlines():
        if line.startswith("#"):
            anchors.add(re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-"))
    assert {entry.page for entry in CATALOGUE.narrowing} <= {f"troubleshooting.md#{a}" for a in anchors}
    rules = {rule.id for checklist in load_checklists().values() for rule in checklist.rules}
    assert {rule for failure in CATALOGUE.failures for rule in failure.rules} <= rules


def test_the_simulators_messages_are_still_worded_so():
    source = "\n".join(path.read_text() for path in simulator_dir().rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source).replace("{2 * PMAX}", "256").replace("{PMAX}", "128")
    for failure in CATALOGUE.failures:
        if failure.section in ("operators", "serving") and not failure.wrapper:
            for signature in failure.signatures:
                for literal in signature.literals:
                    words = literal.replace("max_num", "{")  # a name that is filled in
                    assert words in source or words.rstrip("{") in source, literal


# --- Reading ----------------------------------------------------------------------------------------


@pytest.fixture
def log_text() -> str:
    lines = [f"INFO {i} {'.' * (i % 37)}" for i in range(400)]
    lines[7] = EXAMPLES["META-TENSOR"][0]
    lines[200] = EXAMPLES["ITEM"][0]
    lines[203] = '  File "/opt/x/vllm_neuron/model/yi/model.py", line 120, in forward'
    lines[399] = EXAMPLES["TABLE-DTYPE"][0]
    return "\n".join(lines)


@pytest.mark.parametrize("size", [64, 1000, 5000])
def test_blocks_of_any_size_give_the_same_diagnosis(
    monkeypatch: pytest.MonkeyPatch, log_text: str, size: int
):
    whole = read(log_text)
    assert [(m.failure.id, m.line) for m in whole.matches] == [
        ("META-TENSOR", 8),
        ("ITEM", 201),
        ("TABLE-DTYPE", 400),
    ]
    monkeypatch.setattr(diagnose_module, "BLOCK_BYTES", size)
    cut = read(log_text)
    assert [(m.failure.id, m.line, m.text) for m in cut.matches] == [
        (m.failure.id, m.line, m.text) for m in whole.matches
    ]
    assert cut.lines == whole.lines == 400


def test_the_nearest_frame_in_a_model_is_named(log_text: str):
    frames = {match.failure.id: match.frame for match in read(log_text).matches}
    assert frames["ITEM"] == "vllm_neuron/model/yi/model.py:120"
    assert read(EXAMPLES["ITEM"][0]).matches[0].frame == ""


class Endless(io.RawIOBase):
    """A log of many equal blocks, with a known failure near its end; counts what is asked for at once."""

    def __init__(self, blocks: int):
        self.left = blocks
        self.largest = 0
        self.block = b"INFO nothing to see here, really\n" * 32

    def read(self, size: int = -1) -> bytes:
        self.largest = max(self.largest, size)
        assert size > 0
        self.left -= 1
        if self.left < 0:
            return b""
        return self.block * (size // len(self.block)) if self.left else EXAMPLES["EFA"][0].encode()


def test_memory_does_not_grow_with_the_log():
    log = Endless(24)
    kept = [len(block.data) for block in diagnose_module.blocks(log)]  # type: ignore[arg-type]
    assert max(kept) <= 2 * diagnose_module.BLOCK_BYTES + 2 * diagnose_module.CONTEXT_BYTES
    assert log.largest == diagnose_module.BLOCK_BYTES
    assert ids(diagnose(Endless(4), CATALOGUE)) == ["EFA"]  # type: ignore[arg-type]


def test_a_line_without_an_end_and_bytes_that_are_no_text():
    line = b"\xff\x00" * (2 * diagnose_module.BLOCK_BYTES) + EXAMPLES["EFA"][0].encode()
    assert ids(diagnose(io.BytesIO(line), CATALOGUE)) == ["EFA"]


# --- Places and command -----------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace.create(tmp_path / "workspace")
    shutil.copytree(NOVA, workspace.model_dir("nova"))
    return workspace


def break_rope(workspace: Workspace) -> str:
    rope = workspace.model_dir("nova") / "rope.py"
    lines = rope.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if "angles = " in line)
    lines.insert(index, "        top = positions.max().item()")
    rope.write_text("\n".join(lines))
    return f"vllm_neuron/model/nova/rope.py:{index + 1}"


def test_the_place_in_the_port_is_named(workspace: Workspace):
    where = break_rope(workspace)
    diagnosis = read(EXAMPLES["ITEM"][0])
    add_places(diagnosis, review_port(subject_of(Port(workspace, "nova"))))
    assert diagnosis.matches[0].places == [
        f"{where} NovaRotaryEmbedding.forward: positions.max().item() reads a tensor's value (FWD-SCALAR)"
    ]


def test_command(workspace: Workspace, tmp_path: Path):
    where = break_rope(workspace)
    log = tmp_path / "a log.txt"
    log.write_text(EXAMPLES["ITEM"][0])
    arguments = ["diagnose", str(log), "--port", "nova", "--workspace", str(workspace.root)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert f"likely place: {where}" in result.output
    assert f"next:  autoport review nova --workspace {workspace.root}" in result.output
    assert '"id": "ITEM"' in CliRunner().invoke(app, [*arguments, "--json"]).output


def test_a_log_of_the_workspace_is_found_from_any_folder(workspace: Workspace):
    (workspace.root / "rank0.log").write_text(EXAMPLES["ITEM"][0])
    result = CliRunner().invoke(app, ["diagnose", "rank0.log", "--workspace", str(workspace.root)])
    assert "ITEM:" in result.output


def invoke(*arguments: object, log: str) -> str:
    return CliRunner().invoke(app, ["diagnose", "-", *map(str, arguments)], input=log).output


def test_the_port_is_that_of_the_traceback_or_the_only_one(workspace: Workspace):
    where = break_rope(workspace)
    traced = f'  File "/opt/x/vllm_neuron/model/nova/rope.py", line 12, in forward\n{EXAMPLES["ITEM"][0]}\n'
    output = invoke("--workspace", workspace.root, log=traced)
    assert "port: nova in" in output
    assert f"likely place: {where}" in output
    # No traceback, and no port was started here: the command asks for the name.
    output = invoke("--workspace", workspace.root, log=EXAMPLES["ITEM"][0])
    assert f"next:  autoport diagnose - --workspace {workspace.root} --port NAME, with" in output
    Port(workspace, "nova", "somewhere").save()
    assert f"likely place: {where}" in invoke("--workspace", workspace.root, log=EXAMPLES["ITEM"][0])


def test_a_log_of_other_files_is_questioned_first(workspace: Workspace):
    def asked(frame: str) -> bool:
        log = f'  File "/x/vllm_neuron/model/{frame}, in forward\n{EXAMPLES["ITEM"][0]}\n'
        output = invoke("--workspace", workspace.root, "--port", "nova", log=log)
        return "is the log of these files?" in output.split("ITEM:")[0]

    assert not asked('nova/rope.py", line 12')
    assert asked('nova/rope.py", line 12000')
    assert asked('nova/gone.py", line 12')
    assert asked('yi/rope.py", line 12')


def test_only_a_very_long_line_of_the_log_is_cut():
    for length, end in ((400, "x"), (4000, "x ...")):
        line = next(
            line for line in invoke(log=EXAMPLES["ITEM"][0] + "x" * length).splitlines() if "log: " in line
        )
        assert line.endswith(end)


def test_what_torch_says_of_a_moved_module_is_told_from_other_meta_tensors():
    module = torch.nn.Module()
    module.register_buffer("inv_freq", torch.zeros(2, device="meta"))
    with pytest.raises(NotImplementedError) as moved:
        module.to("cpu")
    with pytest.raises(NotImplementedError) as copied:
        module.inv_freq.cpu()
    assert ids(read(str(moved.value))) == ["META-MODULE"]
    assert ids(read(str(copied.value))) == ["META-TENSOR"]


def test_where_to_go_on_when_the_review_finds_no_place(workspace: Workspace):
    output = invoke("--workspace", workspace.root, "--port", "nova", log=EXAMPLES["ITEM"][0])
    assert "place: the review finds no fault of FWD-SCALAR" in output
    assert "next:  autoport research nova SOURCE" in output
    port = Port(workspace, "nova", "somewhere")
    port.write_state("plan.json", {})
    output = describe(read(EXAMPLES["BIAS-SHAPE"][0]), port, "-", workspace.root)
    assert f"next:  autoport prove nova --workspace {workspace.root}" in output
    assert "NAME" not in output


def test_a_port_without_a_row_is_noted(workspace: Workspace):
    output = invoke("--workspace", workspace.root, "--port", "nova", log=EXAMPLES["ITEM"][0])
    assert "note: nova is not in registry.py" in output
    workspace.registry_path.write_text(
        "from .nova import NovaForCausalLM\n\n\ndef get_models():\n"
        '    return [("NovaForCausalLM", NovaForCausalLM)]\n'
    )
    assert "note:" not in invoke("--workspace", workspace.root, "--port", "nova", log=EXAMPLES["ITEM"][0])


def test_command_says_when_nothing_is_known():
    result = CliRunner().invoke(app, ["diagnose", "-"], input="all quiet\n")
    assert result.exit_code == 1
    assert "no known failure in 1 lines" in result.output
    assert "references/troubleshooting.md#nothing-recognised-in-the-log" in result.output


def test_a_missing_log_is_refused(tmp_path: Path):
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / "none.log")])
    assert isinstance(result.exception, Refusal)
    assert result.exception.problems[0].rule == "DIAG-LOG"


def test_a_damaged_catalogue_is_refused(tmp_path: Path):
    path = tmp_path / "failures.yaml"
    failure = "{id: A, section: b, title: t, signatures: [], cause: c, fix: f, rules: []}"
    for text in ("sections: [", f"{{sections: {{}}, failures: [{failure}], narrowing: []}}"):
        path.write_text(text)
        with pytest.raises(Refusal) as refusal:
            load_catalogue(path)
        assert refusal.value.problems[0].rule == "DIAG-CATALOGUE"


def test_catalogue_ids_are_unique():
    catalogue: Catalogue = CATALOGUE
    assert len({failure.id for failure in catalogue.failures}) == len(catalogue.failures)
