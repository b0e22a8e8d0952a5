"""Every example runs as a user would run it, the training demo with small numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (REPO / "examples").glob("[0-9]*.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(*command: str, cwd: Path = REPO) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_every_numbered_example_has_a_test() -> None:
    assert EXAMPLES == ["01_masks.py", "02_single_device.py", "03_plan_many_ranks.py", "04_two_ranks.py", "05_train_long_context.py"]


def test_masks(tmp_path: Path) -> None:
    printed = run("examples/01_masks.py", "--out", str(tmp_path))
    assert "causal_documents: 3 slices" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["causal_documents.png", "sliding_window.png", "video.png"]


def test_single_device() -> None:
    assert "largest error against float64" in run("examples/02_single_device.py")


def test_plan_many_ranks() -> None:
    printed = run("examples/03_plan_many_ranks.py", "--ranks", "16")
    imbalance = {line.split()[0]: float(line.split()[5]) for line in printed.splitlines()[1:]}
    assert imbalance["min_heap"] <= 1.02 < imbalance["contiguous"]


def test_two_ranks() -> None:
    assert "dv  equals one device" in run(*TORCHRUN, "examples/04_two_ranks.py")


def test_training_demo(tmp_path: Path) -> None:
    arguments = ["--ranks", "2", "--steps", "2", "--seq-len", "640", "--window", "64", "--out", str(tmp_path / "out")]
    printed = run("examples/05_train_long_context.py", *arguments)
    assert "parity PASS" in printed
    drawn = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {"mask_documents.png", "mask_window.png", "owners.png", "work_per_rank.png", "traffic.png", "loss.png"}


def test_training_demo_on_one_text_file(tmp_path: Path) -> None:
    """Also other documents, learning rate and seed than the default; one rank, as two ranks are the test above."""
    text = tmp_path / "text.unusual"
    text.write_bytes(bytes(range(256)) * 4)
    arguments = ["--data", str(text), "--ranks", "1", "--steps", "1", "--seq-len", "300", "--window", "40", "--lr", "0.5", "--seed", "3"]
    printed = run("examples/05_train_long_context.py", *arguments, "--out", str(tmp_path / "out"))
    assert "2 documents of 150 to 150 tokens" in printed and "parity PASS" in printed


@pytest.mark.parametrize("content", [None, b""])
def test_training_demo_refuses_a_folder_without_text(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "empty.txt").write_bytes(content)
    command = [sys.executable, "examples/05_train_long_context.py", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    finished = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert finished.returncode != 0
    assert "text file" in finished.stderr and "Traceback" not in finished.stderr
