"""Runs inside an environment and prints one JSON object: what is installed, what the package says, how long imports take.

Standard library only; it must not know where the package's sources are.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import time

BUILD_PROGRAMS = ("gcc", "g++", "cc", "c++", "nvcc", "git", "cmake", "ninja", "make")


def main() -> None:
    start = time.perf_counter()
    import torch

    after_torch = time.perf_counter()
    import magi_attention
    import magi_attention.api

    after_package = time.perf_counter()
    info = magi_attention.build_info()
    print(
        json.dumps(
            {
                "python": sys.version.split()[0],
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda,
                "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
                "file": magi_attention.__file__,
                "version": magi_attention.__version__,
                "requires": importlib.metadata.requires("magi-attention"),
                "build_info": info,
                "build_programs": [name for name in BUILD_PROGRAMS if shutil.which(name)],
                "import_torch_s": round(after_torch - start, 3),
                "import_package_s": round(after_package - after_torch, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
