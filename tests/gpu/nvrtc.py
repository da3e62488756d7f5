"""NVIDIA's run-time compiler, which needs no GPU, by ctypes: what cupy would compile.

Only for tests. The wheels nvidia-cuda-nvrtc (CUDA 13) and nvidia-cuda-nvrtc-cu12 carry it.
"""

import ctypes
import ctypes.util
import importlib.util
from pathlib import Path

import pytest


def libraries() -> list[str]:
    """Find the libraries of installed wheels, else the system's."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(
        str(path)
        for folder in folders
        for path in Path(folder).glob("*/lib/libnvrtc.so.*")
        if "alt" not in path.name
    )
    system = ctypes.util.find_library("nvrtc")
    return found or ([system] if system else [])


class Nvrtc:
    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        array = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(array))
        return list(array)

    def compile(self, text: str, architecture: int, options: tuple[str, ...]) -> tuple[str, bytes]:
        """(PTX, machine code) for sm_<architecture>. Fails the test with the compiler's words."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), b"fold.cu", 0, None, None
            )
        )
        given = [*options, "--std=c++17", f"--gpu-architecture=sm_{architecture}"]
        array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        result = self._library.nvrtcCompileProgram(program, len(given), array)
        if result:
            pytest.fail(self._bytes(program, "nvrtcGetProgramLog").decode())
        ptx = self._bytes(program, "nvrtcGetPTX").rstrip(b"\0").decode()
        code = self._bytes(program, "nvrtcGetCUBIN")
        self._check(self._library.nvrtcDestroyProgram(ctypes.byref(program)))
        return ptx, code

    def _bytes(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        sizer = getattr(self._library, f"{getter}Size")
        self._check(sizer(program, ctypes.byref(size)))
        into = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, getter)(program, into))
        return into.raw

    @staticmethod
    def _check(result: int) -> None:
        assert result == 0, f"nvrtc answered {result}"


def all_found() -> list[Nvrtc]:
    """Skips the test where there is none."""
    found = [Nvrtc(path) for path in libraries()]
    if not found:
        pytest.skip(
            "no libnvrtc: pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12"
        )
    return found
