"""The extension module. Private: sizes are checked, but types are what `_arguments` makes them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

version: str

class Cancelled(RuntimeError):
    """The work was called off."""

class CancelToken:
    """Ends work from another thread: give it as `cancel`, call `cancel()`."""

    def __init__(self) -> None: ...
    def cancel(self) -> None:
        """End the work that was given this token, within milliseconds, and all that will be."""
    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""

def encode(
    tokens: npt.NDArray[np.floating],
    codec: str,
    seed: int,
    offsets: npt.NDArray[np.int64] | None,
    scales: bool | None,
    errors: bool,
    threads: int,
    isa: str,
) -> tuple[
    npt.NDArray[np.uint8],
    npt.NDArray[np.float32] | None,
    npt.NDArray[np.float32] | None,
    list[tuple[int, int, str]],
]: ...
def decode(
    codes: npt.NDArray[np.uint8],
    codec: str,
    seed: int,
    scales: npt.NDArray[np.float32] | None,
    threads: int,
) -> npt.NDArray[np.float32]: ...
def maxsim(
    queries: list[npt.NDArray[np.float32]],
    codes: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    codec: str,
    seed: int,
    scales: npt.NDArray[np.float32] | None,
    range: tuple[int, int] | None,
    indices: npt.NDArray[np.int64] | None,
    mask: npt.NDArray[np.uint8] | None,
    mean: bool,
    argmax: bool,
    threads: int,
    cancel: CancelToken | None,
    checkpoint: Callable[[], object] | None,
    isa: str,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | None]: ...
def exact_maxsim(
    query: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int64],
    scan_query: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint8],
    codec: str,
    seed: int,
    scales: npt.NDArray[np.float32] | None,
    spread: npt.NDArray[np.float64],
    reach: npt.NDArray[np.float64],
    mean: bool,
    cancel: CancelToken | None,
    checkpoint: Callable[[], object] | None,
    isa: str,
) -> npt.NDArray[np.float64]: ...
def topk(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]: ...
def query_errors(query: npt.NDArray[np.float32], codec: str, seed: int) -> npt.NDArray[np.float32]: ...
def stream_read(data: npt.NDArray[np.uint8], threads: int, repeats: int, isa: str) -> float: ...
def multiply_rate(threads: int, repeats: int, isa: str) -> float: ...
def levels() -> list[str]: ...
def features() -> dict[str, bool]: ...
def resolve(isa: str) -> str: ...
def path(codec: str, level: str) -> str: ...
