"""The harness: padded steps through the paged cache against full attention, and what it refuses."""

import pytest
import torch
from toy_model import HIDDEN, VOCAB, Toy, reference, save_toy, toy_config
from vllm_neuron.simulator.activate import activate, deactivate


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory):
    activate(1, 0, tmp_path_factory.mktemp("rank") / "init")
    yield
    deactivate()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def harness(checkpoint):
    def make(factory=Toy, config=None, sampling=None, **options):
        from vllm_neuron.simulator.harness import Harness

        defaults = {
            "neuron_config": {"on_device_sampling_config": sampling},
            "dtype": torch.float32,
            "num_blocks": 32,
            "max_model_len": 256,
            "num_batched_tokens_buckets": [32, 256],
            "num_seqs_buckets": [1, 4],
        }
        return Harness(factory, config or toy_config(), checkpoint, **{**defaults, **options})

    return make


def tokens(count, seed):
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(logits, expected):
    assert logits.shape == expected.shape
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("count", [1, 31, 32, 33, 150, 256])
def test_prefill(harness, count):
    prompt = tokens(count, count)
    run = harness()
    check(run.prefill(run.add(prompt)), reference(prompt)[-1:])
    assert list(run.reports) == [("prefill", 32 if count <= 32 else 256)]


@pytest.mark.parametrize("count", [512, 700, 1000])
def test_segmented_prefill(harness, count):
    prompt = tokens(count, count)
    run = harness(max_model_len=1024, kv_segment_size=512, num_batched_tokens_buckets=[512], num_blocks=64)
    sequence = run.add(prompt)
    check(run.prefill(sequence, all_positions=True), reference(prompt))
    check(run.decode([sequence], [3]), reference([*prompt, 3])[-1:])


def test_decode_in_a_padded_batch(harness):
    run = harness()
    prompts = [tokens(30, 1), tokens(63, 2), tokens(5, 3)]  # into new blocks on the way
    sequences = [run.add(prompt) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        check(run.prefill(sequence, all_positions=True), reference(prompt))
    for step in range(6):
        new = [step, step + 10, step + 20]
        logits = run.decode(sequences, new)
        prompts = [[*prompt, token] for prompt, token in zip(prompts, new, strict=True)]
        check(logits, torch.stack([reference(prompt)[-1] for prompt in prompts]))
    assert ("decode", 4) in run.reports


@pytest.mark.parametrize("count", [40, 200])
def test_sliding_window(harness, count):
    run = harness(config={"window": 64})
    prompt = tokens(count, 1)
    sequence = run.add(prompt)
    check(run.prefill(sequence, all_positions=True), reference(prompt, window=64))
    for token in range(10):
        prompt.append(token)
        check(run.decode([sequence], [token]), reference(prompt, window=64)[-1:])


def test_generate_on_the_host_and_on_the_device(harness):
    prompts = [tokens(n, n) for n in (3, 40, 9, 20, 33)]  # more than fit one batch
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(reference(ids)[-1].argmax()))
        expected.append(ids[len(prompt) :])
    assert harness().generate(prompts, 6) == expected
    on_device = harness(sampling={})
    assert on_device.generate(prompts, 6) == expected
    ids = on_device.prefill(on_device.add(prompts[0]))
    assert ids.tolist() == expected[0][:1]


def test_blocks_are_never_block_0_and_come_back(harness):
    run = harness(num_blocks=5, max_model_len=128, num_batched_tokens_buckets=[128])
    sequence = run.add(tokens(128, 1))
    assert sorted(sequence.blocks[0]) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="no free block"):
        run.add([1])
    run.prefill(sequence)
    with pytest.raises(ValueError, match="max_model_len 128 tokens already"):
        run.decode([sequence], [1])
    run.release(sequence)
    first, second = run.add(tokens(64, 2)), run.add(tokens(60, 3))
    for sequence in (first, second):
        run.prefill(sequence)
    with pytest.raises(RuntimeError, match="no free block"):
        run.decode([first, second], [1, 1])
    assert (len(first.token_ids), len(second.token_ids)) == (64, 60)
    assert run.decode([second], [1]).shape == (1, VOCAB)


