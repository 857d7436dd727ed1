# SPDX-License-Identifier: Apache-2.0
"""Virtual environments for the peers, and kvferry's own build. What is there already is used again."""
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "kvferry" / "peers"

# Without its dependencies, of which NIXL's are several GB and not needed for host memory.
PEERS = {
    "nixl": {"packages": ["nixl-cu12", "numpy"], "module": "nixl_cu12", "libraries": []},
    "mooncake": {"packages": ["mooncake-transfer-engine-non-cuda", "numpy"], "module": "mooncake.engine",
                 "libraries": ["libibverbs1", "libnuma1", "libcurl4"]},
    "plot": {"packages": ["matplotlib"], "module": "matplotlib", "libraries": []},
}


class NotInstalled(Exception):
    """Why a peer is not there."""


def say(text):
    print(f"[peers] {text}", file=sys.stderr, flush=True)


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800, **options)
    if done.returncode != 0:
        raise NotInstalled(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}")
    return done.stdout


def system_libraries(packages):
    missing = [p for p in packages if shutil.which("dpkg-query") and subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", p], capture_output=True, text=True).stdout != "installed"]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise NotInstalled(f"please install {' '.join(missing)}")
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    say(f"installing with apt-get: {' '.join(missing)}")
    run(*sudo, "apt-get", "install", "-q", "-y", "--no-install-recommends", *missing,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def environment(name):
    """The Python of a virtual environment that has a peer; made when it is not there."""
    wanted = PEERS[name]
    system_libraries(wanted["libraries"])
    folder, python = CACHE / name, CACHE / name / "bin" / "python"
    marker = folder / "installed"
    if not marker.exists() or marker.read_text() != repr(wanted["packages"]):
        say(f"installing {' '.join(wanted['packages'])} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        no_deps = [] if name == "plot" else ["--no-deps"]
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *no_deps, *wanted["packages"])
        # A wheel that does not load is as good as none. os._exit: some crash in a destructor.
        run(python, "-c", f"import {wanted['module']}, os; os._exit(0)")
        marker.write_text(repr(wanted["packages"]))
    return python


def versions(python):
    """Packages of an environment with their versions."""
    listed = run(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    skip = ("pip==", "setuptools==")
    return [line for line in listed.split() if not line.startswith(skip)]


def kvferry_bench():
    """kvferry-bench of this source tree, release profile."""
    build = CACHE / "kvferry-build"
    say(f"building kvferry-bench in {build}")
    run("cmake", "-S", ROOT, "-B", build, "-DKVFERRY_BUILD_TESTS=OFF", "-DKVFERRY_BUILD_EXAMPLES=OFF",
        *(["-G", "Ninja"] if shutil.which("ninja") else []))
    run("cmake", "--build", build, "--target", "kvferry-bench", "--parallel", os.cpu_count() or 1)
    return build / "bin" / "kvferry-bench"
