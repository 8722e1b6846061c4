"""What an instance offers: one table of constants, each with its source."""

import msgspec

from autoport.errors import refuse

GB = 1_000_000_000
CORES_PER_DEVICE = (
    8  # physical NeuronCores of a Trainium2 and of a Trainium3 device (AWS Neuron documentation)
)
RESERVE_BYTES = 2 * GB  # assumed, not measured: compiled graphs, activations, collective buffers
WEIGHT_SHARE = 20 / 24  # the guide's rule: about 20 GB of weights in the 24 GB of a rank at LNC 2


class Instance(msgspec.Struct, frozen=True):
    """An instance type at one LNC (physical cores that make up one logical core).

    Attributes:
        devices: Neuron devices of the instance.
        hbm_gb: Memory of one device.
        source: Where devices and memory are said.
    """

    name: str
    devices: int
    hbm_gb: int
    lnc: int
    source: str

    @property
    def cores(self) -> int:
        """Logical cores, one per rank."""
        return self.devices * CORES_PER_DEVICE // self.lnc

    @property
    def bytes_per_core(self) -> int:
        """Share of a device's memory that one logical core has, in bytes."""
        return self.hbm_gb * GB * self.lnc // CORES_PER_DEVICE

    @property
    def weight_limit_bytes(self) -> int:
        return int(self.bytes_per_core * WEIGHT_SHARE)


AWS = "AWS Neuron documentation, instance and architecture pages"
GUIDE = "Autoport guide, hardware requirements: 24 GB per logical core at LNC 2, 96 GB per device; " + AWS
HARDWARE = {
    "trn2.48xlarge": (16, 96, GUIDE),
    "trn2.3xlarge": (1, 96, AWS),
    "trn3": (1, 144, f"{AWS} (one device; sizes of instances are not in this table)"),
}
DEFAULT = "trn2.48xlarge"


def find_instance(name: str = DEFAULT, lnc: int = 2) -> Instance:
    """Look an instance type up.

    Raises:
        Refusal: TP-INSTANCE for a type that is not in the table, TP-LNC for an LNC other than 1 or 2.
    """
    if name not in HARDWARE:
        known = ", ".join(HARDWARE)
        raise refuse("TP-INSTANCE", f"unknown instance {name!r}", "option --instance", f"use one of {known}")
    if lnc not in (1, 2):
        raise refuse("TP-LNC", f"LNC {lnc}", "option --lnc", "use 1 or 2")
    devices, hbm, source = HARDWARE[name]
    return Instance(name, devices, hbm, lnc, source)
