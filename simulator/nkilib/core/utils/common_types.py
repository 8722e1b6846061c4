"""Enums of the kernel library that appear in the operators' signatures. Values are the library's."""

from enum import Enum


class NormType(Enum):
    NO_NORM = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    RMS_NORM_SKIP_GAMMA = 3


class ActFnType(Enum):
    """Swish is silu in `mlp` but g*sigmoid(1.702*g) in the MoE operators."""

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3


class RouterActFnType(Enum):
    SIGMOID = 0
    SOFTMAX = 1


class ExpertAffinityScaleMode(Enum):
    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2
    PRE_SCALE_DELAYED = 3


class QuantizationType(Enum):
    NONE = 0
    STATIC = 1
    ROW = 2
    MX = 3
    STATIC_MX = 4
    ROW_MX = 5


class QKVOutputLayout(Enum):
    BSD = 0
    NBSd = 1
    NBdS = 2


class QKVWeightLayout(Enum):
    CONTIGUOUS = 0
    MX_CONTIGUOUS = 1
    MX_INTERLEAVED = 2


class GateUpDim(Enum):
    GATE = 0
    UP = 1


class MoEAllToAllVStrategy(Enum):
    """In newer versions of the library; the values are not published."""

    DISABLED = 0
    PRESERVE_ROW_ORDER = 1
    PACK_OUTPUT_ROWS = 2