# --- Mistakes in a model ----------------------------------------------------------------------------------


class MovesInDecode(Toy):
    def decode(self, hidden, positions, meta):
        return super().decode(hidden, positions.to("cpu"), meta)


class ReadsAValue(Toy):
    def prefill(self, hidden, meta):
        return super().prefill(hidden, meta) * (1 if hidden.sum() > 0 else 2)


class ForgetsItsTable(Toy):
    def __init__(self, hf_config, neuron_config):
        super().__init__(hf_config, neuron_config)
        self.inv_freq = torch.arange(4.0)


class ReturnsAllPositions(Toy):
    def forward(self, sampling_positions, **arguments):
        return super().forward(sampling_positions=torch.arange(32), **arguments)


class WritesOneSlotOff(Toy):
    def prefill(self, hidden, meta):
        return super().prefill(hidden, {**meta, "slot_mapping": (meta["slot_mapping"] - 1).clamp(min=0)})


def test_rules_hold_in_every_kind_of_step(harness):
    run = harness(ReadsAValue)
    with pytest.raises(RuntimeError, match=r"Unsupported Tensor\.item\(\) call"):
        run.prefill(run.add([1]))
    run = harness(MovesInDecode)
    sequence = run.add([1])
    run.prefill(sequence)
    with pytest.raises(NotImplementedError, match="_copy_from"):
        run.decode([sequence], [1])


def test_a_tensor_made_in_the_constructor(harness):
    with pytest.raises(NotImplementedError, match=r"meta tensor; no data! .*: inv_freq$"):
        harness(ForgetsItsTable)


def test_a_wrong_return_value(harness):
    run = harness(ReturnsAllPositions)
    with pytest.raises(ValueError, match=r"must return logits \[1, vocabulary\], got \(32, 64\)"):
        run.prefill(run.add([1]))


def test_keys_in_the_wrong_slot_show_in_decode(harness):
    run = harness(WritesOneSlotOff)
    prompt = tokens(40, 1)
    sequence = run.add(prompt)
    check(run.prefill(sequence), reference(prompt)[-1:])
    with pytest.raises(AssertionError):
        check(run.decode([sequence], [1]), reference([*prompt, 1])[-1:])


# --- Use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_batched_tokens_buckets": [512], "max_model_len": 1024}, "pass kv_segment_size=512"),
        ({"num_batched_tokens_buckets": [100], "max_model_len": 256}, "must be a segment size"),
        ({"kv_segment_size": 512}, "must equal kv_segment_size_buckets"),
        ({"num_seqs_buckets": [4, 2]}, "ascending"),
        ({"num_batched_tokens_buckets": []}, "ascending"),
    ],
)
def test_buckets_that_the_runner_refuses(harness, options, message):
    with pytest.raises(ValueError, match=message):
        harness(**options)


def test_misuse_changes_nothing(harness):
    run = harness(num_seqs_buckets=[1])
    first, second = run.add([1, 2]), run.add([3])
    with pytest.raises(ValueError, match="not computed"):
        run.decode([first], [1])
    run.prefill(first)
    with pytest.raises(ValueError, match="computed already"):
        run.prefill(first)
    with pytest.raises(ValueError, match="1 to 1 sequences, got 2"):
        run.decode([first, second], [1, 1])
    with pytest.raises(ValueError, match="2 tokens"):
        run.decode([first], [1, 1])
    with pytest.raises(ValueError, match="1 to 256 tokens, got 0"):
        run.add([])
    assert first.token_ids == [1, 2]
    check(run.decode([first], [5]), reference([1, 2, 5])[-1:])
    assert run.model.head.in_features == HIDDEN
