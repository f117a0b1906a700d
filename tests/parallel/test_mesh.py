import jax
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.parallel import peak
from lm.parallel.mesh import AXES, MeshConfig, make_mesh
from lm.parallel.rules import batch_sharding, put_batch


@pytest.mark.parametrize("sizes", [(0, 1), (-2, 1), (-1, -1), (-1, 2), (2, 2), (-2, -4), (3, -1)])
def test_a_mesh_that_does_not_fit_is_refused_by_its_axes(sizes, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8 if sizes in ((-2, -4), (3, -1), (2, 2)) else 1)
    with pytest.raises(UsageError, match=r"config\.mesh: mesh .* does not fit . devices.*set one to -1"):
        make_mesh(MeshConfig(*sizes))


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
