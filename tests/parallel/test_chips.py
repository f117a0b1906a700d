import jax
import pytest

from lm.parallel import peak
from lm.parallel.chips import CHIPS, chip_of


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_a_known_chip_is_measured_against_its_published_rate(monkeypatch, kind, rate):
    class Device:
        device_kind = kind

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert peak.peak_flops("float32") == rate


def test_an_unknown_device_has_no_row():
    assert chip_of("cpu") is None
    assert chip_of("NVIDIA") is None


def test_rates_are_in_one_unit_and_stand_beside_their_source():
    # Every accelerator since 2020 does 100 to 2500 TFLOP/s, moves 0.5 to 10 TB/s and holds 10 to 300 GB.
    for chip in CHIPS:
        assert 1e14 < chip.flops < 2.5e15
        assert 5e11 < chip.hbm_rate < 1e13
        assert 1e10 < chip.hbm_bytes < 3e11
        assert 1e10 < chip.link_rate < 1e12
        assert chip.source
    assert len({chip.kind for chip in CHIPS}) == len(CHIPS)
