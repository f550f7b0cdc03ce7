"""Asks the application of `phalanx serve` with the pages of phalanx-fleet."""

from pathlib import Path

import pytest

from fake_nodes import FakeNodeBackend
from phalanx.serve.access import Access
from phalanx_fleet.pages import fleet_pages
from phalanx_fleet.pages.fleet_pages import FleetPageOptions, FleetPages, NodeActions
from serve_browser import Browser


class FleetBrowser(Browser):
    """A browser of a server whose backend has the nodes n1 to n4."""

    def __init__(self, folder: Path, access: Access, patch: pytest.MonkeyPatch):
        self.node_backend = FakeNodeBackend()

        def make_actions(access: Access, backend: str, fleet: Path | None) -> NodeActions:
            return NodeActions(access, backend, fleet, lambda name: self.node_backend)  # type: ignore[arg-type, return-value]

        patch.setattr(fleet_pages, "NodeActions", make_actions)
        self.pages = FleetPages(FleetPageOptions())
        super().__init__(folder, access, [self.pages])
