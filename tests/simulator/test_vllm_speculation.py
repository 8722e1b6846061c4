"""A target and an Eagle3 draft under the real vLLM engine: the tokens of the target alone, and fewer steps."""

import contextlib
import json
import re
import runpy
from types import SimpleNamespace

import engines
import pytest
import torch
from autoport.analysis.draft import plan_draft
from autoport.codegen.draft import write_draft
from autoport.port_state import Port
from autoport.validation.twin_tokenizer import write_tokenizer
from autoport.workspace import Workspace
from drafts import PUBLISHED, SPECULATORS, Reference, aux_states, fitted, tensors, write
from engines import CPU_SAMPLING, generate, metric, prompts, tokens

STEPS, COUNT = 16, 3  # tokens of a run, and drafts of a step
TEXTS = prompts([6, 50, 33])
BUCKETS = {"num_batched_tokens_buckets": [64, 256], "num_seqs_buckets": [2, 8]}


def aux_layers(model):
    count = model.config.num_hidden_layers
    return [1, count - 1, count]


@pytest.fixture(scope="module")
def drafts(ports, tmp_path_factory):
    """Checkpoint of a draft that is right about the prompts, and of one that is not, in the two schemas.

    vLLM gives the first the architecture of its config.json, the second that of the plugin's row.
    """
    folder = tmp_path_factory.mktemp("drafts")
    model = ports.reference("llama")
    layers = aux_layers(model)
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    config = {**PUBLISHED, **sizes, "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    nested = {
        **SPECULATORS,
        "eagle_aux_hidden_state_layer_ids": layers,
        "transformer_layer_config": SPECULATORS["transformer_layer_config"] | sizes,
    }
    random = tensors(False, "layers.0", model.config.hidden_size, model.config.vocab_size)
    found = {
        "fitted": write(folder / "fitted", config, fitted(model, layers, TEXTS, STEPS)),
        "random": write(folder / "random", nested, random),
    }
    for name, checkpoint in found.items():
        port = Port(Workspace.find(ports.workspace), f"{name}_draft", str(checkpoint))
        write_draft(port, plan_draft(port.source), replace_row=True)
    return found


@pytest.fixture(scope="module")
def environment(ports, drafts):
    with engines.simulated(ports.workspace):
        yield


@pytest.fixture(scope="module")
def served(ports, drafts, environment):
    @contextlib.contextmanager
    def serve(draft="fitted", **options):
        config = {"method": "eagle3", "model": str(drafts[draft]), "num_speculative_tokens": COUNT}
        with engines.engine(ports.checkpoints["llama"], speculative_config=config, **options) as llm:
            yield llm

    return serve


def expected(ports, texts, steps=STEPS):
    return [ports.greedy("llama", text, steps) for text in texts]


@pytest.mark.parametrize(("ranks", "neuron_config"), [(1, {}), (2, CPU_SAMPLING)])
def test_the_tokens_are_those_of_the_target_alone(ports, served, ranks, neuron_config):
    with served(tensor_parallel_size=ranks, neuron_config=BUCKETS | neuron_config) as llm:
        outputs = generate(llm, TEXTS, STEPS, logprobs=2)
        assert tokens(outputs) == expected(ports, TEXTS)
        assert counted(llm)["accepted_tokens"] >= len(TEXTS) * (
            STEPS // 2 - 1
        )  # the first draft of each step
        for text, output in zip(TEXTS, outputs, strict=True):
            ids = list(output.outputs[0].token_ids)
            right = ports.logprobs("llama", text + ids)[len(text) - 1 : -1]
            for row, token, found in zip(right, ids, output.outputs[0].logprobs, strict=True):
                assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
        texts = prompts([1, 32, 200, 256 - STEPS])  # about these the draft is wrong
        right = [*expected(ports, texts[:-1], STEPS + 1), *expected(ports, texts[-1:], STEPS)]
        assert tokens(generate(llm, texts, STEPS + 1)) == right


