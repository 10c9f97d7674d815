"""Make the virtual environment of a clone: pip, torch, then the packages that were asked for.

Run by the Makefile with the Python that the environment is for; it needs only the standard library.
It works where Debian leaves ensurepip out (no python3-venv), takes the CPU build of torch where no
NVIDIA driver is, and leaves no half-made environment behind: one whose pip fails is made anew.

Usage: python dev/environment.py FOLDER REQUIREMENT [--torch cpu|cuda]
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path
from urllib.parse import urldefrag, urljoin

TOP = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT_S = 5.0
# What `make quickstart` takes with each, the model included: x86_64, Python 3.11, 2026-11-16.
CPU_SIZE = "0.5 GB to download, 2 GB on disk"
CUDA_SIZE = "3 GB to download, 6 GB on disk"
CPU_GB, CUDA_GB = 3, 7
"""Free disk that an installation needs, with room for pip's temporary files."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("requirement", help="what to install from the clone, e.g. .[local]")
    parser.add_argument("--torch", choices=("cpu", "cuda"), help="default: cuda with a driver")
    args = parser.parse_args()
    python = args.folder / "bin" / "python"
    if not works(python):
        make(args.folder)
    install_torch(python, args.torch)
    say(f"Installing {args.requirement}")
    pip(python, "-e", args.requirement)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def refuse(line: str) -> None:
    """End with a message for a person, without a traceback."""
    raise SystemExit(f"Error: {line}")


def works(python: Path) -> bool:
    """Whether this environment has a pip that runs, for the version of Python that runs us."""
    program = "import pip, platform; print(platform.python_version())"
    try:
        run = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return run.stdout.strip() == platform.python_version()


def make(folder: Path) -> None:
    """Make an empty environment with pip in it, or leave no folder at all."""
    if os.path.lexists(folder) and not (folder / "pyvenv.cfg").exists():
        refuse(
            f"{folder} is there and is no virtual environment. Move it away and type this again."
        )
    say(f"Making {folder} with Python {platform.python_version()} ({sys.executable})")
    try:
        venv.create(folder, clear=True, symlinks=True, with_pip=False)
        python = folder / "bin" / "python"
        if importlib.util.find_spec("ensurepip"):
            subprocess.run([python, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
        else:
            say("This Python has no ensurepip (on Debian: python3-venv); taking pip from PyPI")
            install_pip(python)
        pip(python, "--upgrade", "pip")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def install_pip(python: Path) -> None:
    """Fetch pip's wheel from the package index and let it install itself: a wheel can be run."""
    package = "python{}.{}-venv".format(*sys.version_info[:2])
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = fetch_pip(Path(folder))
        except (OSError, ValueError) as exc:
            refuse(
                f"pip could not be fetched ({exc}). Set PIP_INDEX_URL or https_proxy if your "
                f"network has an index or a proxy of its own, or type: sudo apt install {package}"
            )
        subprocess.run([python, wheel / "pip", "install", "-q", "--no-index", wheel], check=True)


def fetch_pip(folder: Path) -> Path:
    """The newest wheel of pip, checked against the digest that the index gives."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    links = re.findall(
        r'href="((?:[^"]+/)?pip-([0-9.]+)-py3-none-any\.whl#sha256=\w+)"', read(index)
    )
    if not links:
        raise ValueError(f"{index} lists no wheel of pip")
    link, _ = max(links, key=lambda found: [int(part) for part in found[1].split(".")])
    url, fragment = urldefrag(urljoin(index, link))
    wheel = folder / url.rsplit("/", 1)[1]
    wheel.write_bytes(open_url(url, timeout_s=60).read())
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != fragment.removeprefix("sha256="):
        raise ValueError(f"{url} has another digest than its index says")
    return wheel


def read(url: str) -> str:
    return open_url(url, timeout_s=60).read().decode()


def open_url(url: str, timeout_s: float):
    """Open a URL as pip would: through the environment's proxies, with its certificates."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    return urllib.request.urlopen(url, timeout=timeout_s, context=context)


def install_torch(python: Path, build: str | None) -> None:
    """Install the CPU build where there is no NVIDIA driver, unless a build was asked for."""
    if run_pip(python, "--no-index", "torch", stderr=subprocess.DEVNULL):
        return  # There, and as constraints.txt has it.
    # Without pip's cache: it would keep everything a second time.
    build = build or ("cuda" if has_nvidia_driver() else "cpu")
    if build == "cuda":
        check_disk(CUDA_GB)
        say(f"Installing torch with CUDA (in all {CUDA_SIZE})")
        pip(python, "torch", "--no-cache-dir")
    elif answers(CPU_INDEX + "/torch/"):
        check_disk(CPU_GB)
        say(f"Installing torch's CPU build (in all {CPU_SIZE})")
        pip(python, "torch", "--no-cache-dir", "--extra-index-url", CPU_INDEX)
    else:
        check_disk(CUDA_GB)
        say(
            f"Installing torch. PyTorch's index of CPU builds did not answer within "
            f"{CPU_INDEX_TIMEOUT_S:g} s, so torch comes from your package index; "
            f"PyPI's build brings CUDA along (in all {CUDA_SIZE})"
        )
        pip(python, "torch", "--no-cache-dir")


def has_nvidia_driver() -> bool:
    places = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(os.path.exists(place) for place in places)


def answers(url: str) -> bool:
    try:
        with open_url(url, timeout_s=CPU_INDEX_TIMEOUT_S):
            return True
    except OSError:
        return False


def check_disk(needed_gb: int) -> None:
    free_gb = shutil.disk_usage(TOP).free / 1e9
    if free_gb < needed_gb:
        refuse(f"{TOP} has {free_gb:.1f} GB of free disk; this installation needs {needed_gb} GB.")


def pip(python: Path, *args: str) -> None:
    if not run_pip(python, *args):
        refuse(f"pip could not install {' '.join(args)}; its own message stands above.")


def run_pip(python: Path, *args: str, stderr: int | None = None) -> bool:
    command = [python, "-m", "pip", "install", "-q", "-c", "constraints.txt", *args]
    return subprocess.run(command, cwd=TOP, stderr=stderr, check=False).returncode == 0


if __name__ == "__main__":
    main()
