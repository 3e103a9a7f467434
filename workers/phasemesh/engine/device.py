"""The device: which one, which dtype it computes in, and what its errors mean.

Invariant: nothing but a `ComputeFailed` or a `DeviceLost` leaves a forward pass.
"""

from __future__ import annotations

import torch

from phasemesh.engine.errors import DeviceLost, ModelLoadError
from phasemesh.pool.protocol import ComputeFailed

#: Lowest compute capability with bfloat16 matrix units (Ampere).
_BF16_CAPABILITY = (8, 0)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: cuBLAS reports a failed allocation of its workspace under its own name.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE_ERRORS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")


def pick_device(name: str) -> torch.device:
    """Torch's device for "auto", "cpu", "cuda", "cuda:1", "mps" or "xpu".

    Raises:
        ModelLoadError: torch doesn't know it or can't reach it.
    """
    if name == "auto":
        name = next((kind for kind in ("cuda", "xpu", "mps") if _available(kind)), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device: torch knows no {name!r}; use auto, cpu, cuda, xpu or mps") from error
    if device.type != "cpu" and not _available(device.type):
        raise ModelLoadError(f"device: {name!r} isn't available to this torch; use auto or cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Torch's dtype for a `ModelSpec.dtype`; "auto" is bfloat16 where it's faster, else float32.

    Raises:
        ModelLoadError: the name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype: {name!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products beat float32 ones.

    On CPUs that takes AMX or AVX512-BF16. With the latter alone (Zen 4), MiniLM on one core takes 7.4 instead
    of 10.8 ms for 16 tokens and 291 instead of 541 ms for 16 x 128; without either it's far slower.
    """
    if device.type == "cuda":
        return bool(torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY)
    if device.type == "cpu":
        found = torch.cpu.get_capabilities()
        return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
    return False


def translate(error: Exception) -> Exception:
    """What to raise in place of `error`, which torch raised in a forward pass.

    `DeviceLost` for errors after which CUDA answers nothing else, `ComputeFailed` for the rest.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(t in text for t in _OUT_OF_MEMORY):
        return ComputeFailed(f"out of memory: {text}", out_of_memory=True)
    if isinstance(error, torch.AcceleratorError) or any(t in text for t in _DEVICE_ERRORS):
        return DeviceLost(text)
    return ComputeFailed(f"{type(error).__name__}: {text}")


def free_cached_memory(device: torch.device) -> None:
    """Give the allocator's unused blocks back, so that a smaller batch finds room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _available(kind: str) -> bool:
    if kind == "cuda":
        return bool(torch.cuda.is_available())
    if kind == "xpu":
        return bool(torch.xpu.is_available())
    return bool(torch.backends.mps.is_available()) if kind == "mps" else kind == "cpu"
