"""Prints the pip arguments that get a torch fitting this machine. Knows nothing of the package; standard library only.

On PyPI the Linux torch is the CUDA build, about 3 GB with its libraries. A machine without an NVIDIA GPU is better served by
PyTorch's own CPU index. That index is named only when it answers, so that a mirror, a proxy or local wheels stay in charge elsewhere.
"""

from __future__ import annotations

import shutil
import sys
import urllib.error
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_TO_ANSWER = 5.0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/torch/", timeout=SECONDS_TO_ANSWER) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def main(requirement: str) -> str:
    has_gpu = shutil.which("nvidia-smi") is not None
    is_linux = sys.platform.startswith("linux")
    if is_linux and not has_gpu and answers(CPU_INDEX):
        return f"{requirement} --extra-index-url {CPU_INDEX}"
    return requirement


if __name__ == "__main__":
    print(main(sys.argv[1]))
