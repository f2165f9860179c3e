"""Configurations of the chunk kernels: tables per chip, slices of the state, segments of a sequence."""

import itertools
from pathlib import Path

import pytest
import torch

from deltanet_kernels.common.config import slices, tile_width
from deltanet_kernels.gated_delta_rule import chips
from deltanet_kernels.gated_delta_rule.chips import KERNELS, chunk_config, kernels
from deltanet_kernels.gated_delta_rule.segments import composes, segments_for
from deltanet_kernels.gated_delta_rule.step_sizes import step_slices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_slices_of_V_never_exceed_the_head() -> None:
    heads, capabilities = [(8, 8), (64, 64), (100, 40), (128, 128), (40, 128), (256, 256)], [(8, 0), (9, 0), (12, 0)]
    for (K, V), dtype, capability in itertools.product(heads, DTYPES, capabilities):
        config = chunk_config(K, V, dtype, capability)
        padded = max(64 if dtype == torch.float16 else 16, 1 << (V - 1).bit_length())
        for name in ("state_BV", "output_BV", "grad_BV", "pair_BV", "input_BV"):
            assert 16 <= getattr(config, name) <= padded, (name, K, V, dtype, capability)


def test_float16_tiles_lie_in_shared_memory_in_one_pattern() -> None:
    """ptxas 12.8 mixes up tiles less than 128 bytes wide with the others (config.tile_width)."""
    for K, V in ((16, 40), (40, 16), (32, 64), (64, 128), (128, 24)):
        config = chunk_config(K, V, torch.float16, (9, 0))
        widths = [getattr(config, name) for name in ("state_BV", "output_BV", "grad_BV", "pair_BV", "input_BV")]
        assert min(tile_width(K, torch.float16), *widths) >= 64


def test_only_hopper_prefetches_the_state_passes() -> None:
    assert chunk_config(128, 128, torch.bfloat16, (9, 0)).state_stages == 3
    other = chunk_config(128, 128, torch.bfloat16, (8, 9))
    assert (other.state_stages, other.grad_stages, other.state_BV) == (1, 1, 32)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0)])
def test_every_size_has_a_configuration_and_a_kernel_per_stage(capability: tuple[int, int]) -> None:
    stages = list(dict.fromkeys(row.stage for row in KERNELS))
    folder = Path(chips.__file__).parent
    for dtype, K, V in itertools.product(DTYPES, range(1, 257, 15), range(1, 257, 15)):
        assert chunk_config(K, V, dtype, capability).C in (32, 64)
        rows = kernels(K, V, dtype, capability, 2, 2, 2)
        assert list(dict.fromkeys(row.stage for row in rows)) == stages
        for file in (name.split()[0] for row in rows for name in row.file.split(", ")):
            assert (folder / file).exists()


def test_few_states_get_narrow_slices() -> None:
    for states, wanted in ((128, (128, 8)), (67, (128, 8)), (66, (64, 4)), (1, (64, 4))):
        assert slices(128, 8, 128, states, 132) == wanted
        assert slices(64, 4, 64, states, 132) == (64, 4)


SEGMENTS: list[tuple[int, int, int]] = [
    (128, 512, 1),
    (64, 512, 2),
    (40, 512, 3),
    (32, 2048, 8),
    (32, 300, 4),
    (9, 512, 14),
    (8, 1024, 16),
    (8, 256, 8),
    (1, 255, 1),
    (1, 10**6, 64),
    (0, 0, 1),
]


def test_sequences_are_cut_only_where_the_chip_is_idle() -> None:
    assert [segments_for(programs, chunks, 132) for programs, chunks, _ in SEGMENTS] == [row[2] for row in SEGMENTS]


def test_only_many_segments_of_narrow_keys_are_composed() -> None:
    assert composes(4, 128)
    assert not composes(3, 128)
    assert not composes(64, 192)


def test_a_step_of_one_token_takes_slices_that_fit_into_registers() -> None:
    for K, V in ((8, 8), (16, 256), (64, 64), (96, 40), (100, 65), (128, 128), (256, 200)):
        width, warps, _ = step_slices(K, V, 64, 132)
        assert width & (width - 1) == 0
        assert width < 2 * V
        padded = 1 << (K - 1).bit_length()
        assert padded * width <= 64 * 32 * warps  # elements of a slice, a quarter of a thread's registers


def test_slices_are_loaded_early_with_at_most_two_programs_per_multiprocessor() -> None:
    for programs, early in ((1, True), (264, True), (265, False), (8192, False)):
        assert step_slices(128, 128, programs, 132) == (64, 4, early)
