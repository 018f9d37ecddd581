"""Compiles the kernels once with the machine's own compiler and keeps the result in the cache."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import filelock
import platformdirs
import structlog
import torch

log = structlog.get_logger(__name__)

SOURCE = Path(__file__).parent / "src"
PATH_VARIABLE = "TOKENTAPE_KERNEL_PATH"
"""Environment variable that forces a kernel path: amx, vnni, avx2 or portable."""

STEP_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# One object per instruction set; contraction is off so that all of them give the same bits.
SETS = {
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mamx-tile -mamx-int8 "
    "-mprefer-vector-width=512",
    "avx2": "-mavx2 -mfma",
    "portable": "",
}


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message has the compiler's last lines."""


def cache_dir() -> Path:
    """Where built kernels are kept: $TOKENTAPE_CACHE/kernels, else below the user cache."""
    root = os.environ.get("TOKENTAPE_CACHE") or platformdirs.user_cache_dir("tokentape")
    return Path(root) / "kernels"


def compiler() -> str | None:
    """The C++ compiler to use ($CXX, g++, clang++, c++), or None."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _commands(cxx: str, out: Path) -> tuple[list[list[str]], list[str]]:
    """The compile commands (any order) and the link command."""
    root = Path(torch.__file__).parent
    include = [f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    common = ["-fPIC", "-fvisibility=hidden"]
    ops = ["-std=c++20", "-O1", "-fopenmp", abi, *include, *common]
    compile_ = [[cxx, *ops, "-c", str(SOURCE / "ops.cpp"), "-o", str(out / "ops.o")]]
    sets = SETS if platform.machine() in ("x86_64", "AMD64") else {"portable": ""}
    for name, flags in sets.items():
        step = [cxx, *STEP_FLAGS, *common, *flags.split(), f"-DISA={name}"]
        compile_.append([*step, "-c", str(SOURCE / "step.cpp"), "-o", str(out / f"{name}.o")])
    objects = [str(out / f"{name}.o") for name in ("ops", *sets)]
    lib = root / "lib"
    # torch's own OpenMP runtime: a second one would bring a second pool of threads.
    libraries = [f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch", *map(str, sorted(lib.glob("libgomp*.so*")))]
    return compile_, [cxx, "-shared", "-fopenmp", *objects, *libraries, "-o", str(out / "kernels.so")]


def _key(cxx: str) -> str:
    """Names a build: sources, flags, torch, compiler and processor family."""
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256()
    commands = _commands("", Path())
    for part in (version, torch.__version__, sys.version, platform.machine(), repr(commands)):
        digest.update(part.encode())
    for source in sorted(SOURCE.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate()
    if process.returncode:
        raise BuildError(output[-2000:] or f"compiler exit {process.returncode}")


def build() -> Path:
    """Returns the built library, compiling it first if the cache has none. Raises BuildError or OSError."""
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found")
    target = cache_dir() / f"kernels-{_key(cxx)}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Who comes second waits and has it for nothing, rather than for a minute of every core again.
    with filelock.FileLock(target.parent.with_suffix(".lock")):
        if not target.exists():
            _compile(cxx, target)
    return target


def _compile(cxx: str, target: Path) -> None:
    started = time.monotonic()
    log.info("kernels_compiling", compiler=cxx, into=str(target))
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        compile_, link = _commands(cxx, Path(directory))
        running = [_run(command) for command in compile_]
        try:
            for process in running:
                _finish(process)
        finally:
            for process in running:
                process.kill()
                process.wait()
        _finish(_run(link))
        (Path(directory) / "kernels.so").replace(target)  # whole or not at all
    log.info("kernels_compiled", seconds=round(time.monotonic() - started, 1))


@functools.cache
def load() -> str:
    """Builds and loads the kernels once a process and returns the build's name; empty, with one logged line,
    where that is impossible."""
    try:
        library = build()
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        if forced := os.environ.get(PATH_VARIABLE):
            torch.ops.tokentape.use_path(forced)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        log.warning("kernels_unavailable", error=str(error), instead="torch operators")
        return ""
    log.info("kernels_loaded", paths=torch.ops.tokentape.paths())
    return library.stem
