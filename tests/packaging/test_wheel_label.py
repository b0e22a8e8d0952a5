"""The wheel of one torch: the same libraries under another name, in a folder that pip can read."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs the extra `matrix`: pip install -e '.[matrix]'")
pytest.importorskip("elftools", reason="needs the extra `matrix`: pip install -e '.[matrix]'")

from index import write_index
from label import labelled, main, parse_label
from make_wheels import labels_of
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version
from wheel_archive import WheelError, read_wheel, with_header, write_wheel, wrong_hashes

from tests.packaging.wheels_made_up import fat_wheel
from tests.rules.tree import ROOT


def test_a_label_changes_the_name_the_pin_and_nothing_that_was_tested(tmp_path: Path) -> None:
    path = write_wheel(labelled(fat_wheel(), parse_label("cu130-torch2.11"), "https://example.org/whl"), tmp_path)
    assert path.name == "magi_attention-1.2.0+cu130torch2.11-py3-none-manylinux_2_28_x86_64.whl"
    assert parse_wheel_filename(path.name)[1] == Version("1.2.0+cu130torch2.11")
    assert wrong_hashes(path) == []
    made, fat = read_wheel(path), fat_wheel()
    assert made.requirements() == ["torch==2.11.*", "numpy>=1.24", 'matplotlib>=3.7; extra == "plot"']
    metadata = made.text(f"{made.dist_info}/METADATA")
    assert "\nVersion: 1.2.0+cu130torch2.11\n" in metadata and "\nVersion: of the text below" in metadata
    assert '__version__ = "1.2.0+cu130torch2.11"' in made.text("magi_attention/_version.py")
    build = json.loads(made.text("magi_attention/_build.json"))
    assert (build["torch"], build["version"], build["index"]) == ("2.11", "1.2.0+cu130torch2.11", "https://example.org/whl")
    assert set(build["libraries"]) == {"_solver.so", "_cu13/_ffa.so"}
    for name in ("_solver.so", "_cu13/_ffa.so"):
        assert made.members[f"magi_attention/{name}"] == fat.members[f"magi_attention/{name}"]
    assert not [name for name in made.members if "_cu12" in name]
    assert {name.split("/")[0] for name in made.members} == {"magi_attention", "magi_attention-1.2.0+cu130torch2.11.dist-info"}


def test_a_development_version_keeps_its_revision() -> None:
    fat = fat_wheel()
    fat = type(fat)(fat.name, Version("1.3.0.dev7+gabc123"), fat.tags, fat.members)
    assert str(labelled(fat, parse_label("cu128-torch2.10")).version) == "1.3.0.dev7+gabc123.cu128torch2.10"


def test_a_vendors_torch_is_pinned_to_the_letter() -> None:
    made = labelled(fat_wheel(), parse_label("cu130-torch2.11.0a0+nv26.02"))
    assert str(made.version) == "1.2.0+cu130torch2.11.0a0.nv26.2"  # a number, as PEP 440 writes it
    requirement = Requirement(made.requirements()[0])
    assert requirement.specifier.contains("2.11.0a0+nv26.02", prereleases=True)
    assert not requirement.specifier.contains("2.11.0a0+nv26.03", prereleases=True)


@pytest.mark.parametrize("text", ["cu13-torch2.11", "cu130-torch2", "2.11", "cu130-torch2.11 ", "cu130-torch2.11.0", ""])
def test_other_labels_are_refused(text: str) -> None:
    with pytest.raises(WheelError, match="must be like cu130"):
        parse_label(text)


def test_what_cannot_be_labelled_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WheelError, match=r"no kernels for CUDA 11"):
        labelled(fat_wheel(), parse_label("cu118-torch2.7"))
    with pytest.raises(WheelError, match=r"is for torch 2\.10 already"):
        labelled(fat_wheel(torch="2.10"), parse_label("cu130-torch2.11"))
    path = write_wheel(fat_wheel(), tmp_path)
    assert main([str(path), "--label", "cu110-torch2.11", "--out", str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err
    assert main([str(path), "--label", "cu130-torch2.11", "--label", "cu128-torch2.10", "--out", str(tmp_path / "whl")]) == 0
    assert {made.parent.name for made in (tmp_path / "whl").rglob("*.whl")} == {"cu130-torch2.11", "cu128-torch2.10"}


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    first, second = (write_wheel(fat_wheel(), tmp_path / name).read_bytes() for name in "ab")
    assert first == second
    with zipfile.ZipFile(tmp_path / "a" / fat_wheel().file_name) as archive:
        modes = {item.filename: item.external_attr >> 16 & 0o777 for item in archive.infolist()}
    assert modes["magi_attention/_solver.so"] == 0o755 and modes["magi_attention/__init__.py"] == 0o644


def test_a_changed_member_is_found(tmp_path: Path) -> None:
    path = write_wheel(fat_wheel(), tmp_path)
    with zipfile.ZipFile(path) as archive:
        members = {item: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for item, content in members.items():
            archive.writestr(item, content + b"#" if item.filename.endswith("_version.py") else content)
    assert wrong_hashes(path) == ["magi_attention/_version.py"]


def test_headers_are_replaced_in_place() -> None:
    text = "A: 1\nB: 2\nB: 3\nC: 4\n\nB: body\n"
    assert with_header(text, "B", ["5"]) == "A: 1\nB: 5\nC: 4\n\nB: body\n"
    assert with_header(text, "D", ["6", "7"]) == "A: 1\nB: 2\nB: 3\nC: 4\nD: 6\nD: 7\n\nB: body\n"


def test_pip_finds_the_wheel_in_its_index_folder(tmp_path: Path) -> None:
    folder = tmp_path / "whl" / "cu130-torch2.11"
    write_wheel(labelled(fat_wheel(), parse_label("cu130-torch2.11")), folder)
    assert write_index(folder) == ["magi-attention"]
    options = ["--no-deps", "--no-cache-dir", "--isolated", "--index-url", folder.as_uri(), "-d", str(tmp_path / "got")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *options, "magi-attention"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == [path.name for path in folder.glob("*.whl")]
    assert 'data-requires-python="&gt;=3.10"' in (folder / "magi-attention" / "index.html").read_text()


def test_labels_are_those_of_the_matrix() -> None:
    matrix = ROOT / "ci" / "matrix.yaml"
    both = labels_of(matrix, ("12", "13"), [])
    assert {label.major for label in both} == {"12", "13"} and len({label.torch for label in both}) == len(both)
    assert all(label.major == "13" for label in labels_of(matrix, ("13",), []))
    some = both[-1]
    assert labels_of(matrix, (some.major,), [some.torch]) == (some,)
    assert labels_of(matrix, ("13",), ["cu130-torch2.11.0a0+nv26.02"])[0].torch == "2.11.0a0+nv26.02"
    with pytest.raises(WheelError, match=r"ci/matrix\.yaml has"):
        labels_of(matrix, ("13",), ["9.9"])
