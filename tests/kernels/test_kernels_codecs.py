"""Codes are those of the documented rotation and quantiser, bit for bit, on every path and from every thread; their
errors are true upper bounds; what has no code is refused by document."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels import brute

pk = pytest.importorskip(
    "phasemesh_kernels", reason="phasemesh-kernels isn't installed (pip install ./workers/kernels)"
)

relaxed = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 160, 272, 320, 384, 768]
FLOATS = st.sampled_from([np.float16, np.float32, np.float64])


def vectors(seed: int, tokens: int, dim: int) -> brute.Doubles:
    """Random directions of length 1, the first of them along an axis (the worst for a quantiser without rotation)."""
    rows = np.random.default_rng(seed).standard_normal((tokens, dim))
    rows[:1] = np.eye(1, dim)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_the_numbers_are_splitmix64() -> None:
    # The published reference implementation's first numbers for the seed 1234567.
    numbers = brute.SplitMix64(1234567)
    assert [numbers.number() for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 320, 768])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_rotation_is_orthogonal_without_any_rounding(dim: int, seed: int) -> None:
    rotation = brute.rotation(dim, seed)
    matrix = rotation.forward(np.eye(dim))
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(dim))
    np.testing.assert_array_equal(rotation.backward(matrix), np.eye(dim))


def golden(dim: int) -> brute.Floats:
    return np.array([[(7 * i * i + 3 * i) % 11 - 5 for i in range(dim)]], np.float32) / 16


GOLDEN = {
    ("int8", 16, 0): "888c64989c68904cc0946c68947868a4",
    (
        "int8",
        48,
        5,
    ): "999f5950b87083848350c5d144aec6e461c5a8855c4bcbc8a94fbefd884d55407a9ed9746e818074aa6a7baa72905371",
    ("int4", 16, 0): "e8a9555aaa7559b2",
    ("int4", 48, 5): "ca3be4f38d26381878b3fe6f628c7f6fc45e7bc864923f6f",
}


@pytest.mark.parametrize(("codec", "dim", "seed"), GOLDEN)
def test_golden_codes(codec: str, dim: int, seed: int, isas: list[str]) -> None:
    # As numpy computed them from the documentation.
    for isa in isas:
        encoded = pk.encode(golden(dim), codec, seed=seed, scales=False, isa=isa)
        assert encoded.codes.tobytes().hex() == GOLDEN[codec, dim, seed]


@relaxed
@given(
    seed=st.integers(0, 2**64 - 1),
    tokens=st.integers(0, 50),
    dim=st.sampled_from(DIMS),
    codec=st.sampled_from(brute.CODECS),
    dtype=FLOATS,
    power=st.integers(-12, 12),
)
def test_codes_are_those_of_the_documentation(
    seed: int, tokens: int, dim: int, codec: str, dtype: Any, power: int, isas: list[str]
) -> None:
    rows = vectors(seed, tokens, dim).astype(dtype)
    single = rows.astype(np.float32)
    wanted = brute.encode(single, codec, seed)
    for isa in isas:
        encoded = pk.encode(rows, codec, seed=seed, scales=False if codec in brute.INTEGER else None, isa=isa)
        assert (encoded.codec, encoded.dim, encoded.seed, encoded.scales) == (codec, dim, seed, None)
        assert encoded.codes.dtype == brute.DTYPES[codec]
        np.testing.assert_array_equal(encoded.codes, wanted)
        assert encoded.refused == ()
        assert encoded.errors is None
    decoded = pk.decode(wanted, codec, seed=seed)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, brute.decode(wanted, codec, seed))
    if codec in brute.INTEGER:
        # Powers of two change the scale and nothing else.
        kept = pk.encode(single * np.float32(2.0**power), codec, seed=seed, scales=True)
        lengths = np.sqrt(np.cumsum(single.astype(np.float64) ** 2, axis=1)[:, -1])
        np.testing.assert_array_equal(kept.scales, (lengths * 2.0**power).astype(np.float32))
        kept_at_one = pk.encode(single, codec, seed=seed, scales=True)
        np.testing.assert_array_equal(kept.codes, kept_at_one.codes)
        again = pk.decode(kept.codes, codec, seed=seed, scales=kept.scales)
        np.testing.assert_array_equal(again, brute.decode(kept.codes, codec, seed, kept.scales))


@relaxed
@given(
    seed=st.integers(0, 2**32),
    dim=st.sampled_from(DIMS),
    codec=st.sampled_from(brute.CODECS),
    dtype=FLOATS,
    size=st.sampled_from([1.0, 1.001, 0.01, 30.0, 1e-3]),
    scales=st.sampled_from([None, True, False]),
)
def test_errors_are_upper_bounds(
    seed: int, dim: int, codec: str, dtype: Any, size: float, scales: bool | None, isas: list[str]
) -> None:
    rows = (vectors(seed, 40, dim) * size).astype(dtype)
    integer = codec in brute.INTEGER
    first = None
    for isa in isas:
        encoded = pk.encode(rows, codec, seed=seed, scales=scales if integer else None, errors=True, isa=isa)
        assert encoded.errors.dtype == np.float32
        lengths = np.ones(40) if encoded.scales is None else encoded.scales.astype(np.float64)
        # Decoded without rounding, and as the library does it.
        exact = pk.decode(encoded.codes, codec).astype(np.float64)
        if integer:
            values = brute.integers(encoded.codes, codec) * float(brute.step(codec, dim))
            exact = brute.rotation(dim, seed).backward(values) * lengths[:, None]
        rounded = pk.decode(encoded.codes, codec, seed=seed, scales=encoded.scales).astype(np.float64)
        for decoded in (exact, rounded):
            error = np.linalg.norm(rows.astype(np.float64) - decoded, axis=1) / lengths
            assert (error <= encoded.errors).all()
            # And no more than rounding above.
            slack = 1e-4 * (1 + size) + error * 1e-4
            assert (encoded.errors <= error + slack).all()
        if first is not None:
            np.testing.assert_array_equal(encoded.errors, first)
        first = encoded.errors


def test_quantisation_is_as_good_as_a_uniform_quantiser_gets() -> None:
    # Max, Quantizing for minimum distortion, 1960, table II: 16 levels of a Gaussian, 0.01154 of its variance.
    rows = vectors(3, 400, 1024).astype(np.float32)[1:]
    losses = {}
    for codec in brute.INTEGER:
        encoded = pk.encode(rows, codec)
        losses[codec] = float(((pk.decode(encoded.codes, codec) - rows) ** 2).sum(axis=1).mean())
    assert losses["int4"] == pytest.approx(0.01154, rel=0.05)
    # Bennett, Spectra of quantized signals, 1948: the square of a fine step over 12; little is clipped.
    assert losses["int8"] == pytest.approx(1024 * float(brute.step("int8", 1024)) ** 2 / 12, rel=0.02)


def test_a_seed_is_needed_to_read_and_gives_other_codes() -> None:
    rows = vectors(4, 5, 64).astype(np.float32)
    codes = [pk.encode(rows, seed=seed).codes for seed in (0, 1)]
    assert (codes[0] != codes[1]).mean() > 0.9
    assert np.abs(pk.decode(codes[1], "int8", seed=1) - rows).max() < 0.02
    assert np.abs(pk.decode(codes[1], "int8", seed=0) - rows).max() > 0.1


@pytest.mark.parametrize("codec", brute.CODECS)
def test_threads_change_nothing(codec: str) -> None:
    rows = (np.random.default_rng(5).standard_normal((30_011, 16)) * 3).astype(np.float32)
    one = pk.encode(rows, codec, errors=True)
    for threads in (2, 5, 2**31 - 1):
        many = pk.encode(rows, codec, errors=True, threads=threads)
        np.testing.assert_array_equal(many.codes, one.codes)
        np.testing.assert_array_equal(many.errors, one.errors)
        if codec in brute.INTEGER:
            np.testing.assert_array_equal(many.scales, one.scales)
        decoded = pk.decode(one.codes, codec, scales=one.scales, threads=threads)
        np.testing.assert_array_equal(decoded, pk.decode(one.codes, codec, scales=one.scales))


@pytest.mark.parametrize("codec", brute.INTEGER)
def test_scales_are_kept_where_some_token_is_not_of_unit_length(codec: str) -> None:
    rows = vectors(6, 9, 96).astype(np.float32)
    assert pk.encode(rows, codec).scales is None
    assert pk.encode(rows.astype(np.float16), codec).scales is None
    assert pk.encode(rows, codec, scales=True).scales is not None
    rows[8] *= 1.01
    assert pk.encode(rows, codec, scales=False).scales is None
    scales = pk.encode(rows, codec).scales
    np.testing.assert_allclose(scales, [1] * 8 + [1.01], rtol=1e-6)


@pytest.mark.parametrize("codec", ["bf16", "f16", "f32"])
def test_float_codecs_keep_no_scales(codec: str) -> None:
    rows = vectors(7, 9, 96).astype(np.float32) * 5
    encoded = pk.encode(rows, codec)
    assert encoded.scales is None
    np.testing.assert_allclose(pk.decode(encoded.codes), rows, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("codec", brute.CODECS)
@pytest.mark.parametrize("scales", [None, True])
def test_documents_without_a_code_are_refused(codec: str, dtype: Any, scales: bool | None) -> None:
    if scales and codec not in brute.INTEGER:
        return
    offsets = np.array([0, 3, 3, 7, 8, 12])
    good = vectors(8, 12, 32).astype(dtype)
    rows = good.copy()
    rows[5, 31] = np.nan
    rows[6] = 0
    rows[8, 0] = -np.inf
    rows[9, 0] = np.nan
    wanted = (pk.Refused(2, 5, "not_finite"), pk.Refused(4, 8, "not_finite"))
    with pytest.raises(pk.EncodeError, match=r"document 2\b.*token 5\b.*finite") as caught:
        pk.encode(rows, codec, offsets=offsets, scales=scales)
    assert isinstance(caught.value, ValueError)
    assert caught.value.refused == wanted
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.refused) == (str(caught.value), wanted)

    encoded = pk.encode(rows, codec, offsets=offsets, scales=scales, refused="skip", errors=True)
    assert encoded.refused == wanted
    kept = np.array([0, 1, 2, 7])
    whole = pk.encode(good, codec, scales=scales, errors=True)
    np.testing.assert_array_equal(encoded.codes[kept], whole.codes[kept])
    np.testing.assert_array_equal(encoded.errors[kept], whole.errors[kept])
    others = np.setdiff1d(np.arange(12), kept)
    assert not encoded.codes[others].any()
    assert not encoded.errors[others].any()
    if scales:
        np.testing.assert_array_equal(encoded.scales[kept], whole.scales[kept])
        assert not encoded.scales[others].any()


@pytest.mark.parametrize("codec", brute.CODECS)
def test_a_vector_without_a_direction_is_refused(codec: str) -> None:
    rows = vectors(9, 4, 32)
    rows[2] = 0
    wanted = (pk.Refused(2, 2, "zero_norm"),)
    with pytest.raises(pk.EncodeError, match=r"document 2\b.*token 2\b.*zero") as caught:
        pk.encode(rows, codec)
    assert caught.value.refused == wanted
    assert pk.encode(rows, codec, refused="skip").refused == wanted


def test_values_that_a_float_codec_cannot_hold_are_refused() -> None:
    rows = vectors(10, 3, 16)
    for codec, largest in (("f16", 65504.0), ("bf16", 3.3895313892515355e38), ("f32", 3.4028234663852886e38)):
        rows[1, 3] = largest
        assert pk.encode(rows, codec).codes.shape == (3, 16)
        rows[1, 3] = largest * 1.01
        with pytest.raises(pk.EncodeError) as caught:
            pk.encode(rows, codec)
        assert caught.value.refused == (pk.Refused(1, 1, "not_finite"),)


def test_tokens_outside_every_document_refuse_nobody() -> None:
    rows = vectors(11, 6, 16).astype(np.float32)
    rows[[0, 5], 3] = np.nan
    encoded = pk.encode(rows, offsets=[1, 3, 5], scales=False)
    assert encoded.refused == ()
    np.testing.assert_array_equal(encoded.codes[1:5], brute.encode(rows[1:5], "int8"))


def test_nothing_to_encode() -> None:
    for codec in brute.CODECS:
        encoded = pk.encode(np.zeros((0, 32), np.float32), codec, offsets=[0, 0], errors=True)
        assert len(encoded.codes) == len(encoded.errors) == 0
        assert pk.decode(encoded.codes, codec).shape == (0, 32)


@relaxed
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=16, max_size=16),
    codec=st.sampled_from(["bf16", "f16"]),
)
def test_every_16_bit_float_decodes_to_its_value(bits: list[int], codec: str) -> None:
    halves = np.array([bits], np.uint16)
    codes = halves if codec == "bf16" else halves.view(np.float16)
    np.testing.assert_array_equal(pk.decode(codes), brute.decode(codes, codec))


def test_what_is_read_only_and_mapped_is_encoded(tmp_path: Any) -> None:
    rows = vectors(12, 20, 32).astype(np.float16)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    np.testing.assert_array_equal(pk.encode(mapped).codes, pk.encode(rows).codes)
