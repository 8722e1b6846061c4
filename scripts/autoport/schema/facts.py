"""What is known of a model (`facts.json`, `checkpoint.json` of Step 1): each value carries where it was read."""

from typing import Annotated, Any

import msgspec

from autoport.schema.field_types import check_fields, check_finding, check_names

Place = Annotated[str, msgspec.Meta(min_length=1)]  # a file, folder or hub id, for messages too


class Fact(msgspec.Struct, frozen=True):
    """A value and the place it comes from.

    `source` is ``"config.json: <key path>"``, ``"<Class> default (transformers <version>, <file>:<line>)"`` or
    ``"derived: <formula>"``.
    """

    value: Any
    source: str


class TensorHeader(msgspec.Struct, frozen=True):
    """One entry of a safetensors header.

    `dtype` is the format's own name (``"BF16"``, ``"F32"``, ...); `offset` is where the data begins in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Place
    num_bytes: int
    offset: int = 0


class Checkpoint(msgspec.Struct):
    """What the safetensors headers say; no tensor data is ever read.

    Attributes:
        source: Local folder or hub id.
        files: The safetensors files, in name order.
        tensors: Header entry by checkpoint key.
        total_bytes: Sum of the tensors' sizes in bytes.
        bytes_read: Bytes read to learn this.
        notes: What a reader must know, e.g. files that were left out.
        left_out: Safetensors files beside those of the checkpoint.
    """

    source: Place
    files: list[str]
    tensors: dict[str, TensorHeader]
    total_bytes: int
    bytes_read: int
    notes: list[str] = []
    left_out: list[str] = []


class Finding(msgspec.Struct, frozen=True):
    """What the modeling file says, by reading its text.

    Attributes:
        topic: ``norm``, ``rope``, ``block``, ``activation``, ``attention_scale``, ``embedding_scale``, ``scale``,
            ``softcap``, ``sinks``, ``qk_norm`` or ``router``.
        subject: Class and attribute, or function, that it is about.
        where: File and line.
        confirmed: Whether running the piece gave the same, in everything that is compared.
    """

    topic: str
    subject: str
    value: dict[str, Any]
    where: str
    confirmed: bool = False

    def __post_init__(self) -> None:
        check_finding(self.topic, self.value)


class ModelingReading(msgspec.Struct, frozen=True):
    """The reading of a modeling file.

    Attributes:
        file: Name of the file; empty when there is none.
        reads: Config attribute -> the first place that reads it.
        note: Why there is no reading, or what to know about it.
    """

    file: str = ""
    findings: list[Finding] = []
    reads: dict[str, str] = {}
    note: str = ""


class Facts(msgspec.Struct):
    """Step 1: what is known of the model, each value with its source.

    Attributes:
        config: The config as it was read.
        config_digest: SHA-256 of config.json's content as it was read (see `research.config.config_digest`).
        config_content: The hub's id of that content, empty for a local folder (see `research.source.Source`).
        architecture: Exact string of `architectures`, the one used for registration.
        fields: Semantic fields under their standard names (``hidden_size``, ``norm_eps``, ``rope_type``, ...).
        text_path: Where the decoder's config stands in `config`, e.g. ``"text_config."``; empty for the top.
        declared: Config keys beside the fields that the declaration of the class reads.
        unconsumed: Config keys that neither a field nor a declaration took and that look semantic.
        inert: Such keys that the modeling file does not read, and the config class does not know or gives this value.
        remote_code: The `auto_map` of the config; present means a review gate.
        modeling: What the modeling file computes.
        stored_as: Weight format of a quantised checkpoint, e.g. ``mxfp4``; `config` and the checkpoint are then
            those of the dequantised model.
        warnings: What a reader must know but what does not stop the run.

    Raises:
        ValueError: A field that has another type than `autoport.schema.field_types` says; `msgspec` turns it into its
            `ValidationError` when it decodes.
    """

    source: Place
    config_file: Place
    config: dict[str, Any]
    architecture: Fact
    model_type: Fact
    fields: dict[str, Fact]
    config_digest: str = ""
    config_content: str = ""
    text_path: str = ""
    declared: dict[str, Fact] = {}
    unconsumed: dict[str, Any] = {}
    inert: list[str] = []
    remote_code: dict[str, Any] = {}
    modeling: ModelingReading = ModelingReading()
    stored_as: str = ""
    warnings: list[str] = []

    def __post_init__(self) -> None:
        check_names(architecture=self.architecture.value, model_type=self.model_type.value)
        check_fields({name: fact.value for name, fact in self.fields.items()})
