"""Boots a small machine that has RDMA (Soft-RoCE) and NBD, and runs tests in it: `make vm-test`.

No RDMA hardware and no kernel module of the host's is needed: QEMU emulates a PC on which Debian's
stock kernel runs, the host's root is its root (9p, read-only), so that interpreter, packages and
this checkout are the host's. Built once per kernel and list of modules, kept under build/vm.
Emulation is slow: what it measures means nothing. What is compiled is compiled here before.

Where a prerequisite is missing this says which and is skipped (status 0; with --require, 1).
Debian: qemu-system-x86 busybox-static cpio kmod iproute2 python3-pyverbs ibverbs-providers
nbd-client memcached e2fsprogs.

Not part of `.ci/run`: it needs packages that only root can install, a kernel of 70 MB, and on two
busy cores each part takes minutes, of which processes spend most on starting: `--part` chooses.
"""

import argparse
import contextlib
import gzip
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from slackwater.common.transport.verbs.library import library_found

ROOT = Path(__file__).resolve().parent.parent.parent
BUILT = ROOT / "build" / "vm"
BUSYBOX = Path("/bin/busybox")
TOOLS = (
    "qemu-system-x86_64", "cpio", "depmod", "modprobe", "dpkg-deb", "apt-get", "rdma", "nbd-client",
    "mke2fs", "memcached",
)  # fmt: skip
MODULES = (
    "virtio_pci", "9pnet_virtio", "9p", "overlay", "crc32_generic", "veth", "ib_uverbs", "rdma_rxe",
    "nbd", "brd", "crc32c_generic", "ext4",
)  # fmt: skip
MEMORY_MIB = 3072
SOURCES = ("common", "schemas", "services", "loadgen", "src", "tests")
PASSED = 1
"""qemu's status where the job's was 0."""
CASES = "verbs and not (uvloop and domains)"
"""Cases of the conformance suite: windows on both event loops, domains on one."""
PARTS = {
    "conformance": f'tests/unit/common/transport/test_conformance.py -k "{CASES}"',
    "refusals": "tests/vm/test_verbs_refusals.py",
    "live": "tests/vm/test_verbs_live.py",
    "role": "--noconftest tests/vm/test_rdma_role.py",
    "swap": "tests/vm/test_swap.py",
}
"""Swap is the last: what goes wrong there may leave processes that cannot be killed."""


class Missing(Exception):
    """A prerequisite."""


