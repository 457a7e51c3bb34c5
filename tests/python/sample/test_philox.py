"""The counter-based generator: known answers, range, and independence of its parts."""

import numpy as np
import pytest

from steploop import _C

FULL = 0xFFFFFFFF


# Known answers of the Random123 library for philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([FULL] * 4, [FULL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert _C.philox4x32(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 5, 2**32, 2**40 + 3])
@pytest.mark.parametrize("sample_index", [0, 7])
def test_uniform_is_the_middle_of_one_of_two_to_the_52_cells(seed, sample_index, position):
    words = _C.philox4x32([position % 2**32, position >> 32, sample_index, 0], [seed % 2**32, seed >> 32])
    cell = (words[1] << 32 | words[0]) >> 12
    assert _C.uniform(seed=seed, sample_index=sample_index, position=position) == (2 * cell + 1) / 2**53


def test_uniform_is_uniform_over_positions_seeds_and_samples():
    for draw in (
        lambda i: _C.uniform(seed=3, sample_index=0, position=i),
        lambda i: _C.uniform(seed=i, sample_index=0, position=9),
        lambda i: _C.uniform(seed=3, sample_index=i, position=9),
    ):
        numbers = np.array([draw(i) for i in range(20_000)])
        assert 0 < numbers.min() < 1e-3
        assert 1 - 1e-3 < numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        chi_square = ((counts - 200) ** 2 / 200).sum()
        assert 50 < chi_square < 160  # 99 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