def counted(llm):
    """vLLM's numbers of drafted steps, drafts and accepted drafts."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: metric(llm, f"vllm:spec_decode_num_{name}") for name in names}


@pytest.fixture
def proposed(monkeypatch):
    """The tokens of a request after each step, and its drafts."""
    from vllm_neuron.vllm.worker.neuron_model_runner import NeuronModelRunner

    found = []
    take = NeuronModelRunner.take_draft_token_ids

    def recorded(self):
        drafts = take(self)
        for (_, state), guess in zip(self._requests.current(), drafts.draft_token_ids, strict=True):
            if guess:
                found.append(([*state.prompt_token_ids, *state.output_token_ids], guess))
        return drafts

    monkeypatch.setattr(NeuronModelRunner, "take_draft_token_ids", recorded)
    return found


def test_segments_prefix_cache_and_contexts_change_nothing(ports, served, drafts, proposed):
    """Neither tokens, nor drafts; and a draft that is wrong costs no tokens."""
    long, short = prompts([700, 40])
    texts = [long, short, long[:600] + short]
    options = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
        "neuron_config": {"decode_context_length_buckets": [128, 512]},
    }
    right = expected(ports, texts)
    with served("random", **options) as llm:
        hits = []
        for _ in range(2):
            for text, token_ids in zip(texts, right, strict=True):
                [output] = generate(llm, [text], STEPS)
                assert tokens([output]) == [token_ids]
                hits.append(output.num_cached_tokens)
        # A block less than without a drafter, whose last key depends on the token after the block.
        assert hits == [0, 0, 544, 640, 0, 576]
        assert tokens(generate(llm, texts, STEPS)) == right
        numbers = counted(llm)
        assert numbers["accepted_tokens"] < numbers["draft_tokens"] / 10

    model = ports.reference("llama")
    reference = Reference(drafts["random"], torch.float32, model.model.embed_tokens.weight)
    whole = [text + found for text, found in zip(texts, right, strict=True)]
    states = [aux_states(model, aux_layers(model), ids) for ids in whole]
    for known, guess in proposed[::8]:
        end = len(known) - 1
        index = next(index for index, ids in enumerate(whole) if ids[: end + 1] == known)
        assert reference.drafts(known[1:], states[index][:end], COUNT)[0] == guess


def test_the_example_of_a_draft_compiles_both_models_and_drafts(
    ports, drafts, environment, monkeypatch, capsys
):
    import vllm

    outputs = []

    class Recorded(vllm.LLM):
        def __init__(self, **options):
            super().__init__(dtype="float32", **options)

        def generate(self, *args, **options):
            outputs.extend(super().generate(*args, **options))
            return outputs

    checkpoint = ports.checkpoints["llama"]
    if not (checkpoint / "tokenizer.json").exists():
        write_tokenizer(checkpoint, json.loads((checkpoint / "config.json").read_text()))
    options = {
        "--model-checkpoint": checkpoint,
        "--draft-checkpoint": drafts["random"],
        "--max-model-len": 128,
        "--max-tokens": STEPS,
    }
    monkeypatch.setattr(vllm, "LLM", Recorded)
    monkeypatch.setattr("sys.argv", ["run.py", *(str(word) for item in options.items() for word in item)])
    runpy.run_path(
        str(ports.workspace / "examples/vllm_neuron/models/random_draft/run.py"), run_name="__main__"
    )
    found = capsys.readouterr().out
    assert found.count("Generated: ") == len(outputs) == 4
    assert re.search(r"Drafts: [1-9]\d*, accepted: \d+$", found)
    right = expected(ports, [output.prompt_token_ids for output in outputs])
    for output, greedy in zip(outputs, right, strict=True):
        ids = list(output.outputs[0].token_ids)
        assert ids == greedy[: len(ids)]


# --- What is refused ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def configure(ports, drafts, environment):
    def make(neuron_config=None, options=None, **speculative):
        from vllm.engine.arg_utils import EngineArgs

        config = {
            "method": "eagle3",
            "model": str(drafts["random"]),
            "num_speculative_tokens": COUNT,
            **speculative,
        }
        return EngineArgs(
            str(ports.checkpoints["llama"]),
            dtype="float32",
            max_model_len=256,
            enable_prefix_caching=False,
            speculative_config=config,
            additional_config={"neuron_config": neuron_config or {}},
            **(options or {}),
        ).create_engine_config()

    return make


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "ngram", "model": None, "prompt_lookup_max": 2}, "method 'ngram', only 'eagle3'"),
        ({"parallel_drafting": True}, "parallel_drafting True: drafts are made one after the other"),
        ({"draft_sample_method": "probabilistic"}, "drafts are greedy"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method 'block'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8': the draft's KV cache has the model's dtype"),
        ({"max_model_len": 128}, "max_model_len 128: the draft's is the target's"),
        (
            {"neuron_config": {"num_batched_tokens_buckets": [4, 256]}},
            "begin at 4; with 3 drafts they must be above 4",
        ),
        ({"options": {"kv_cache_dtype": "fp8"}}, "the draft's KV cache has the model's dtype"),
        (
            {"options": {"tensor_parallel_size": 2}, "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size 1, use the target's, 2",
        ),
    ],
)
def test_refused_configurations(configure, speculative, message):
    with pytest.raises(ValueError, match=message):
        configure(**speculative)


def test_a_draft_of_another_target_is_refused(configure, tmp_path):
    other = write(tmp_path / "other", {**PUBLISHED, "hidden_size": 128, "vocab_size": 256}, tensors())
    with pytest.raises(ValueError, match=r"a hidden size of 128.*a vocabulary of 256, the target's is 512"):
        configure(model=str(other))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (torch.nn.Linear, "no row for the draft's architecture 'Eagle3Other'"),  # as a class of vLLM's own
        (SimpleNamespace(from_configs=None), "Linear hands out no hidden states"),
    ],
)
def test_what_cannot_draft_is_refused(factory, message):
    from vllm_neuron.vllm.worker.proposer import Proposer

    registry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (factory, None))
    draft = SimpleNamespace(registry=registry, architecture="Eagle3Other")
    config = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))
    with pytest.raises(ValueError, match=message):
        Proposer(config, None, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("sampling", [{}, CPU_SAMPLING])
def test_refused_sampling_parameters(configure, sampling):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm_neuron.vllm.platform import NeuronPlatform

    configure(sampling)
    NeuronPlatform.validate_request({}, SamplingParams(temperature=1.0, top_k=4, top_p=0.5, logprobs=3))
    with pytest.raises(VLLMValidationError, match="would ignore repetition_penalty, seed"):
        NeuronPlatform.validate_request({}, SamplingParams(temperature=1.0, repetition_penalty=1.5, seed=1))
