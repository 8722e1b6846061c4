"""The fixed scenario that the port and the Hugging Face class both run.

One run covers what serving does: a short prompt padded into its bucket, a longer one whose logits are
compared at every position, a prompt prefilled in two segments (the second one padded), and decode steps
through the paged cache with two sequences of different length in one batch, padded to a bucket of four. The
port is loaded a third time with sampling on the device, which is how it is served.
"""

import random

import msgspec

BLOCK_SIZE = 32  # the plugin's default
SEGMENT_SIZE = 512  # the smallest that the kernel has

# Single-shot prefill needs buckets that end at max_model_len; the decode kernel needs a multiple of 128.
SINGLE_SHOT_BUCKETS = [64, 256]
SINGLE_SHOT_MODEL_LEN = 256
SEGMENTED_MODEL_LEN = 1024
DECODE_BUCKETS = [4]
NUM_BLOCKS = 1 + 2 * SEGMENTED_MODEL_LEN // BLOCK_SIZE  # block 0 is reserved; two kinds of layers

PREFILL, SEGMENTED, DECODE = "prefill", "segmented prefill", "decode"
SAMPLING = "on-device sampling"
PHASES = [PREFILL, SEGMENTED, DECODE, SAMPLING]


class Sequence(msgspec.Struct, frozen=True):
    """A prompt and the decode steps after it.

    The prompts of the single-shot run end just below a multiple of the block size, so that decode crosses
    into a new block; the segmented one takes a full segment and a part of a second one.
    """

    prompt_length: int
    steps: int

    @property
    def length(self) -> int:
        return self.prompt_length + self.steps


SHORT = Sequence(prompt_length=58, steps=12)
LONG = Sequence(prompt_length=150, steps=12)
SPLIT = Sequence(prompt_length=700, steps=4)
SEQUENCES = {"short": SHORT, "long": LONG, "split": SPLIT}
SAMPLING_STEPS = 2


class Span(msgspec.Struct, frozen=True):
    """Positions of a sequence that a phase computes logits for."""

    phase: str
    sequence: str
    start: int
    stop: int


SPANS = [
    Span(PREFILL, "short", SHORT.prompt_length - 1, SHORT.prompt_length),
    Span(PREFILL, "long", 0, LONG.prompt_length),
    Span(SEGMENTED, "split", 0, SPLIT.prompt_length),
    Span(DECODE, "short", SHORT.prompt_length, SHORT.length),
    Span(DECODE, "long", LONG.prompt_length, LONG.length),
    Span(DECODE, "split", SPLIT.prompt_length, SPLIT.length),
    Span(SAMPLING, "short", SHORT.prompt_length - 1, SHORT.prompt_length + SAMPLING_STEPS),
]


def draw_sequences(vocab_size: int, seed: int) -> dict[str, list[int]]:
    """Return each sequence, prompt and continuation, as token ids drawn uniformly from the vocabulary."""
    draw = random.Random(seed)
    prompts = {
        name: [draw.randrange(vocab_size) for _ in range(sequence.prompt_length)]
        for name, sequence in SEQUENCES.items()
    }
    return {
        name: prompt + [draw.randrange(vocab_size) for _ in range(SEQUENCES[name].steps)]
        for name, prompt in prompts.items()
    }
