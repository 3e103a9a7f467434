"""Tensors: bytes that protobuf itself would make, numbers that torch would make, no nonsense decoded."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from phasemesh.errors import InvalidArgument
from phasemesh.rpc.codec import decode_tensor, encode_tensor
from phasemesh.v1.common_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_FLOAT16,
    DTYPE_FLOAT32,
    DTYPE_INT8,
    VECTOR_ENCODING_BFLOAT16,
    VECTOR_ENCODING_FLOAT16,
    VECTOR_ENCODING_FLOAT32,
    VECTOR_ENCODING_UNSPECIFIED,
    Tensor,
)

SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=9)
# Every bit pattern: NaNs, infinities, subnormals, both zeros.
FLOAT32_BITS = hnp.arrays(np.uint32, SHAPES, elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@given(FLOAT32_BITS)
def test_readable_is_byte_identical_to_a_list(array: NDArray[np.float32]) -> None:
    plain = Tensor(dtype=DTYPE_FLOAT32, shape=array.shape)
    # Not tolist(): a Python float of a signalling NaN is quiet.
    finite = np.nan_to_num(array)
    plain.values.extend(finite.ravel().tolist())
    ours = encode_tensor(finite, VECTOR_ENCODING_UNSPECIFIED)
    assert ours.SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)
    assert ours == plain


@pytest.mark.parametrize("encoding", [VECTOR_ENCODING_UNSPECIFIED, VECTOR_ENCODING_FLOAT32])
@given(array=FLOAT32_BITS)
def test_float32_comes_back_bit_by_bit(encoding: Any, array: NDArray[np.float32]) -> None:
    over_the_wire = Tensor.FromString(encode_tensor(array, encoding).SerializeToString())
    back = decode_tensor(over_the_wire, field="t")
    if encoding == VECTOR_ENCODING_FLOAT32:
        assert same_bits(back, array)
    else:
        np.testing.assert_array_equal(back, array)


@given(FLOAT32_BITS)
def test_bfloat16_rounds_as_torch_does(array: NDArray[np.float32]) -> None:
    tensor = encode_tensor(array, VECTOR_ENCODING_BFLOAT16)
    assert tensor.dtype == DTYPE_BFLOAT16
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16)
    numbers = ~np.isnan(array)
    ours = np.frombuffer(tensor.data, np.uint16).reshape(array.shape)
    theirs = expected.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])
    back = decode_tensor(tensor, field="t")
    np.testing.assert_array_equal(back, expected.float().numpy())


@given(hnp.arrays(np.float32, SHAPES, elements=st.floats(-65504, 65504, width=32)))
def test_float16_rounds_as_torch_does(array: NDArray[np.float32]) -> None:
    tensor = encode_tensor(array, VECTOR_ENCODING_FLOAT16)
    back = decode_tensor(tensor, field="t")
    assert same_bits(back, torch.from_numpy(array.copy()).half().numpy())


def test_float16_never_overflows_silently() -> None:
    with pytest.raises(InvalidArgument) as raised:
        encode_tensor(np.array([[1.0, 70000.0]], np.float32), VECTOR_ENCODING_FLOAT16)
    assert (raised.value.field, raised.value.reason) == ("encoding", "FLOAT16_OVERFLOW")
    kept = encode_tensor(np.array([np.inf], np.float32), VECTOR_ENCODING_FLOAT16)
    assert decode_tensor(kept, field="t")[0] == np.inf


def test_any_layout_and_byte_order_is_packed_row_major() -> None:
    array = np.arange(24, dtype=">f8").reshape(4, 6)[::2].T
    for encoding in (VECTOR_ENCODING_UNSPECIFIED, VECTOR_ENCODING_FLOAT32, VECTOR_ENCODING_BFLOAT16):
        np.testing.assert_array_equal(decode_tensor(encode_tensor(array, encoding), field="t"), array)
    assert encode_tensor(array, VECTOR_ENCODING_FLOAT32).data == array.astype("<f4").tobytes("C")


def test_no_rows() -> None:
    for encoding in (0, 1, 2, 3):
        back = decode_tensor(encode_tensor(np.zeros((0, 5), np.float32), encoding), field="t")  # type: ignore[arg-type]  # every encoding's number
        assert back.shape == (0, 5)


@pytest.mark.parametrize("shape", [(), (2, 0), (1,) * 9])
def test_what_has_no_tensor(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no tensor"):
        encode_tensor(np.zeros(shape, np.float32), VECTOR_ENCODING_FLOAT32)


def test_unknown_encoding() -> None:
    with pytest.raises(InvalidArgument) as raised:
        encode_tensor(np.zeros(1, np.float32), 17)  # type: ignore[arg-type]  # what a newer peer may send
    assert raised.value.field == "encoding"


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (Tensor(), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, data=b"1234"), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[1] * 9, data=b"1234"), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[1] * 100_000, data=b"1234"), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[1, 0], data=b""), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[2], data=b"1234"), "query.data"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[1], data=b"12345"), "query.data"),
        (Tensor(dtype=DTYPE_FLOAT16, shape=[1], data=b"1234"), "query.data"),
        (Tensor(dtype=DTYPE_BFLOAT16, shape=[3], data=b"1234"), "query.data"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[0], data=b"1234"), "query.data"),
        # 2**64 elements: 0 in 64-bit arithmetic, as is 2**62 times 4 bytes.
        (Tensor(dtype=DTYPE_FLOAT32, shape=[2**16] * 4, data=b"1234"), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[2**31, 2**31], data=b"1234"), "query.data"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[2**32 - 1, 2**30], values=[1.0]), "query.values"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[0, 2**32 - 1, 2**32 - 1, 2**32 - 1]), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[2**32 - 1] * 8, values=[1.0]), "query.shape"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[2], values=[1.0]), "query.values"),
        (Tensor(dtype=DTYPE_FLOAT16, shape=[1], values=[1.0]), "query.dtype"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[1], values=[1.0], data=b"1234"), "query"),
        (Tensor(dtype=DTYPE_FLOAT32, shape=[1]), "query"),
        (Tensor(shape=[1], data=b"1234"), "query.dtype"),
        (Tensor(dtype=DTYPE_INT8, shape=[4], data=b"1234"), "query.dtype"),
        (Tensor(dtype=99, shape=[4], data=b"1234"), "query.dtype"),  # type: ignore[arg-type]  # what a newer peer may send
    ],
)
def test_nonsense_is_refused_by_field(tensor: Tensor, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        decode_tensor(Tensor.FromString(tensor.SerializeToString()), field="query")
    assert raised.value.field == field
    assert field in raised.value.message


@settings(max_examples=300)
@given(
    st.builds(
        Tensor,
        dtype=st.integers(0, 6),
        shape=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=9),
        data=st.binary(max_size=24),
        values=st.lists(st.floats(width=32), max_size=4),
    )
)
def test_decode_gives_the_stated_shape_or_refuses(tensor: Tensor) -> None:
    with contextlib.suppress(InvalidArgument):
        assert decode_tensor(tensor, field="t").shape == tuple(tensor.shape)


def test_readable_costs_little_more_than_bytes() -> None:
    array = np.random.default_rng(0).standard_normal((32, 1024), dtype=np.float32)

    def median_s(run: Callable[[], object], rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def extend() -> bytes:
        tensor = Tensor(dtype=DTYPE_FLOAT32, shape=array.shape)
        tensor.values.extend(array.ravel())
        return tensor.SerializeToString()

    packed = median_s(lambda: encode_tensor(array, VECTOR_ENCODING_FLOAT32).SerializeToString(), 101)
    readable = median_s(lambda: encode_tensor(array, VECTOR_ENCODING_UNSPECIFIED).SerializeToString(), 101)
    naive = median_s(extend, 11)
    assert readable <= 10 * packed
    assert naive >= 5 * readable