def check_tools() -> None:
    """Raises Missing."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if not BUSYBOX.exists():
        lacking.append(str(BUSYBOX))
    if not library_found():
        lacking.append("pyverbs for this interpreter")
    if lacking:
        raise Missing(f"{', '.join(lacking)} (Debian: see the head of tests/vm/guest.py)")
    os.environ["PATH"] = path


def run(*command: str, cwd: Path | None = None, limit_s: float = 300.0) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise Missing(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def kernel() -> Path:
    """A folder with `vmlinuz` and `modules/`, in the order of loading. Raises Missing."""
    depends = run("apt-cache", "depends", "linux-image-amd64")
    names = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image" in line]
    if not names:
        raise Missing("apt knows no linux-image-amd64: apt-get update")
    key = hashlib.sha256(" ".join(MODULES).encode()).hexdigest()[:8]
    made = BUILT / f"{names[0]}-{key}"
    if (made / "vmlinuz").exists():
        return made
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as name:
        work = Path(name)
        run("apt-get", "download", names[0], cwd=work)
        [package] = work.glob("*.deb")
        run("dpkg-deb", "-x", str(package), str(work / "root"))
        [version] = [path.name for path in (work / "root/lib/modules").iterdir()]
        run("depmod", "-b", str(work / "root"), version)
        (work / "made/modules").mkdir(parents=True)
        for number, module in enumerate(load_order(work / "root", version)):
            shutil.copy(module, work / f"made/modules/{number:03}-{module.name}")
        shutil.copy(work / f"root/boot/vmlinuz-{version}", work / "made/vmlinuz")
        shutil.rmtree(made, ignore_errors=True)
        (work / "made").rename(made)
    return made


def load_order(root: Path, version: str) -> list[Path]:
    found: dict[Path, None] = {}
    for module in MODULES:
        for line in run("modprobe", "-d", str(root), "-S", version, "-D", module).splitlines():
            word, *rest = line.split()
            if word == "insmod":
                found[Path(rest[0])] = None
    return list(found)


def initrd(made: Path, job: str) -> Path:
    """The first file system: busybox, the modules, init and the job."""
    with tempfile.TemporaryDirectory(dir=BUILT) as name:
        tree = Path(name)
        for folder in ("bin", "proc", "sys", "dev", "host", "layer", "root"):
            (tree / folder).mkdir()
        shutil.copytree(made / "modules", tree / "modules")
        shutil.copy(BUSYBOX, tree / "bin/busybox")
        shutil.copy(ROOT / "tests/vm/init.sh", tree / "init")
        (tree / "job").write_text(job)
        files = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        packed = subprocess.run(
            ("cpio", "-o", "-H", "newc", "--quiet"),
            cwd=tree,
            input=files.encode(),
            capture_output=True,
            check=True,
        )
    target = made / "initrd"
    target.write_bytes(gzip.compress(packed.stdout, 1))
    return target


def compile_all() -> None:
    """Bytecode, and kernels for a plain processor here: the emulated one would take minutes."""
    lines = (
        "from slackwater.cli.compile import pages, streams",
        "pages()",
        "streams()",
        "from slackwater.common.domains.slots import folding, kernels",
        "kernels.warm('momentum', 'float32', 2)",
        "kernels.warm('momentum', 'float32', 1)",
    )
    environment = {**os.environ, **numba_settings()}
    command = (sys.executable, "-c", "\n".join(lines))
    subprocess.run((sys.executable, "-m", "compileall", "-q", *SOURCES), cwd=ROOT, check=True)
    subprocess.run(command, env=environment, timeout=1200, check=True)


def numba_settings() -> dict[str, str]:
    return {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(BUILT / "numba"),
    }


def job_script(parts: Mapping[str, str], limit_s: float) -> str:
    """Return the script that runs in the guest: every part, also after a failed one."""
    settings = {
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SLACKWATER_TEST_PATIENCE": "10",
        "SLACKWATER_VM": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **numba_settings(),
    }
    binaries = Path(sys.executable).parent
    lines = [
        f"export PATH={binaries}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
        f"cd {shlex.quote(str(ROOT))}",
        "status=0",
        "slackwater doctor --json | tr -d '\\n' && echo",
    ]
    for title, arguments in parts.items():
        lines += [
            f"echo '== {title}'",
            f"timeout {limit_s:.0f} python -m pytest -q --color=no -p no:cacheprovider {arguments}"
            " --durations=3 || status=1",
        ]
    return "\n".join([*lines, "exit $status", ""])


def boot(made: Path, first: Path, limit_s: float) -> int:
    """qemu's status. Its console is shown as it comes; it is killed at the deadline."""
    command = (
        "qemu-system-x86_64", "-machine", "q35", "-cpu", "max",
        "-accel", os.environ.get("SLACKWATER_VM_ACCEL", "tcg,thread=multi"),
        "-m", str(MEMORY_MIB), "-smp", "2", "-display", "none", "-no-reboot", "-nodefaults",
        "-serial", "stdio", "-kernel", str(made / "vmlinuz"), "-initrd", str(first),
        "-append", "console=ttyS0 quiet panic=-1 mitigations=off net.ifnames=0",
        "-device", "isa-debug-exit,iobase=0xf4,iosize=0x01",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
    )  # fmt: skip
    machine = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return machine.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        sys.stdout.write(f"\nvm-test: not done after {limit_s:.0f} s\n")
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            machine.kill()
        machine.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run tests of verbs and swap in an emulated machine."
    )
    parser.add_argument("tests", nargs="*", help="pytest arguments; without, all parts")
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="this part alone; may be repeated"
    )
    parser.add_argument("--require", action="store_true", help="fail where this cannot run")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="deadline of the guest")
    options = parser.parse_args()
    begun_s = time.monotonic()
    try:
        check_tools()
        made = kernel()
    except Missing as error:
        sys.stdout.write(f"vm-test is skipped, missing: {error}\n")
        return int(options.require)
    compile_all()
    parts = {name: PARTS[name] for name in options.part or PARTS}
    if options.tests:
        parts = {"chosen tests": shlex.join(options.tests)}
    first = initrd(made, job_script(parts, options.limit_s))
    sys.stdout.write(f"vm-test: built in {time.monotonic() - begun_s:.0f} s, booting\n")
    sys.stdout.flush()
    status = boot(made, first, options.limit_s)
    verdict = "passed" if status == PASSED else f"FAILED (qemu's status {status})"
    sys.stdout.write(f"vm-test {verdict} after {time.monotonic() - begun_s:.0f} s\n")
    return int(status != PASSED)


if __name__ == "__main__":
    sys.exit(main())
