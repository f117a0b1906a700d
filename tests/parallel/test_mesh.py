import jax
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.parallel import peak
from lm.parallel.ahead import described_devices
from lm.parallel.mesh import AXES, MeshConfig, make_mesh
from lm.parallel.rules import batch_sharding, put_batch


class FakeDevice:
    platform, device_kind, process_index = "cpu", "cpu", 0

    def __init__(self, index: int, slices: int = 1):
        self.id, self.slice_index = index, index % slices


def fake(count: int, slices: int = 1) -> list[FakeDevice]:
    return [FakeDevice(index, slices) for index in range(count)]


@pytest.mark.parametrize("sizes", [{"data": 0}, {"data": -2}, {"fsdp": -1}, {"fsdp": 2, "data": 2}, {"tensor": 3},
                                   {"data": -2, "fsdp": -4}, {"replica": 16}])  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused_by_its_axes(sizes):
    with pytest.raises(UsageError, match=r"config\.mesh: mesh .* does not fit 8 devices.*set one to -1"):
        make_mesh(MeshConfig(**sizes), fake(8))


@pytest.mark.parametrize(
    ("axes", "slices", "across"),
    [
        ({"replica": 2}, 2, {"replica": 2}),
        ({"replica": 4}, 2, {"replica": 2}),
        ({}, 2, {"data": 2}),
        ({"replica": 2, "data": 2, "tensor": 2}, 4, {"replica": 2, "data": 2}),
        ({"data": 1, "fsdp": 8}, 2, {"fsdp": 2}),
    ],
)
def test_slices_lie_along_the_outermost_axes_and_the_inner_axes_inside_a_slice(axes, slices, across):
    mesh = make_mesh(MeshConfig(**axes), fake(8, slices))
    slice_of = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    for number, axis in enumerate(AXES):
        along = np.moveaxis(slice_of, number, -1).reshape(-1, mesh.shape[axis])
        assert {len(set(row)) for row in along.tolist()} == {across.get(axis, 1)}


def test_slices_that_no_outer_axes_can_hold_are_refused():
    with pytest.raises(UsageError, match=r"cannot be spread over 3 slices\. Set config\.mesh\.replica to 3"):
        make_mesh(MeshConfig(data=2, fsdp=5), fake(10, 3))


def test_an_axis_may_take_a_part_of_a_dimension_of_the_torus():
    pytest.importorskip("libtpu", reason="libtpu (the extra 'aot') is not installed")
    devices = described_devices("v5p:4x4x4")
    mesh = make_mesh(MeshConfig(data=2, fsdp=8, tensor=4), devices)
    assert set(mesh.devices.flat) == set(devices)
    tensor = mesh.devices.reshape(-1, 4)[0]
    assert sum(len(set(along)) > 1 for along in zip(*(device.coords for device in tensor), strict=True)) == 1


def test_the_default_mesh_takes_all_devices_and_leaves_sharding_to_the_compiler():
    mesh = make_mesh(MeshConfig())
    assert mesh.size == jax.device_count()
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_a_batch_arrives_as_it_was():
    mesh = make_mesh(MeshConfig())
    batch = {"inputs": np.arange(16, dtype=np.int32).reshape(8, 2)}
    placed = put_batch(batch, mesh)
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
    assert placed["inputs"].sharding == batch_sharding(mesh)


def test_another_device_is_measured():
    # Any machine that runs these tests lies between 1 GFLOP/s and 10 PFLOP/s.
    assert 1e9 < peak.measured_matmul_flops("float32", seconds=0.02) < 1e16
