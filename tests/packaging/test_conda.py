"""The conda recipe and the plan of its local build. Nothing is built here: bash ci/conda.sh does that."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

import yaml
from conda import plan, stand_ins
from conda.plan import PlanError
from matrix.cells import Torch

from tests.rules.tree import ROOT

RECIPE = ROOT / "recipe"


def recipe() -> dict[str, object]:
    content = yaml.safe_load((RECIPE / "recipe.yaml").read_text())
    assert isinstance(content, dict)
    return content


def outputs() -> dict[str, dict[str, object]]:
    listed = recipe()["outputs"]
    assert isinstance(listed, list)
    return {output["package"]["name"]: output for output in listed}


def test_variants_are_block_lists() -> None:
    """conda-build takes the brackets of an inline list for a selector and drops the values."""
    lines = (RECIPE / "conda_build_config.yaml").read_text().splitlines()
    assert not [line for line in lines if re.search(r"[\[\]{}]", line.split("#")[0])]
    values = [line.strip()[2:] for line in lines if re.match(r"\s*- \S", line)]
    unquoted = [value for value in values if re.match(r"[\d.]+$", value)]
    assert not unquoted, f"{unquoted} would be read as numbers: 2.10 is 2.1"


def test_variants_build_for_the_torch_of_the_matrix() -> None:
    assert plan.missing_torch_lines() == ()


def test_torch_lines_are_written_from_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "conda_build_config.yaml"
    text = (RECIPE / "conda_build_config.yaml").read_text()
    copy.write_text(text.replace('  - "2.11"\n', "").replace("pytorch:\n", 'pytorch:\n  - "2.99"\n'))
    monkeypatch.setattr(plan, "RECIPE", tmp_path)
    assert plan.missing_torch_lines() == ("2.11", "2.99")
    assert plan.write_torch_lines()
    assert copy.read_text() == text
    assert not plan.write_torch_lines()


def test_zipped_variants_have_one_length() -> None:
    content = yaml.safe_load((RECIPE / "conda_build_config.yaml").read_text())
    for keys in content["zip_keys"]:
        assert len({len(content[key]) for key in keys}) == 1
        assert "cuda_compiler_version" in keys


def test_build_strings_say_cuda_and_torch() -> None:
    found = {name: str(output["build"]["string"]) for name, output in outputs().items()}  # type: ignore[index]
    assert set(found) == {"libmagi-attention", "magi-attention"}
    assert found["magi-attention"].startswith("cuda${{ cuda }}_torch")
    assert "torch" not in found["libmagi-attention"], "the compiled part serves every torch"


def test_the_solver_is_told_what_it_chooses_by() -> None:
    requirements = outputs()["magi-attention"]["requirements"]
    assert isinstance(requirements, dict)
    assert any(str(line).startswith("__cuda >=") for line in requirements["run_constraints"])
    assert "pytorch * cuda*" in requirements["run"] and any(str(line).startswith("pytorch ${{ pytorch }}") for line in requirements["host"])
    assert '${{ pin_subpackage("libmagi-attention", exact=true) }}' in requirements["run"]
    assert all(output["requirements"]["run_exports"] for output in outputs().values())  # type: ignore[index]


def test_every_output_is_tested_without_a_gpu() -> None:
    for name, output in outputs().items():
        assert output["tests"], name
    assert "python -m magi_attention.selftest" in str(outputs()["magi-attention"]["tests"])


def test_files_of_the_recipe_are_there() -> None:
    text = (RECIPE / "recipe.yaml").read_text()
    for name in ("build.sh", "test_library.py"):
        assert name in text and (RECIPE / name).is_file()
    for name in ("LICENSE", "licenses/NVIDIA-CUDA-runtime.md"):
        assert f"- {name}\n" in text and (ROOT / name).is_file()


def test_build_script_refuses_an_output_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").touch()
    done = subprocess.run(
        ["bash", str(RECIPE / "build.sh")],
        env={"PATH": "/usr/bin:/bin", "PKG_NAME": "other", "BUILD_PREFIX": "/nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "error: build.sh knows no output other; recipe.yaml has libmagi-attention and magi-attention\n"


def test_one_place_per_cuda_variant_by_default() -> None:
    found = plan.places(every=False)
    assert [place.cuda for place in found] == plan.recipe_variants()["cuda_compiler_version"]
    assert len({place.python for place in found}) == 1
    assert all(place.torch.cuda.split(".")[0] == place.cuda.split(".")[0] for place in found)
    assert set(found) < set(plan.places(every=True))


def test_a_python_without_torch_is_refused_in_a_sentence() -> None:
    with pytest.raises(PlanError, match=r"no torch for CUDA 12\.9 on a Python 3\.13"):
        plan.places(every=False, pythons=["3.13"])


def test_torch_stands_for_the_variant_of_its_cuda_major() -> None:
    assert plan.variant_of(Torch("2.10.0", "cu128")) == "12.9"
    assert plan.variant_of(Torch("2.15.0", "cu132")) == "13.0"
    assert plan.variant_of(Torch("2.13.0", "cpu")) is None
    assert plan.variant_of(Torch("2.3.0", "cu118")) is None


def test_stand_in_of_torch_pins_like_the_real_one() -> None:
    tree = stand_ins.PythonTree("3.12.1", Path("/python"))
    real = stand_ins.pytorch(stand_ins.TorchFolder("2.11.0", "13.0", tree, Path("/torch")))
    assert real["requirements"]["run_exports"]["weak"] == ["pytorch >=2.11.0,<2.12.0a0", "pytorch * cuda*"]
    assert "cuda-version >=13.0,<14" in real["requirements"]["run"] and "__cuda" in real["requirements"]["run"]
    empty = stand_ins.pytorch(stand_ins.TorchFolder("2.11.0", "13.0", tree, None))
    assert "script" not in empty["build"] and empty["build"]["number"] < real["build"]["number"]
