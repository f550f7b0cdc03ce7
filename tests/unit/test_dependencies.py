"""Every dependency has its reason in docs/reference/dependencies.md, is locked, and stands in the wheel's bill."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TRACKER_EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio")
FLEET = tomllib.loads((ROOT / "fleet" / "pyproject.toml").read_text())["project"]
DEVELOPMENT = (
    *("tokenizers", "pyarrow", "images", "huggingface", "kubernetes", "ray"),
    *("serve", *TRACKER_EXTRAS),
    *("build", "dev"),
)
LOCK = (ROOT / "requirements.lock").read_text()
spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
assert spec is not None
assert spec.loader is not None
hatch_build = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = hatch_build  # dataclasses look it up
spec.loader.exec_module(hatch_build)


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [one for extra in project["project"]["optional-dependencies"].values() for one in extra]
    fleet = [*FLEET["dependencies"], *FLEET["optional-dependencies"]["dev"]]
    needed = [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"], *fleet]
    names = {re.split(r"[\[<>=!~; ]", one)[0] for one in needed} - {"phalanx"}
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    rows = [
        line.split("|")[1] for line in page.splitlines() if line.startswith("| ") and not line.startswith("| package |")
    ]
    assert {name.strip() for row in rows for name in row.split(",")} == names


def test_every_package_that_is_locked_has_its_version_and_the_hashes_of_its_files() -> None:
    blocks = [block for block in re.split(r"\n(?=[a-z0-9])", LOCK) if not block.startswith("#")]
    assert len(blocks) > 100
    for block in blocks:
        assert re.match(r"[a-z0-9.-]+==[^ ]+ ", block), block
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
    assert "://" not in LOCK  # from whichever index there is


def test_what_is_locked_is_what_development_declares_but_for_torch() -> None:
    locked = {
        one.name: {each.version for each in hatch_build.locked_in(LOCK) if each.name == one.name}
        for one in hatch_build.locked_in(LOCK)
    }
    fleet = [*FLEET["dependencies"], *FLEET["optional-dependencies"]["dev"]]
    for text in [*PROJECT["dependencies"], *(one for name in DEVELOPMENT for one in EXTRAS[name]), *fleet]:
        requirement = Requirement(text)
        if requirement.name not in ("phalanx", "torch"):
            versions = locked[canonicalize_name(requirement.name)]
            assert all(requirement.specifier.contains(version) for version in versions), f"{text}: `make lock`"
    # builds of torch differ from index to index, so do what they need of a GPU
    assert not [name for name in locked if name.startswith(("torch", "nvidia", "cuda", "triton"))]


def test_a_wheel_holds_a_bill_of_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        bill = json.loads(archive.read("phalanx-0.1.0.dist-info/sboms/phalanx.cdx.json"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components = {(each["name"], each.get("version")): each for each in bill["components"]}
    assert components["torch", "2.13.0"]["scope"] == "required"
    assert components["torch", "2.13.0"]["properties"] == [{"name": "phalanx:declared", "value": "torch<2.16,>=2.11"}]
    scopes = {name: each["scope"] for (name, _), each in components.items()}
    assert (scopes["annotated-types"], scopes["ray"], scopes["nvidia-ml-py"]) == ("required", "optional", "optional")
    assert not scopes.keys() & {"pytest", "ruff", "hatchling"}
    references = {each["bom-ref"] for each in bill["components"]}
    graph = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert graph.keys() == references | {"pkg:pypi/phalanx@0.1.0"}
    assert {one for needed in graph.values() for one in needed} == references  # nothing hangs in the air
    assert any(one.startswith("pkg:pypi/pydantic-core@") for ref in graph if "/pydantic@" in ref for one in graph[ref])
