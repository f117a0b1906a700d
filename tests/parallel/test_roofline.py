import math
import types

import numpy as np
import pytest

from lm.parallel.ahead import exceeded
from lm.parallel.chips import Chip
from lm.parallel.collectives import Collective, Kind
from lm.parallel.roofline import Roofline, ring_bytes, ring_links, roofline

CHIP = Chip("TPU test", 100.0, 1.0, 10.0, 4, 2.0, 1.0, "made up")


def devices(*torus: int, slices: int = 1):
    places = [np.unravel_index(index, torus) for index in range(math.prod(torus))]
    return [types.SimpleNamespace(coords=place, slice_index=part) for part in range(slices) for place in places]


def mesh(torus: tuple[int, ...], slices: int = 1, **axes: int):
    made = np.empty(math.prod(torus) * slices, object)
    made[:] = devices(*torus, slices=slices)
    return types.SimpleNamespace(devices=made.reshape(tuple(axes.values())), axis_names=tuple(axes), shape=axes)


def sent(kind: Kind, size: int, *axes: str, count: int = 1) -> Collective:
    return Collective(kind, size, axes, count, "", "")


def test_a_ring_sends_all_but_ones_own_part_and_a_sum_goes_round_twice():
    assert ring_bytes(sent(Kind.ALL_GATHER, 80, "fsdp"), 4) == 60
    assert ring_bytes(sent(Kind.REDUCE_SCATTER, 80, "fsdp"), 4) == 60
    assert ring_bytes(sent(Kind.ALL_REDUCE, 80, "fsdp"), 4) == 120
    assert ring_bytes(sent(Kind.COLLECTIVE_PERMUTE, 80, "fsdp"), 4) == 80
    assert ring_bytes(sent(Kind.ALL_REDUCE, 80, "fsdp"), 1) == 0


@pytest.mark.parametrize(
    ("torus", "rows", "links"),
    [
        ((4, 4), slice(0, 4), 1),  # a row of a 2-D slice that is no ring
        ((16, 16), slice(0, 16), 2),
        ((16, 16), slice(0, 256), 4),
        ((4, 4, 8), slice(0, 128), 6),
        ((2, 2, 1), slice(0, 4), 2),
    ],
)
def test_links_are_those_of_the_torus_dimensions_that_a_group_extends_over(torus, rows, links):
    assert ring_links(devices(*torus)[rows], torus) == links


def test_a_worked_example():
    gather = sent(Kind.ALL_GATHER, 160, "fsdp", count=3)  # 3 times 150 bytes over 2 links of 2 bytes/s
    found = roofline(CHIP, 1000.0, 50.0, [gather], mesh((16, 16), data=16, fsdp=16), (16, 16))
    assert found == Roofline(compute=10.0, hbm=5.0, ici=112.5, dcn=0.0)
    assert found.bound == "ici"
    assert (found.overlapped, found.serial) == (112.5, 127.5)


def test_between_slices_the_slow_network_carries_a_share_of_each_chip():
    total = sent(Kind.ALL_REDUCE, 64, "replica", "fsdp")
    pod = mesh((4, 4), slices=2, replica=2, fsdp=16)
    found = roofline(CHIP, 0.0, 0.0, [total], pod, (4, 4))
    assert found.ici == 2 * 64 * 15 / 16 / (2 * 2.0)
    assert found.dcn == 2 * 64 / 2 / 16 / 1.0
    unknown = Chip("TPU test", 100.0, 1.0, 10.0, 4, 2.0, None, "made up")
    assert roofline(unknown, 0.0, 0.0, [total], pod, (4, 4)).dcn == math.inf


def test_the_compilers_refusals_are_read_and_others_are_not_mistaken_for_them():
    total = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (65.09G) "
    assert exceeded(total + "exceeds available HBM (15.75G).") == (round(65.09 * 2**30), round(15.75 * 2**30))
    assert exceeded("Used 17.50G of 15.75G hbm. Exceeded hbm capacity by 1.75G.") == (
        round(17.5 * 2**30),
        round(15.75 * 2**30),
    )
    assert exceeded("INTERNAL: Mosaic failed to compile TPU kernel") is None
