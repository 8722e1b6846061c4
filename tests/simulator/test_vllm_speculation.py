"""A target and an Eagle3 draft under the real vLLM engine: the tokens of the target alone, and fewer steps."""

import contextlib

import engines
import pytest
from autoport.analysis.draft import plan_draft
from autoport.codegen.draft import write_draft
from autoport.workspace import Port, Workspace
from drafts import PUBLISHED, fitted, tensors, write
from engines import CPU_SAMPLING, generate, metric, prompts, tokens

STEPS, COUNT = 16, 3  # tokens of a run, and drafts of a step
TEXTS = prompts([6, 50, 33])
BUCKETS = {"num_batched_tokens_buckets": [64, 256], "num_seqs_buckets": [2, 8]}


@pytest.fixture(scope="module")
def drafts(ports, tmp_path_factory):
    """Checkpoint of a draft that is right about the prompts, and of one that is not, of one package."""
    folder = tmp_path_factory.mktemp("drafts")
    model = ports.reference("llama")
    count = model.config.num_hidden_layers
    layers = [1, count - 1, count]
    config = {
        **PUBLISHED,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    sizes = {"hidden": model.config.hidden_size, "vocab": model.config.vocab_size}
    found = {
        "fitted": write(folder / "fitted", config, fitted(model, layers, TEXTS, STEPS)),
        "random": write(folder / "random", config, tensors(own_embedding=False, **sizes)),
    }
    port = Port(Workspace.find(ports.workspace), "tiny_draft", str(found["fitted"]))
    write_draft(port, plan_draft(port.source))
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
        texts = prompts([1, 31, 32, 33, 64, 65, 100, 200, 238, 255])  # about these the draft is wrong
        assert tokens(generate(llm, texts[:-1], STEPS)) == expected(ports, texts[:-1])
        assert tokens(generate(llm, texts[-2:], STEPS + 2))[1] == expected(ports, texts[-1:], 1)[0]


def counted(llm):
    """vLLM's numbers of drafted steps, drafts and accepted drafts."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: metric(llm, f"vllm:spec_decode_num_{name}") for name in names}


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_with_segments_prefix_cache_and_contexts(ports, served, ranks):
    long, short = prompts([700, 40])
    texts = [long, short, long[:600] + short]
    options = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "neuron_config": {"decode_context_length_buckets": [128, 512]},
    }
    right = expected(ports, texts)
    with served(tensor_parallel_size=ranks, **options) as llm:
        for cached in (0, 1):
            outputs = generate(llm, texts, STEPS)
            assert tokens(outputs) == right
            assert all(output.num_cached_tokens > 0 for output in outputs) == bool(cached)
        first = counted(llm)
        assert tokens(generate(llm, TEXTS, STEPS)) == expected(ports, TEXTS)
        assert counted(llm)["accepted_tokens"] > first["accepted_tokens"]
