"""The reference pages say what the code says: `make docs` writes them."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "tools" / "reference.py")
assert spec is not None
assert spec.loader is not None
reference = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = reference
spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_reference_page_is_up_to_date(name: str) -> None:
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run `make docs`"


def test_the_reference_page_of_phalanx_fleet_is_up_to_date() -> None:
    assert (reference.FLEET_FOLDER / "cli.md").read_text() == reference.fleet_cli_page(), "run `make docs`"


def test_every_kind_of_event_has_its_section_with_its_fields() -> None:
    page = reference.events_page()
    for kind, event_type in reference.EVENT_TYPES.items():
        section = page.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        for field in reference.dataclasses.fields(event_type):
            assert field.name == "time" or f"| `{field.name}` |" in section


def test_what_people_import_from_phalanx_is_on_the_page() -> None:
    import phalanx

    page = reference.python_page()
    assert [name for name in phalanx.__all__ if name != "__version__" and f"### phalanx.{name}\n" not in page] == []
